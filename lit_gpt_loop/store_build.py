"""Writing a token store: in bounded memory, the same bytes however it is done.

The parent appends the files that `store_items.py` makes, in the order of the items; at most two items per process are on
their way at a time. A part is written into a hidden folder beside its final place, flushed to disk and renamed, so a store
is there as a whole or not at all, and one that is there is never touched.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lit_gpt_loop.corpus import Corpus
from lit_gpt_loop.store_items import FILES, DocumentError, tokenize_items
from lit_gpt_loop.token_store import ITEM_DTYPE, SCHEMA, PartMeta, complete_parts, part_name
from lit_gpt_loop.tokenizer import (
    CharTokenizer,
    LibraryTokenizer,
    TextTokenizer,
    bpe_vocab_size,
    load_tokenizer,
)
from lit_gpt_loop.tokenizer_choice import make_tokenizer


def store_path(
    data_dir: str | os.PathLike[str], corpus: Corpus, tokenizer: str, end_token: str | None = None
) -> Path:
    """Return the folder of the store for a corpus and a tokenizer word; another corpus or tokenizer has another folder.

    Raises:
        FileNotFoundError: the tokenizer is a path and there is no such file.
    """
    key = f"{SCHEMA} {corpus.source_key()} {tokenizer} {end_token}"
    word = tokenizer.replace(":", "").replace("_", "")
    if tokenizer not in ("bytes", "char", "gpt2") and bpe_vocab_size(tokenizer) is None:
        key = f"{SCHEMA} {corpus.source_key()} {load_tokenizer(tokenizer, end_token).sha256} {end_token}"
        word = Path(tokenizer).parent.name or Path(tokenizer).stem
    name = "-".join(
        "".join(c if c.isalnum() or c in "+._" else "_" for c in s)[:40] for s in (corpus.name, word)
    )
    return Path(data_dir) / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def _progress(total: int, title: str, show: bool) -> Iterator[Any]:
    """Give a function (items done, tokens) that draws a bar on a terminal, or prints a line now and then elsewhere."""
    if show and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            "{task.description}",
            BarColumn(),
            TextColumn("{task.fields[tokens]:,} tokens"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total, tokens=0)
            yield lambda done, tokens: bar.update(task, completed=done, tokens=tokens)
        return
    started = last = time.monotonic()

    def line(done: int, tokens: int) -> None:
        nonlocal last
        if show and (time.monotonic() - last > 10 or done == total):
            last = time.monotonic()
            print(
                f"{title}: {done}/{total} items, {tokens:,} tokens, {last - started:.0f} s", file=sys.stderr
            )

    yield line


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold a lock file, so that nodes on one file system do not write the same part side by side.

    Gives whether it is held: there are file systems without locks, where the rename at the end decides who was first.
    """
    with path.open("a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _no_space(store: Path, needed: str) -> RuntimeError:
    usage = shutil.disk_usage(store if store.exists() else store.parent)
    return RuntimeError(
        f"no disk space to prepare {store}: {needed}, {usage.free / 2**20:,.0f} MiB are free. What was written of it is removed again and "
        f"stores that were there are as they were. Free some, or choose another place with `--data.data_dir`."
    )


def _publish_tokenizer(store: Path, word: str, corpus: Corpus, end_token: str | None) -> TextTokenizer:
    """Return the store's tokenizer, made now if this is the first job to come here."""
    final = store / "tokenizer.json"
    if not final.exists():
        tokenizer = make_tokenizer(word, corpus, end_token)
        beside = store / f".tokenizer-{uuid.uuid4().hex}"
        try:
            tokenizer.save(beside)
            _sync(beside)
            try:
                # Unlike a rename, this fails if another job was first: its tokenizer is everyone's.
                os.link(beside, final)
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                os.replace(beside, final)
        finally:
            beside.unlink(missing_ok=True)
    return load_tokenizer(final, end_token)


def build_store(
    corpus: Corpus,
    tokenizer: str = "bpe:4096",
    data_dir: str | os.PathLike[str] = "data",
    end_token: str | None = None,
    part: tuple[int, int] = (1, 1),
    num_processes: int = 1,
    batch_documents: int = 256,
    progress: bool = True,
) -> Path:
    """Prepare a corpus, or one part of it, unless that is done already; return the store's folder.

    Args:
        corpus: the documents.
        tokenizer: a word or path (`tokenizer.py`).
        data_dir: folder that holds the stores.
        end_token: name of the end token in a `tokenizer.json`.
        part: (I, N), from (1, N) to (N, N): write the I-th of N parts.
        num_processes: processes that tokenize. With 1, the tokenizers library uses threads.
        batch_documents: documents encoded at a time; no effect on what is written.
        progress: show how far it is.

    Raises:
        ValueError: a document that is no text (named by its index among all documents), a corpus without text, a bad part.
        RuntimeError: no disk space.
    """
    index, num_parts = part
    if not 1 <= index <= num_parts:
        raise ValueError(f"part {index}/{num_parts}: write I/N with 1 <= I <= N")
    if num_processes < 1:
        raise ValueError(f"num_processes={num_processes}: at least 1")
    store = store_path(data_dir, corpus, tokenizer, end_token)
    final = store / part_name(index, num_parts)
    if final.exists() or complete_parts(store) is not None:
        return store
    created = [p for p in (store, *store.parents) if not p.exists()]
    try:
        store.mkdir(parents=True, exist_ok=True)
        with _lock(store / f".lock-{final.name}") as is_held:
            # Left by a job that was killed; the lock says that nobody writes it.
            for left in store.glob(f".{final.name}.*") if is_held else ():
                shutil.rmtree(left, ignore_errors=True)
            if not final.exists():
                _build_part(
                    corpus, tokenizer, store, end_token, part, num_processes, batch_documents, progress
                )
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(store, "the disk was full while writing") from e
        raise
    finally:
        if not (store / "tokenizer.json").exists():  # failed before anything worth keeping was there
            (store / f".lock-{final.name}").unlink(missing_ok=True)
            for folder in created:
                with contextlib.suppress(OSError):
                    folder.rmdir()
    return store


def _check_space(
    corpus: Corpus, tokenizer: TextTokenizer, store: Path, num_parts: int, itemsize: int
) -> None:
    size = corpus.num_bytes()
    if size is None:
        return
    bytes_per_token = 1 if tokenizer.vocab_size <= 257 or isinstance(tokenizer, CharTokenizer) else 5
    needed = size // num_parts // bytes_per_token * itemsize
    if shutil.disk_usage(store).free < needed:
        raise _no_space(
            store, f"about {needed / 2**20:,.0f} MiB are needed for {size / 2**20:,.0f} MiB of text"
        )


def _build_part(
    corpus: Corpus,
    word: str,
    store: Path,
    end_token: str | None,
    part: tuple[int, int],
    processes: int,
    batch: int,
    progress: bool,
) -> None:
    index, num_parts = part
    tokenizer = _publish_tokenizer(store, word, corpus, end_token)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    _check_space(corpus, tokenizer, store, num_parts, dtype.itemsize)
    every = corpus.items()
    items = every[(index - 1) * len(every) // num_parts : index * len(every) // num_parts]
    folder = store / f".{part_name(*part)}.{uuid.uuid4().hex}"
    folder.mkdir()
    done = empty = tokens = documents = text_bytes = 0
    tokens_hash = hashlib.sha256()
    try:
        with contextlib.ExitStack() as stack:
            files = {n: stack.enter_context((folder / n).open("wb")) for n in (*FILES, "items.bin")}
            title = f"tokenizing {corpus.name}" + (f", part {index}/{num_parts}" if num_parts > 1 else "")
            show = stack.enter_context(_progress(len(items), title, progress))
            # Closed, that is, its processes ended, before the folder that they write into is removed.
            results = stack.enter_context(
                contextlib.closing(
                    tokenize_items(corpus, tokenizer, items, folder, dtype.str, processes, batch)
                )
            )
            for result in results:
                for name in FILES:
                    path = Path(result.folder) / name
                    if name == "document_ends.bin":
                        files[name].write((np.fromfile(path, dtype="<i8") + tokens).astype("<i8").tobytes())
                        continue
                    with path.open("rb") as source:
                        while data := source.read(2**22):
                            if name == "tokens.bin":
                                tokens_hash.update(data)
                            files[name].write(data)
                shutil.rmtree(result.folder)
                files["items.bin"].write(
                    np.array(
                        [(np.void(result.sha256), result.tokens, result.documents)], dtype=ITEM_DTYPE
                    ).tobytes()
                )
                done += 1
                tokens += result.tokens
                documents += result.documents
                empty += result.empty
                text_bytes += result.text_bytes
                show(done, tokens)
            for f in files.values():
                f.flush()
                os.fsync(f.fileno())
        if not documents and num_parts == 1:
            raise ValueError(f"the corpus {corpus.name} has no text: {empty} documents, all of them empty.")
        meta = PartMeta(
            schema=SCHEMA,
            part=index,
            num_parts=num_parts,
            corpus=corpus.name,
            source_key=corpus.source_key(),
            tokenizer=word,
            tokenizer_sha256=tokenizer.sha256,
            end_token=tokenizer.end_token if isinstance(tokenizer, LibraryTokenizer) else None,
            eot_id=tokenizer.eot_id,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype.str,
            tokens=tokens,
            documents=documents,
            empty_documents=empty,
            text_bytes=text_bytes,
            items=len(items),
            tokens_sha256=tokens_hash.hexdigest(),
        )
        (folder / "meta.json").write_text(meta.to_json())
        _sync(folder / "meta.json")
        _sync(folder)
        try:
            os.rename(folder, store / part_name(*part))
        except OSError:  # on a file system without locks another job may have been first, with the same bytes
            if not (store / part_name(*part)).exists():
                raise
        _sync(store)
    except DocumentError as e:
        # The documents of the items before this one were counted when their results came in.
        if index == 1:
            which = f"document {documents + empty + e.index}"
        else:
            which = f"document {documents + empty + e.index} of part {index}/{num_parts}"
        raise ValueError(
            f"{which} (counted from 0; in {e.source}) {e.problem}. Clean it, for example with "
            f"`text.encode('utf-8', 'replace').decode()`, or leave the document out."
        ) from e
    finally:
        shutil.rmtree(folder, ignore_errors=True)
