"""The token store: what is read is what was written, the same bytes however it is done, and what a damaged one gets."""

import contextlib
import errno
import gzip
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from lit_gpt_loop import store_build, store_items
from lit_gpt_loop.corpus import TextCorpus, open_corpus
from lit_gpt_loop.store_build import build_store, store_path
from lit_gpt_loop.store_items import encode_documents, split_long
from lit_gpt_loop.token_store import TokenStore, part_name
from lit_gpt_loop.tokenizer import LibraryTokenizer, TextTokenizer, load_tokenizer, train_bpe
from tests.lit_gpt_loop.small_data import MIXED, store_of

TEXTS = [*MIXED, "", " \n\t", *MIXED[:9], "\u3000"]
PLAIN = [t for t in TEXTS if t.strip()]
FILES = ("tokens.bin", "document_ends.bin", "document_bytes.bin", "items.bin")


def files_of(store: TokenStore, name: str) -> bytes:
    folders = sorted(p for p in store.path.iterdir() if p.name.startswith("part-"))
    return b"".join((folder / name).read_bytes() for folder in folders)


@pytest.mark.parametrize("tokenizer", ["bytes", "char", "bpe:300"])
def test_round_trip(tmp_path, tokenizer):
    store = store_of(tmp_path, TEXTS, tokenizer)
    assert (store.num_documents, store.empty_documents) == (len(PLAIN), 3)
    assert store.text_bytes == sum(len(t.encode()) for t in PLAIN)
    assert store.num_tokens == store.document_ends(0, store.num_documents)[-1]
    assert store.document_bytes(0, store.num_documents).tolist() == [len(t.encode()) for t in PLAIN]
    for i, text in enumerate(PLAIN):
        ids = store.tokens(
            store.document_start(i), store.document_start(i + 1) if i + 1 < len(PLAIN) else store.num_tokens
        )
        assert ids.tolist() == [*store.tokenizer.encode(text), store.eot_id]
        assert store.tokenizer.decode(ids.tolist()) == text
    store.verify()


def test_dtype_follows_the_vocabulary(tmp_path):
    assert store_of(tmp_path / "a", MIXED).dtype == np.dtype("<u2")
    for size, dtype in ((65_535, "<u2"), (65_536, "<u4")):  # largest ids 65,535 and 65,536
        vocabulary = {"w0": 0, "w1": 1, "w65534": 65_534, "</s>": size}
        tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        path = tmp_path / f"{size}.json"
        tokenizer.save(str(path))
        store = store_of(tmp_path / str(size), ["w1 w65534 </s>x"], str(path))
        assert store.dtype == np.dtype(dtype)
        assert store.tokens(0, store.num_tokens)[-1] == size == store.eot_id
        assert store.tokens(0, 2).tolist() == [1, 65_534]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_same_bytes_for_any_processes_and_batches(tmp_path, tokenizer):
    reference = store_of(tmp_path / "one", TEXTS, tokenizer)
    for i, (processes, batch) in enumerate(((1, 1), (2, 3), (3, 256))):
        other = store_of(tmp_path / str(i), TEXTS, tokenizer, num_processes=processes, batch_documents=batch)
        assert other.fingerprint == reference.fingerprint
        for name in FILES:
            assert files_of(other, name) == files_of(reference, name)


