"""recipes.prepare: from a command line to a store, ahead of time or part by part."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_gpt_loop.token_store import TokenStore
from recipes import prepare

TEXTS = [f"document {i}: some words, and 数据.\n" * (1 + i % 4) for i in range(40)]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"body": t}) + "\n" for t in [*TEXTS, ""]))
    return path


def arguments(tmp_path, corpus, *more):
    return [
        f"--data.corpus={corpus}",
        "--data.text_field=body",
        f"--data.data_dir={tmp_path / 'data'}",
        "--data.tokenizer=bpe:300",
        "--data.context_length=32",
        *more,
    ]


def test_prints_counts_the_store_and_the_next_command(tmp_path, corpus, capsys):
    store = prepare.main(arguments(tmp_path, corpus, "--num_processes=2"))
    out = capsys.readouterr().out
    opened = TokenStore(store)
    assert (opened.num_documents, opened.empty_documents, opened.vocab_size) == (40, 1, 300)
    assert f"data {store}: 40 documents (1 empty ones skipped), {opened.num_tokens:,} tokens" in out
    assert f"{opened.text_bytes / opened.num_tokens:.2f} bytes per token" in out
    assert "  train " in out and "  val   " in out
    assert (
        f"next: python -m recipes.pretrain fit --config configs/quickstart.yaml --data.store {store}" in out
    )
    assert prepare.main(arguments(tmp_path, corpus)) == store


def test_reads_the_data_section_of_a_runs_config_and_nothing_else(tmp_path, corpus, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        "trainer:\n  max_steps: 5\n  no_such_argument: 1\nmodel:\n  config: tiny\ndata:\n"
        f"  corpus: {corpus}\n  text_field: body\n  tokenizer: bytes\n  data_dir: {tmp_path / 'data'}\n  val_fraction: 0.2\n"
    )
    store = prepare.main(["--config", str(config)])
    assert TokenStore(store).vocab_size == 257
    assert f"next: python -m recipes.pretrain fit --config {config}" in capsys.readouterr().out
    # the command line wins
    other = prepare.main([f"--config={config}", "--data.tokenizer", "bpe:290"])
    assert TokenStore(other).vocab_size == 290


def test_a_list_of_files_keeps_its_order(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"text {name} " * 30)
    config = tmp_path / "run.yaml"
    files = f"[{tmp_path / 'b.txt'}, {tmp_path / 'a.txt'}]"
    config.write_text(
        f"data:\n  corpus: {files}\n  tokenizer: bytes\n  context_length: 8\n  data_dir: {tmp_path / 'd'}\n"
    )
    store = TokenStore(prepare.main(["--config", str(config)]))
    assert store.tokens(0, 6).tobytes().decode("utf-16-le") == "text b"


def test_the_repositorys_configs_are_read():
    configs = sorted(Path("configs").glob("*.yaml"))
    assert configs
    for config in configs:
        if (section := prepare.data_section(str(config), required=False)) is not None:
            prepare.build_parser(section).parse_args([])


def test_parts_make_the_store_of_one_job(tmp_path, corpus, capsys, monkeypatch):
    monkeypatch.setattr("lit_gpt_loop.corpus._ITEM_BYTES", 400)
    whole = TokenStore(prepare.main(arguments(tmp_path / "one", corpus)))
    for part in (2, 3, 1):
        store = prepare.main(arguments(tmp_path / "parts", corpus, f"--part={part}/3"))
        out = capsys.readouterr().out
        assert ("of 3 parts are there" in out) == (part != 1)
    parts = TokenStore(store)
    assert parts.fingerprint == whole.fingerprint
    assert (parts.tokens(0, parts.num_tokens) == whole.tokens(0, whole.num_tokens)).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "write I/N"),
        ("a/b", "write I/N"),
        ("0/4", "from 1/4 to 4/4"),
        ("5/4", "from 1/4 to 4/4"),
        ("1/2/3", "write I/N"),
    ],
)
def test_bad_parts(text, message):
    with pytest.raises(ValueError, match=message):
        prepare.parse_part(text)
    assert prepare.parse_part("3/64") == (3, 64)


def test_bad_configs(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none.yaml"):
        prepare.main(["--config", str(tmp_path / "none.yaml")])
    (tmp_path / "a.yaml").write_text("model: {}\n")
    with pytest.raises(ValueError, match="has no `data:` section"):
        prepare.main(["--config", str(tmp_path / "a.yaml")])
    (tmp_path / "b.yaml").write_text("data:\n  tokeniser: bytes\n")
    with pytest.raises(ValueError, match=r"data.tokeniser.*is no argument.*tokenizer"):
        prepare.main(["--config", str(tmp_path / "b.yaml")])


def test_what_a_user_can_mend_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["prepare", f"--data.corpus={tmp_path / 'none.txt'}", f"--data.data_dir={tmp_path}"]
    )
    assert prepare.run() == 1
    err = capsys.readouterr().err
    assert err.startswith("error: corpus: there is no file") and err.count("\n") == 1


@pytest.mark.slow
def test_the_command_itself(tmp_path, corpus):
    command = [sys.executable, "-m", "recipes.prepare"]
    environment = {**os.environ, "COLUMNS": "120"}
    shown = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, check=True, env=environment
    ).stdout
    for word in (
        "--data.corpus",
        "--part",
        "--num_processes",
        "python -m recipes.prepare --config configs/gpt2_124m.yaml",
    ):
        assert word in shown
    done = subprocess.run(
        [*command, *arguments(tmp_path, corpus)], capture_output=True, text=True, check=True
    )
    assert "next: python -m recipes.pretrain fit" in done.stdout
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    bad = subprocess.run(
        [*command, "--data.corpus", "nowhere.txt"], capture_output=True, text=True, check=False
    )
    assert bad.returncode == 1 and bad.stderr.startswith("error: corpus: there is no file nowhere.txt")
