"""Step 3 of 10: all tokens of a corpus as one flat stream on disk, read through memory maps.

corpus -> tokenizer -> **token store** -> sample order -> DataModule -> GPT -> LitGPT -> Trainer

    data/factbook-bpe4096-1f0c55e2a0b7/
        tokenizer.json
        part-0001-of-0001/
            tokens.bin           uint16 (uint32 from 65,537 ids on), little-endian: document, end token, document, end token ...
            document_ends.bin    int64: where each document's tokens end, its end token included
            document_bytes.bin   int64: UTF-8 bytes of each document
            items.bin            per work item: SHA-256 of its tokens and documents, number of tokens, number of documents
            meta.json            schema, hashes, counts; written last

`store_build.py` writes this; jobs of an array write one part each. Here the parts are read as one stream. Block length,
train/validation split and order are no business of the store: any of them reads from the same one.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from lit_gpt_loop.tokenizer import TextTokenizer, load_tokenizer

SCHEMA = 1
_PART = re.compile(r"part-(\d{4,})-of-(\d{4,})")
ITEM_DTYPE = np.dtype([("sha256", "V32"), ("tokens", "<i8"), ("documents", "<i8")])


@dataclass(frozen=True)
class PartMeta:
    """meta.json of one part; counts are those of the part."""

    schema: int
    part: int
    num_parts: int
    corpus: str
    source_key: str
    tokenizer: str
    tokenizer_sha256: str
    end_token: str | None
    eot_id: int
    vocab_size: int
    dtype: str
    tokens: int
    documents: int
    empty_documents: int
    text_bytes: int
    items: int
    tokens_sha256: str

    @classmethod
    def read(cls, folder: Path) -> "PartMeta":
        """Read the meta file of a part.

        Raises:
            ValueError: another schema, or no JSON.
        """
        path = folder / "meta.json"
        try:
            values = json.loads(path.read_text())
            schema = values.get("schema")
        except (json.JSONDecodeError, AttributeError) as e:
            raise ValueError(f"{path} is not a store's meta file ({e}): {_again(folder.parent)}") from None
        if schema != SCHEMA:
            raise ValueError(
                f"{path} has schema {schema}, this version reads schema {SCHEMA}: {_again(folder.parent)}"
            )
        missing = sorted({f.name for f in fields(cls)} - set(values))
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}: {_again(folder.parent)}")
        return cls(**{f.name: values[f.name] for f in fields(cls)})

    def to_json(self) -> str:
        """Return the content of meta.json."""
        return json.dumps(asdict(self), indent=2) + "\n"


def _again(store: Path) -> str:
    return f"remove {store} and prepare it again (`python -m recipes.prepare --help`)."


def part_name(part: int, num_parts: int) -> str:
    """Return the folder name of a part, counted from 1."""
    return f"part-{part:04d}-of-{num_parts:04d}"


def find_parts(store: Path) -> dict[int, set[int]]:
    """Return {number of parts: finished parts} of what lies in a store's folder."""
    found: dict[int, set[int]] = {}
    for folder in store.iterdir() if store.is_dir() else ():
        if (match := _PART.fullmatch(folder.name)) and (folder / "meta.json").is_file():
            found.setdefault(int(match[2]), set()).add(int(match[1]))
    return found


def complete_parts(store: Path) -> int | None:
    """Return the number of parts of the smallest complete set, None if there is none."""
    return min((n for n, have in find_parts(store).items() if have >= set(range(1, n + 1))), default=None)


@dataclass(frozen=True)
class _Segment:
    """One part: memory maps (None if empty), opened per process."""

    tokens: np.ndarray
    ends: np.ndarray
    document_bytes: np.ndarray


def _map(path: Path, dtype: str | np.dtype, length: int, store: Path) -> np.ndarray:
    wanted = length * np.dtype(dtype).itemsize
    actual = path.stat().st_size if path.is_file() else -1
    if actual != wanted:
        state = "is missing" if actual < 0 else f"has {actual} bytes"
        raise ValueError(
            f"the token store is damaged: {path} {state}, its meta file says {wanted}: {_again(store)}"
        )
    # A plain array over the map: slices of np.memmap itself take several times as long.
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray) if length else np.zeros(0, dtype=dtype)