def test_parts_read_as_the_store_of_one_job(tmp_path):
    reference = store_of(tmp_path / "one", TEXTS, "bpe:300")
    corpus = TextCorpus(TEXTS, texts_per_item=7)
    for num_parts, order in ((3, (2, 3, 1)), (40, range(40, 0, -1))):  # 40 parts of 11 items: most are empty
        folder = tmp_path / str(num_parts)
        for i, part in enumerate(order):
            path = build_store(
                corpus, "bpe:300", folder, part=(part, num_parts), num_processes=1 + i % 2, progress=False
            )
            if i + 1 < num_parts:
                with pytest.raises(
                    FileNotFoundError,
                    match=rf"has {i + 1} of {num_parts} parts, missing: .*--part I/{num_parts}",
                ):
                    TokenStore(path)
        assert (
            build_store(corpus, "bpe:300", folder, progress=False) == path
        )  # they are taken for the store of one job
        assert not (path / part_name(1, 1)).exists()
        store = TokenStore(path)
        assert store.fingerprint == reference.fingerprint
        assert store.num_tokens == reference.num_tokens
        assert np.array_equal(store.tokens(0, store.num_tokens), reference.tokens(0, reference.num_tokens))
        n = store.num_documents
        assert n == reference.num_documents
        assert np.array_equal(store.document_ends(0, n), reference.document_ends(0, n))
        assert np.array_equal(store.document_bytes(3, n - 2), reference.document_bytes(3, n - 2))
        assert files_of(store, "tokens.bin") == files_of(reference, "tokens.bin")
        for start in range(0, store.num_tokens, 97):
            stop = min(start + 200, store.num_tokens)
            assert np.array_equal(store.tokens(start, stop), reference.tokens(start, stop))
    with pytest.raises(ValueError, match="1 <= I <= N"):
        build_store(corpus, "bpe:300", tmp_path, part=(4, 3))


def test_files_and_memory_give_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_gpt_loop.corpus._ITEM_BYTES", 300)
    reference = store_of(tmp_path / "one", TEXTS)
    lines = "".join(json.dumps({"text": t}) + "\n" for t in TEXTS)
    (tmp_path / "d.jsonl").write_text(lines)
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as f:
        f.write(lines)
    for name in ("d.jsonl", "d.jsonl.gz"):
        path = build_store(
            open_corpus(str(tmp_path / name)), "bytes", tmp_path, num_processes=2, progress=False
        )
        assert files_of(TokenStore(path), "tokens.bin") == files_of(reference, "tokens.bin")


def test_a_store_is_found_again_and_another_corpus_gets_another(tmp_path, monkeypatch):
    first = store_of(tmp_path, MIXED, "bpe:300")
    before = {p: p.stat().st_mtime_ns for p in first.path.rglob("*")}
    monkeypatch.setattr(store_build, "_build_part", lambda *a: pytest.fail("built again"))
    assert store_of(tmp_path, MIXED, "bpe:300").path == first.path
    monkeypatch.undo()
    changed = store_of(tmp_path, [*MIXED, "more"], "bpe:300")
    retokenized = store_of(tmp_path, MIXED, "bpe:301")
    assert len({first.path, changed.path, retokenized.path}) == 3
    assert len({first.fingerprint, changed.fingerprint, retokenized.fingerprint}) == 3
    assert {p: p.stat().st_mtime_ns for p in first.path.rglob("*")} == before


def test_names_of_stores(tmp_path):
    assert store_path("d", TextCorpus(["a"]), "bpe:4_096").name.startswith("texts-bpe4096-")
    train_bpe(MIXED, 300).save(tmp_path / "tokenizer.json")
    one = store_path("d", TextCorpus(["a"]), str(tmp_path / "tokenizer.json"))
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "moved.json")
    assert store_path("d", TextCorpus(["a"]), str(tmp_path / "moved.json")).name[-12:] == one.name[-12:]
    with pytest.raises(FileNotFoundError, match="no tokenizer file"):
        store_path("d", TextCorpus(["a"]), "gtp2")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_lone_surrogate_is_named_by_the_index_of_its_document(tmp_path, processes):
    texts = [*MIXED[:20], "", "ok", "bad \ud83d here", *MIXED[:5]]
    with pytest.raises(
        ValueError,
        match=r"document 22 \(counted from 0; in texts\) holds a lone surrogate \(U\+D83D\) at character 4",
    ):
        store_of(tmp_path, texts, num_processes=processes)
    assert not any(p.name.startswith("part-") or p.name.startswith(".part-") for p in tmp_path.rglob("*"))
    line = tmp_path / "d.jsonl"
    line.write_text('{"text": "fine"}\n{"text": "\\ud800"}\n')
    with pytest.raises(ValueError, match=r"document 1 .*d.jsonl"):
        build_store(open_corpus(str(line)), "bytes", tmp_path, progress=False)


