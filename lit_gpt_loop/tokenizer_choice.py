"""Step 2 of 10, continued: the tokenizer that a word names, made from a corpus where it has to be."""

from collections.abc import Iterator

from lit_gpt_loop.corpus import Corpus
from lit_gpt_loop.sample_order import permute
from lit_gpt_loop.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    TextTokenizer,
    bpe_vocab_size,
    gpt2_tokenizer,
    load_tokenizer,
    train_bpe,
)

_TRAIN_BYTES = 64 * 2**20  # text that a BPE is trained on at most


def training_texts(corpus: Corpus, max_bytes: int = _TRAIN_BYTES) -> Iterator[str]:
    """Yield the documents that a BPE is trained on: all of a small corpus, else an even share from items spread over it."""
    items = corpus.items()
    size = corpus.num_bytes()
    chosen, share = items, max_bytes
    if size is None or size > max_bytes:
        number = min(len(items), 64)
        chosen = [items[permute(i, len(items), seed=0)] for i in range(number)]
        share = max_bytes // max(1, number)
    for item in chosen:
        left = share
        for text in corpus.read(item):
            yield text.encode("utf-8", errors="ignore").decode()[
                :left
            ]  # surrogates are reported when they are tokenized
            left -= len(text)
            if left <= 0:
                break


def make_tokenizer(word: str, corpus: Corpus | None, end_token: str | None = None) -> TextTokenizer:
    """Return the tokenizer that a word or path names; `bpe:N` and `char` are made from the corpus.

    Raises:
        ValueError, FileNotFoundError: see `tokenizer.py`.
    """
    if word == "bytes":
        return ByteTokenizer()
    if word == "gpt2":
        return gpt2_tokenizer()
    if corpus is None and (word == "char" or bpe_vocab_size(word) is not None):
        raise ValueError(
            f"the tokenizer {word} is made from a corpus: leave it out to take the one of the store"
        )
    if word == "char":
        assert corpus is not None
        characters: set[str] = set()
        for text in corpus.documents():
            characters.update(text)
        return CharTokenizer("".join(c for c in characters if not 0xD800 <= ord(c) < 0xE000))
    if (size := bpe_vocab_size(word)) is not None:
        assert corpus is not None
        return train_bpe(training_texts(corpus), size)
    return load_tokenizer(word, end_token)
