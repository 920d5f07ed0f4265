"""Writing a token store, the parallel half: work items become files of tokens, in processes of their own.

An item's files hold its tokens, and per document its end and its bytes; their hash does not depend on how many processes
there are or how many documents are encoded at a time. Memory: one item's batch of documents per process.
"""

import contextlib
import hashlib
import multiprocessing
import os
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lit_gpt_loop.corpus import Corpus, WorkItem
from lit_gpt_loop.tokenizer import LibraryTokenizer, TextTokenizer

FILES = ("tokens.bin", "document_ends.bin", "document_bytes.bin")
_BATCH_CHARACTERS = 2**20
_LONG_DOCUMENT = 2**20  # characters; longer ones are encoded piece by piece if that gives the same tokens


class DocumentError(ValueError):
    """A document that cannot be tokenized; `index` counts the documents of its work item."""

    def __init__(self, index: int, problem: str, source: str) -> None:
        super().__init__(index, problem, source)
        self.index, self.problem, self.source = index, problem, source


@dataclass(frozen=True)
class ItemResult:
    """Counts of a finished item, whose files lie in `folder`."""

    folder: str
    sha256: bytes
    tokens: int
    documents: int
    empty: int
    text_bytes: int


def split_long(text: str, limit: int = _LONG_DOCUMENT) -> list[str]:
    """Cut `text` into pieces of about `limit` characters, each between a line end and a character that is no white space.

    Byte-level pre-tokenizers never join text across such a place, provided that no white space stands before the line end
    either, so the tokens of the pieces are the tokens of the whole.
    """
    pieces, start = [], 0
    while len(text) - start > limit:
        cut = text.find("\n", start + limit)
        while cut > 0 and (cut + 1 >= len(text) or text[cut - 1].isspace() or text[cut + 1].isspace()):
            cut = text.find("\n", cut + 1)
        if cut < 0:
            break
        pieces.append(text[start : cut + 1])
        start = cut + 1
    return [*pieces, text[start:]]


def encode_documents(tokenizer: TextTokenizer, texts: list[str], dtype: str) -> list[np.ndarray]:
    """Return the tokens of each text followed by exactly one end token; an array of length 0 for a text without tokens."""
    is_byte_level = isinstance(tokenizer, LibraryTokenizer) and tokenizer.is_byte_level
    pieces = [split_long(t) if is_byte_level else [t] for t in texts]
    encoded = iter(tokenizer.encode_batch([p for document in pieces for p in document]))
    result = []
    for document in pieces:
        ids = np.concatenate([next(encoded).astype(dtype) for _ in document])
        length = len(ids)
        while length and ids[length - 1] == tokenizer.eot_id:  # a tokenizer that adds its own
            length -= 1
        end = np.array([tokenizer.eot_id] if length else [], dtype=dtype)
        result.append(np.concatenate([ids[:length], end]))
    return result


def tokenize_item(
    corpus: Corpus, tokenizer: TextTokenizer, item: WorkItem, folder: str, dtype: str, batch_documents: int
) -> ItemResult:
    """Write the tokens and documents of one item into `folder`."""
    os.mkdir(folder)
    num_tokens = num_documents = num_empty = text_bytes = seen = 0
    digests = {name: hashlib.sha256() for name in FILES}
    source = (
        item.pieces[0].source
        if len(item.pieces) == 1
        else f"{item.pieces[0].source} ... {item.pieces[-1].source}"
    )
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(os.path.join(folder, name), "wb")) for name in FILES}

        def write(texts: list[str], sizes: list[int]) -> None:
            nonlocal num_tokens, num_documents, num_empty, text_bytes
            kept = [
                (ids, size)
                for ids, size in zip(encode_documents(tokenizer, texts, dtype), sizes, strict=True)
                if len(ids)
            ]
            num_empty += len(texts) - len(kept)
            if not kept:
                return
            lengths = np.array([len(ids) for ids, _ in kept], dtype="<i8")
            arrays = (
                np.concatenate([ids for ids, _ in kept]),
                num_tokens + np.cumsum(lengths, dtype="<i8"),
                np.array([size for _, size in kept], dtype="<i8"),
            )
            for name, array in zip(FILES, arrays, strict=True):
                data = array.tobytes()
                digests[name].update(data)
                files[name].write(data)
            num_tokens += int(lengths.sum())
            num_documents += len(kept)
            text_bytes += int(arrays[2].sum())

        texts: list[str] = []
        sizes: list[int] = []
        characters = 0
        for text in corpus.read(item):
            try:
                size = len(text.encode("utf-8"))
            except UnicodeEncodeError as e:
                problem = f"holds a lone surrogate (U+{ord(text[e.start]):04X}) at character {e.start}, which is no text"
                raise DocumentError(seen, problem, source) from None
            seen += 1
            if not text.strip():
                num_empty += 1
                continue
            texts.append(text)
            sizes.append(size)
            characters += len(text)
            if len(texts) >= batch_documents or characters >= _BATCH_CHARACTERS:
                write(texts, sizes)
                texts, sizes, characters = [], [], 0
        write(texts, sizes)
    digest = hashlib.sha256(b"".join(digests[name].digest() for name in FILES)).digest()
    return ItemResult(folder, digest, num_tokens, num_documents, num_empty, text_bytes)


_worker: tuple[Corpus, TextTokenizer] | None = None


def _start_worker(corpus: Corpus, tokenizer: TextTokenizer) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # processes are the parallelism; threads after a fork can hang
    )
    _worker = (corpus, tokenizer)


def _work(item: WorkItem, folder: str, dtype: str, batch_documents: int) -> ItemResult:
    assert _worker is not None
    return tokenize_item(*_worker, item, folder, dtype, batch_documents)


def tokenize_items(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    items: list[WorkItem],
    folder: Path,
    dtype: str,
    processes: int,
    batch: int,
) -> Generator[ItemResult, None, None]:
    """Yield the results in the order of the items."""
    jobs = ((item, str(folder / f"item-{i:08d}"), dtype, batch) for i, item in enumerate(items))
    if processes == 1:
        for job in jobs:
            yield tokenize_item(corpus, tokenizer, *job)
        return
    # Forked where possible: a spawned process would first import torch and Lightning for seconds.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with ProcessPoolExecutor(
        processes,
        multiprocessing.get_context(method),
        initializer=_start_worker,
        initargs=(corpus, tokenizer),
    ) as pool:
        pending: deque[Future[ItemResult]] = deque()
        try:
            for job in jobs:
                pending.append(pool.submit(_work, *job))
                if len(pending) >= 2 * processes:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