def test_a_corpus_without_text(tmp_path):
    with pytest.raises(ValueError, match="has no text: 2 documents, all of them empty"):
        store_of(tmp_path / "bytes", ["", " "])
    assert not [p for p in tmp_path.rglob("*part-*") if p.is_dir()]
    with pytest.raises(ValueError, match="at least one character"):
        store_of(tmp_path / "char", ["", ""], "char")
    assert not (tmp_path / "char").exists()


# ---- damage


@pytest.mark.parametrize("name", FILES)
def test_truncated_or_missing_files(tmp_path, name):
    store = store_of(tmp_path, MIXED)
    path = store.path / part_name(1, 1) / name
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(
        ValueError,
        match=rf"damaged: .*{name} has {size - 1} bytes, its meta file says {size}: remove .*prepare it again",
    ):
        TokenStore(store.path)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing"):
        TokenStore(store.path)


def test_changed_tokens_are_found_by_verify(tmp_path):
    store = store_of(tmp_path, MIXED)
    path = store.path / part_name(1, 1) / "tokens.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokens.bin differs from its hash"):
        TokenStore(store.path).verify()


def test_another_tokenizers_store(tmp_path):
    store = store_of(tmp_path, MIXED, "bpe:300")
    with pytest.raises(ValueError, match=r"was written with the tokenizer bpe:300 \(SHA-256 .*not with mine"):
        store.check_tokenizer(train_bpe(MIXED, 290).sha256, "mine")
    train_bpe(MIXED, 290).save(store.path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"not with its own .*tokenizer.json"):
        TokenStore(store.path)


