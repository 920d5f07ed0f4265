"""The data of a planned run: vocabulary and length of an epoch, without torch and without reading a corpus (layer T)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_TOKENIZER = "bpe:4096"  # TextDataModule's, which its signature does not show; compared in a test
MAX_DOCUMENTS = 2**22  # of a store whose real split is made for the plan: it takes half a second


@dataclass(frozen=True)
class DataFacts:
    """What is known of the data.

    Attributes:
        vocab_size: ids; None before a tokenizer that learns them was trained.
        epoch_tokens: tokens of all blocks (or padded rows) of one pass over the training split; None if not prepared.
        is_estimate: `epoch_tokens` is the store's tokens times the split's share.
    """

    vocab_size: int | None
    epoch_tokens: int | None
    is_estimate: bool = False


def describe_data(data: Mapping[str, Any], notes: list[str]) -> DataFacts:
    """Return what is known without reading the corpus.

    Args:
        data: the arguments of TextDataModule, all of them.
        notes: gets a line for what had to be assumed.

    Raises:
        ValueError: fractions that leave nothing to train on, or a store that cannot be split so.
    """
    # numpy and tokenizers: half a second that only this needs
    from lit_gpt_loop.packing import TRAIN
    from lit_gpt_loop.splits import Splits, SplitSpec
    from lit_gpt_loop.store_build import make_tokenizer
    from lit_gpt_loop.token_store import TokenStore
    from lit_gpt_loop.tokenizer import bpe_vocab_size

    split = SplitSpec(**{f: data[f] for f in SplitSpec.__dataclass_fields__})
    word, end_token = data["tokenizer"], data["end_token"]
    store = None
    try:
        if data["store"] is not None:
            store = TokenStore(data["store"])
        else:
            word = word or DEFAULT_TOKENIZER
            folder = _prepared_store(data, word, notes)
            store = TokenStore(folder) if folder is not None else None
    except (FileNotFoundError, ModuleNotFoundError, RuntimeError, ValueError) as e:
        notes.append(f"corpus: not looked at ({str(e).splitlines()[0]})")
    if store is not None:
        if store.num_documents > MAX_DOCUMENTS:
            share = 1.0 - split.val_fraction - split.test_fraction
            return DataFacts(store.vocab_size, round(store.num_tokens * share), is_estimate=True)
        splits = Splits(store, split, {TRAIN: data["limit_train_blocks"]})
        return DataFacts(store.vocab_size, splits.samples_per_epoch * split.context_length)
    if word == "gpt2":
        return DataFacts(50257, None)
    if word is None or word == "char":
        return DataFacts(None, None)
    size = bpe_vocab_size(word)
    return DataFacts(size if size is not None else make_tokenizer(word, None, end_token).vocab_size, None)


def _prepared_store(data: Mapping[str, Any], word: str, notes: list[str]) -> Path | None:
    """Return the folder of the corpus' store, if it is prepared."""
    from lit_gpt_loop.corpus import open_corpus
    from lit_gpt_loop.store_build import store_path
    from lit_gpt_loop.token_store import PartMeta

    corpus = data["corpus"]
    if not (isinstance(corpus, str) and corpus.startswith("hf:")):
        opened = open_corpus(corpus, data["text_field"], data["document_separator"], data["corpus_options"])
        folder = store_path(data["data_dir"], opened, word, data["end_token"])
        return folder if folder.is_dir() else None
    # `load_dataset` may download all of it, so its store is known by the names of data set and tokenizer alone.
    name = corpus.removeprefix("hf:").rsplit("/", 1)[-1]
    metas = {
        path.parent.parent: PartMeta.read(path.parent)
        for path in Path(data["data_dir"]).glob("*/part-*/meta.json")
    }
    found = [folder for folder, meta in metas.items() if (meta.corpus, meta.tokenizer) == (name, word)]
    if len(found) == 1:
        notes.append(
            f"corpus: {corpus} is not opened (that may download it); taken to be the store {found[0]}"
        )
        return found[0]
    notes.append(
        f"corpus: {corpus} is not opened (that may download it); "
        + (
            f"{len(found)} stores could be its: name one by --data.store"
            if found
            else "give --corpus_tokens for epochs"
        )
    )
    return None