class TokenStore:
    """A finished store, opened for reading.

    Args:
        path: the store's folder.

    Raises:
        FileNotFoundError: no such folder, or parts are missing; the message names them.
        ValueError: truncated or damaged files, parts that do not belong together, another tokenizer than the one it names.

    Attributes:
        num_tokens: end tokens included.
        num_documents: documents that hold at least one token.
        empty_documents: documents that were skipped since they are empty or white space only.
        text_bytes: UTF-8 bytes of the documents.
        fingerprint: SHA-256 over all tokens, documents and the tokenizer; equal however many parts, processes or batches.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        num_parts = complete_parts(self.path)
        if num_parts is None:
            raise FileNotFoundError(self._explain_missing())
        folders = [self.path / part_name(i, num_parts) for i in range(1, num_parts + 1)]
        metas = [PartMeta.read(folder) for folder in folders]
        self.meta = metas[0]
        for folder, meta in zip(folders, metas, strict=True):
            for key in ("num_parts", "source_key", "tokenizer_sha256", "dtype", "eot_id", "vocab_size"):
                if getattr(meta, key) != getattr(self.meta, key):
                    raise ValueError(
                        f"{folder} does not belong to {folders[0]}: its {key} is {getattr(meta, key)!r}, "
                        f"not {getattr(self.meta, key)!r}. Prepare all parts from the same corpus with the same arguments."
                    )
        self.dtype = np.dtype(self.meta.dtype)
        self.eot_id, self.vocab_size = self.meta.eot_id, self.meta.vocab_size
        self.num_tokens = sum(m.tokens for m in metas)
        self.num_documents = sum(m.documents for m in metas)
        self.empty_documents = sum(m.empty_documents for m in metas)
        self.text_bytes = sum(m.text_bytes for m in metas)
        self._counts = [(m.tokens, m.documents) for m in metas]
        self._folders = folders
        self._token_starts = np.cumsum([0, *(m.tokens for m in metas)])
        self._document_starts = np.cumsum([0, *(m.documents for m in metas)])
        self._segments: list[_Segment] | None = None
        items = [
            _map(f / "items.bin", ITEM_DTYPE, m.items, self.path) for f, m in zip(folders, metas, strict=True)
        ]
        digest = hashlib.sha256(f"{SCHEMA} {self.meta.tokenizer_sha256} {self.dtype.str}".encode())
        for part in items:
            digest.update(np.asarray(part).tobytes())
        self.fingerprint = digest.hexdigest()
        self._open()  # finds a truncated file now rather than in the middle of a run
        self.tokenizer = self._load_tokenizer()

    def _explain_missing(self) -> str:
        if not self.path.is_dir():
            return f"there is no token store {self.path}: prepare it with `python -m recipes.prepare`."
        for n, have in sorted(find_parts(self.path).items()):
            missing = sorted(set(range(1, n + 1)) - have)
            shown = ", ".join(map(str, missing[:10])) + (" ..." if len(missing) > 10 else "")
            return (
                f"the token store {self.path} has {len(have)} of {n} parts, missing: {shown}. "
                f"Run `python -m recipes.prepare --part I/{n}` with the same arguments for each of them."
            )
        return f"the folder {self.path} holds no finished token store: prepare it with `python -m recipes.prepare`."

    def _load_tokenizer(self) -> TextTokenizer:
        tokenizer = load_tokenizer(self.path / "tokenizer.json", self.meta.end_token)
        self.check_tokenizer(tokenizer.sha256, f"its own {self.path / 'tokenizer.json'}")
        return tokenizer

    def check_tokenizer(self, sha256: str, name: str) -> None:
        """Raise ValueError unless the store was written with the tokenizer of that hash."""
        if sha256 != self.meta.tokenizer_sha256:
            raise ValueError(
                f"the token store {self.path} was written with the tokenizer {self.meta.tokenizer} "
                f"(SHA-256 {self.meta.tokenizer_sha256[:16]}...), not with {name} (SHA-256 {sha256[:16]}...). "
                f"Use that tokenizer, or prepare a store with this one."
            )

    def _open(self) -> list[_Segment]:
        if self._segments is None:
            self._segments = [
                _Segment(
                    _map(folder / "tokens.bin", self.dtype.str, tokens, self.path),
                    _map(folder / "document_ends.bin", "<i8", documents, self.path),
                    _map(folder / "document_bytes.bin", "<i8", documents, self.path),
                )
                for folder, (tokens, documents) in zip(self._folders, self._counts, strict=True)
            ]
        return self._segments

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_segments": None}  # each process opens its own maps

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start..stop of the stream, a copy in the store's dtype.

        Raises:
            IndexError: the range leaves the stream.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start}..{stop} of a store of {self.num_tokens}")
        segments = self._open()
        i = int(np.searchsorted(self._token_starts, start, side="right")) - 1
        result = np.empty(stop - start, dtype=self.dtype)
        filled = 0
        while filled < len(result):
            offset = start + filled - int(self._token_starts[i])
            piece = segments[i].tokens[offset : offset + len(result) - filled]
            result[filled : filled + len(piece)] = piece
            filled += len(piece)
            i += 1
        return result

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Return for the documents start..stop where their tokens end in the stream, int64; a document starts where the one before ends."""
        return self._documents(start, stop, "ends")

    def document_bytes(self, start: int, stop: int) -> np.ndarray:
        """Return the UTF-8 bytes of the documents start..stop, int64."""
        return self._documents(start, stop, "document_bytes")

    def _documents(self, start: int, stop: int, name: str) -> np.ndarray:
        if not 0 <= start <= stop <= self.num_documents:
            raise IndexError(f"documents {start}..{stop} of a store of {self.num_documents}")
        pieces = []
        for i, segment in enumerate(self._open()):
            first = int(self._document_starts[i])
            values = getattr(segment, name)[max(0, start - first) : max(0, stop - first)]
            pieces.append(values + (self._token_starts[i] if name == "ends" else 0))
        return np.concatenate(pieces)

    def document_start(self, index: int) -> int:
        """Return where document `index` starts in the stream."""
        return int(self.document_ends(index - 1, index)[0]) if index else 0

    def verify(self) -> None:
        """Read everything and compare with the hashes in the meta files.

        Raises:
            ValueError: tokens changed on disk; names the part.
        """
        for folder in self._folders:
            with (folder / "tokens.bin").open("rb") as f:
                actual = hashlib.file_digest(f, "sha256").hexdigest()
            if actual != PartMeta.read(folder).tokens_sha256:
                raise ValueError(
                    f"the token store is damaged: {folder / 'tokens.bin'} differs from its hash: {_again(self.path)}"
                )