def test_bad_meta_files(tmp_path):
    store = store_of(tmp_path, MIXED)
    path = store.path / part_name(1, 1) / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "schema": 99}))
    with pytest.raises(ValueError, match="has schema 99, this version reads schema 1"):
        TokenStore(store.path)
    path.write_text(json.dumps({k: v for k, v in meta.items() if k != "dtype"}))
    with pytest.raises(ValueError, match="lacks dtype"):
        TokenStore(store.path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not a store's meta file"):
        TokenStore(store.path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="holds no finished token store"):
        TokenStore(store.path)
    with pytest.raises(FileNotFoundError, match="there is no token store"):
        TokenStore(tmp_path / "nowhere")


def test_parts_of_different_corpora_do_not_mix(tmp_path):
    corpora = [TextCorpus(MIXED), TextCorpus(MIXED[::-1])]
    paths = [build_store(c, "bytes", tmp_path, part=(i, 2), progress=False) for i, c in enumerate(corpora, 1)]
    shutil.copytree(paths[1] / part_name(2, 2), paths[0] / part_name(2, 2))
    with pytest.raises(
        ValueError, match=r"part-0002-of-0002 does not belong to .*part-0001-of-0002: its source_key"
    ):
        TokenStore(paths[0])


def test_ranges_outside_of_the_stream(tmp_path):
    store = store_of(tmp_path, MIXED)
    for start, stop in ((-1, 3), (5, 4), (0, store.num_tokens + 1)):
        with pytest.raises(IndexError):
            store.tokens(start, stop)
    with pytest.raises(IndexError):
        store.document_ends(0, store.num_documents + 1)


# ---- disk full, kills


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB, if this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs, the disk that can be filled, is not permitted here (not root)")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and ".lock" not in p.name
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_keeps_the_old_store(small_disk, processes, monkeypatch):
    old = store_of(small_disk, MIXED)
    before = everything(small_disk)
    texts = ["x" * 9_999] * 60  # 1.2 MB of tokens
    monkeypatch.setattr(store_build, "_check_space", lambda *a: None)  # as if the space went while it ran
    with pytest.raises(
        RuntimeError, match=r"no disk space to prepare .*the disk was full while writing.*--data.data_dir"
    ) as e:
        store_of(small_disk, texts, num_processes=processes)
    assert isinstance(e.value.__cause__, OSError) and e.value.__cause__.errno == errno.ENOSPC
    after = everything(small_disk)
    assert {k: after[k] for k in before} == before
    assert [k for k in after if k not in before and not k.endswith("tokenizer.json")] == []
    TokenStore(old.path).verify()


def test_a_disk_that_is_too_small_is_refused_before_any_work(small_disk, monkeypatch):
    monkeypatch.setattr(store_build, "tokenize_items", lambda *a: pytest.fail("started"))
    with pytest.raises(
        RuntimeError, match=r"no disk space to prepare .*about 1 MiB are needed for 1 MiB of text"
    ):
        store_of(small_disk, ["x" * 9_999] * 60)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_failing_write_leaves_nothing_behind(tmp_path, monkeypatch, code):
    old = store_of(tmp_path, MIXED)

    def fail(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store_build, "_sync", fail)
    with pytest.raises(RuntimeError, match="no disk space to prepare"):
        store_of(tmp_path, [*MIXED, "more"])
    monkeypatch.setattr(store_build, "_sync", lambda p: fail() if p.name == "meta.json" else None)
    with pytest.raises(RuntimeError, match="no disk space to prepare"):
        store_of(tmp_path, [*MIXED, "more"])
    assert not [p for p in tmp_path.rglob(".part-*") if "lock" not in p.name]
    assert store_of(tmp_path, MIXED).path == old.path
    monkeypatch.undo()
    store_of(tmp_path, [*MIXED, "more"]).verify()


def test_leftovers_of_a_killed_job_are_removed(tmp_path):
    path = store_path(tmp_path, TextCorpus(MIXED), "bytes")
    left = path / f".{part_name(1, 1)}.dead"
    left.mkdir(parents=True)
    (left / "tokens.bin").write_bytes(b"x" * 100)
    assert build_store(TextCorpus(MIXED), "bytes", tmp_path, progress=False) == path
    assert not left.exists()


def build_slowly(folder: Path, delay_s: float, answers) -> None:
    def tokenize_items(*args):
        for result in store_items.tokenize_items(*args):
            time.sleep(delay_s)
            yield result

    store_build.tokenize_items = tokenize_items
    corpus = TextCorpus(TEXTS, texts_per_item=3)
    answers.put(str(build_store(corpus, "bytes", folder, progress=False)))


def test_kills_at_any_time_leave_a_whole_store_or_none(tmp_path):
    context = multiprocessing.get_context("fork")
    reference = store_of(tmp_path / "reference", TEXTS, texts_per_item=3)
    for i in range(6):
        child = context.Process(target=build_slowly, args=(tmp_path / "data", 0.01, context.SimpleQueue()))
        child.start()
        time.sleep(0.02 + 0.05 * i)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        path = store_path(tmp_path / "data", TextCorpus(TEXTS, texts_per_item=3), "bytes")
        with contextlib.suppress(FileNotFoundError):
            TokenStore(path).verify()
    store = store_of(tmp_path / "data", TEXTS, texts_per_item=3)
    assert store.path == path
    assert store.fingerprint == reference.fingerprint
    assert [p.name for p in path.iterdir() if p.is_dir()] == [part_name(1, 1)]


def test_jobs_that_meet_at_the_same_part_write_it_once(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    children = [context.Process(target=build_slowly, args=(tmp_path, 0.005, answers)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert len({answers.get() for _ in children}) == 1
    assert TokenStore(next(p for p in tmp_path.iterdir() if p.is_dir())).num_documents == len(PLAIN)


def test_without_locks_rival_jobs_still_end_with_one_store(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(store_build.fcntl, "flock", no_locks)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    children = [context.Process(target=build_slowly, args=(tmp_path, 0.005, answers)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    store = TokenStore(next(p for p in tmp_path.iterdir() if p.is_dir()))
    assert store.num_documents == len(PLAIN)
    assert [p.name for p in store.path.iterdir() if p.is_dir()] == [part_name(1, 1)]


def peak_bytes(corpus_path: str, folder: Path, answers) -> None:
    build_store(open_corpus(corpus_path), "bytes", folder, progress=False)
    answers.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("lit_gpt_loop.corpus._ITEM_BYTES", 2**20)
    context = multiprocessing.get_context("fork")
    peaks = []
    for megabytes in (4, 64):
        path = tmp_path / f"{megabytes}{suffix}"
        line = json.dumps({"text": "some words " * 90}) + "\n"
        with gzip.open(path, "wt", compresslevel=1) if suffix.endswith("gz") else path.open("w") as f:
            for _ in range(megabytes * 2**20 // len(line)):
                f.write(line)
        answers = context.SimpleQueue()
        child = context.Process(target=peak_bytes, args=(str(path), tmp_path / str(megabytes), answers))
        child.start()
        peaks.append(answers.get())
        child.join()
    assert peaks[1] - peaks[0] < 16 * 2**20


# ---- encoding


class AddsItsOwn(TextTokenizer):
    """Ends every text with its end token, once or twice."""

    vocab_size, eot_id = 300, 299

    def encode(self, text):
        return [*text.encode(), *([299] * len(text))]

    def decode(self, ids):
        return ""

    def to_str(self):
        return "{}"


def test_an_end_token_that_the_tokenizer_adds_is_not_doubled():
    got = encode_documents(AddsItsOwn(), ["a", "bc"], "<u2")
    assert [g.tolist() for g in got] == [[97, 299], [98, 99, 299]]


def test_a_template_that_adds_the_end_token_is_not_doubled(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer.save(str(tmp_path / "t.json"))
    store = store_of(tmp_path / "d", ["a a", "a"], str(tmp_path / "t.json"))
    assert store.tokens(0, store.num_tokens).tolist() == [1, 1, 2, 1, 2]


def test_long_documents_are_cut_where_it_changes_no_token(monkeypatch):
    text = "".join(f"line {i} \n\n  indented,\ttab\r\nnext'll\n{'数' * (i % 3)}x\n" for i in range(60))
    tokenizer = train_bpe([text], 330)
    for limit in (1, 10, 333):
        pieces = split_long(text, limit)
        assert "".join(pieces) == text
        assert len(pieces) > len(text) / limit / 30
        assert [i for p in pieces for i in tokenizer.encode(p)] == tokenizer.encode(text)
        for before, after in itertools.pairwise(pieces):
            assert before.endswith("\n") and not before[-2].isspace() and not after[0].isspace()
    monkeypatch.setattr(store_items, "_LONG_DOCUMENT", 50)
    (ids,) = encode_documents(tokenizer, [text], "<u2")
    assert ids.tolist() == [*tokenizer.encode(text), tokenizer.eot_id]
    assert split_long("no line end" * 99, 10) == ["no line end" * 99]
    assert split_long("a\n" + "b" * 30 + "\n", 3) == ["a\n" + "b" * 30 + "\n"]


def test_tokenizers_that_are_not_byte_level_get_whole_documents(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(tmp_path / "t.json")
    assert isinstance(loaded, LibraryTokenizer) and not loaded.is_byte_level


def test_progress_goes_to_stderr_and_nothing_else(tmp_path, capsys):
    build_store(TextCorpus(MIXED), "bytes", tmp_path)
    out, err = capsys.readouterr()
    assert out == "" and "tokenizing texts: 1/1 items" in err
