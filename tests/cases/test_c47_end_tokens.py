"""C47: exactly one end token per non-empty document (litgpt#706, TinyLlama#40, lit-llama#329, Megatron-LM#431)."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from lit_gpt_loop.tokenizer import load_tokenizer
from tests.lit_gpt_loop.small_data import store_of


def tokenizer_file(path, words):
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "</s>" in words:
        tokenizer.add_special_tokens(["</s>"])
        end = ("</s>", words.index("</s>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[end])
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.case("C47")
@pytest.mark.parametrize("processes", [1, 2])
def test_c47_one_end_token_after_each_document_that_is_not_empty(tmp_path, processes):
    store = store_of(tmp_path, ["a", "", "b", " \n"], num_processes=processes)
    a, b, end = ord("a"), ord("b"), store.eot_id
    assert store.tokens(0, store.num_tokens).tolist() == [a, end, b, end]
    assert (store.num_documents, store.empty_documents) == (2, 2)
    assert store.document_ends(0, 2).tolist() == [2, 4]


@pytest.mark.case("C47")
def test_c47_an_end_token_that_the_tokenizer_adds_itself_is_not_doubled(tmp_path):
    path = tokenizer_file(tmp_path / "t.json", ["?", "a", "b", "</s>"])
    assert tokenizers.Tokenizer.from_file(path).encode("a").ids == [1, 3]  # it does add it
    store = store_of(tmp_path, ["a", "", "b"], path)
    assert store.tokens(0, store.num_tokens).tolist() == [1, 3, 2, 3]


@pytest.mark.case("C47")
def test_c47_its_spelling_inside_a_document_ends_nothing(tmp_path):
    store = store_of(tmp_path, ["a<|endoftext|>b", "c" * 300 + "<|endoftext|>"], "bpe:258")
    tokens = store.tokens(0, store.num_tokens).tolist()
    assert tokens.count(store.eot_id) == 2
    assert store.tokenizer.decode(tokens[: store.document_start(1) - 1]) == "a<|endoftext|>b"


@pytest.mark.case("C47")
def test_c47_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no end token .*--data.end_token"):
        store_of(tmp_path, ["a"], tokenizer_file(tmp_path / "t.json", ["?", "a"]))
    assert load_tokenizer(tokenizer_file(tmp_path / "t.json", ["?", "a", "stop"]), "stop").eot_id == 2
