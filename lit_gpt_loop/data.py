"""Step 5 of 10, as a whole: the DataModule that ties corpus, tokenizer, store, order and loaders together.

corpus -> tokenizer -> token store -> sample order -> blocks -> **DataModule** -> GPT -> LitGPT -> Trainer

Works with any LightningModule. A batch is a dict:

| key | shape | |
|---|---|---|
| `inputs` | (B, T) int64 | tokens |
| `targets` | (B, T) int64 | the token after each input; -100 is not trained |
| `sample_ids` | (B,) int64 | training: epoch * samples per epoch + block; validation: the block; -1 is a row without targets |
| `segment_ids` | (B, T) int64 | with `in_document_attention` only: number of the input's document within the row |

The training stream is endless: `max_steps` ends a run, epochs are counted but mark nothing. Its position is
`samples_consumed`, which follows from the updates that happened, never from batches that were fetched.

One class, whose signature is the schema of the `data:` section; what it does stands in the files of the steps before. With
every argument explained it is longer than files here are otherwise.
"""

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_gpt_loop import sample_order
from lit_gpt_loop.corpus import Corpus, open_corpus
from lit_gpt_loop.loaders import EvalLoader, LoaderOptions, TrainLoader
from lit_gpt_loop.packing import TEST, TRAIN, VAL
from lit_gpt_loop.splits import Evaluation, Splits, SplitSpec
from lit_gpt_loop.store_build import build_store, store_path
from lit_gpt_loop.stream_training import check_limits, realign_micro_batches, set_accumulation
from lit_gpt_loop.token_store import TokenStore
from lit_gpt_loop.tokenizer import TextTokenizer, bpe_vocab_size
from lit_gpt_loop.tokenizer_choice import make_tokenizer


class TextDataModule(pl.LightningDataModule):
    """Documents to batches for pretraining: prepared once, resumable at any sample, on any number of ranks.

    Args:
        corpus: factbook, kjv, sympy, installed; a path, glob or folder, or a list of them; hf:NAME for `datasets.load_dataset`.
            In code, a `Corpus` object will do as well (it is no type of the command line).
        corpus_options: keyword arguments of `load_dataset`, for hf:NAME.
        text_field: key or column that holds the text in JSONL, Parquet and hf:NAME.
        document_separator: text between two documents of a text file; by default a file is one document.
        tokenizer: bytes, char, bpe:N (trained on the corpus), gpt2, or the path of a tokenizer.json. Default bpe:4096, or
            that of `store`.
        end_token: name of the end token, if a tokenizer.json calls it something unusual.
        data_dir: folder of the token stores.
        store: a prepared store to read as it is; the corpus is then not looked at.
        prepare_processes: processes that tokenize; with 1 the tokenizers library uses threads.
        context_length: tokens per row.
        micro_batch_size: rows per batch and rank.
        global_batch_size: rows per update over all ranks; accumulation follows. By default what the Trainer's own
            `accumulate_grad_batches` gives.
        global_batch_tokens: the same in tokens.
        packed: False has one document per row, padded, for what documents' borders matter to.
        in_document_attention: give batches `segment_ids`, so that a model can keep attention within documents.
        shuffle: False reads training blocks in the order of the store.
        seed: of the order, and of the split by document.
        val_split: `document` holds out whole documents, `tail` the last tokens of the stream.
        val_fraction: share of the documents (or tokens) for validation.
        test_fraction: share for `trainer.test`; with 0, it takes the validation set.
        limit_train_blocks: train on so many first blocks only (in place of the Trainer's `overfit_batches`).
        limit_val_blocks: validate on so many blocks, evenly spread; the same ones every time.
        limit_test_blocks: the same for the test set.
        num_workers: processes that read. 0 is best on local disks, where a batch takes microseconds.
        pin_memory: by default if the Trainer runs on a GPU.

    Raises:
        ValueError: values that do not go together; see the message for the remedy.
        FileNotFoundError: a tokenizer file or store is missing.

    Attributes:
        vocab_size: known at construction, so that a model can be built from it.
        eot_id: the end token.
        pad_id: what inputs hold where there is nothing; the end token, never a target.
        context_length: tokens per row.
    """

    def __init__(
        self,
        *,
        corpus: str | list[str] = "factbook",
        corpus_options: dict[str, Any] | None = None,
        text_field: str = "text",
        document_separator: str | None = None,
        tokenizer: str | None = None,
        end_token: str | None = None,
        data_dir: str = "data",
        store: str | None = None,
        prepare_processes: int = 1,
        context_length: int = 256,
        micro_batch_size: int = 8,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
        packed: bool = True,
        in_document_attention: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        val_split: Literal["document", "tail"] = "document",
        val_fraction: float = 0.05,
        test_fraction: float = 0.0,
        limit_train_blocks: int | None = None,
        limit_val_blocks: int | None = None,
        limit_test_blocks: int | None = None,
        num_workers: int = 0,
        pin_memory: bool | None = None,
    ) -> None:
        super().__init__()
        self.spec = SplitSpec(context_length, seed, packed, val_split, val_fraction, test_fraction)
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size}: at least 1")
        if global_batch_tokens is not None:
            if global_batch_size is not None:
                raise ValueError(
                    f"global_batch_size={global_batch_size} and global_batch_tokens={global_batch_tokens}: give one of them"
                )
            global_batch_size, rest = divmod(global_batch_tokens, context_length)
            if rest or not global_batch_size:
                near = max(1, round(global_batch_tokens / context_length)) * context_length
                raise ValueError(
                    f"global_batch_tokens={global_batch_tokens} is no multiple of context_length={context_length}: take {near}"
                )
        self.corpus_spec, self.corpus_options = corpus, corpus_options
        self.text_field, self.document_separator = text_field, document_separator
        self.end_token, self.data_dir, self.prepare_processes = end_token, data_dir, prepare_processes
        self.context_length, self.micro_batch_size = context_length, micro_batch_size
        self.global_batch_size, self.in_document_attention = global_batch_size, in_document_attention
        self.shuffle, self.seed, self.num_workers, self.pin_memory = shuffle, seed, num_workers, pin_memory
        self._limits = {TRAIN: limit_train_blocks, VAL: limit_val_blocks, TEST: limit_test_blocks}
        self._given_store = Path(store) if store is not None else None
        # With a store given, no word means the store's own tokenizer.
        self._tokenizer_word = tokenizer or ("" if store is not None else "bpe:4096")
        self._splits: Splits | None = None
        self.vocab_size, self.eot_id = self._vocabulary()
        self.pad_id = self.eot_id
        self._base_samples = self._base_step = 0  # position when the trainer stood at `_base_step` updates
        self._base_trainer: pl.Trainer | None = None
        self._accumulation_set: int | None = None
        self._saved_accumulation: int | None = (
            None  # of a checkpoint whose micro-batch counters are still to be realigned
        )

    # ---- corpus, tokenizer, store

    @cached_property
    def corpus(self) -> Corpus:
        """The documents."""
        return open_corpus(self.corpus_spec, self.text_field, self.document_separator, self.corpus_options)

    @cached_property
    def store_path(self) -> Path:
        """The folder of the token store, prepared or not."""
        if self._given_store is not None:
            return self._given_store
        return store_path(self.data_dir, self.corpus, self._tokenizer_word, self.end_token)

    def _vocabulary(self) -> tuple[int, int]:
        """Return (vocabulary size, end token) from the arguments; reads the corpus for `char` only."""
        if self._given_store is not None:
            store = self._open_store()
            return store.vocab_size, store.eot_id
        if self._tokenizer_word == "gpt2":
            return 50257, 50256
        if (size := bpe_vocab_size(self._tokenizer_word)) is not None:
            return size, 0
        return self.tokenizer.vocab_size, self.tokenizer.eot_id

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer; one that is trained on the corpus exists once that is prepared.

        Raises:
            RuntimeError: it does not exist yet.
        """
        if self._splits is not None:
            return self._splits.store.tokenizer
        return self._early_tokenizer

    @cached_property
    def _early_tokenizer(self) -> TextTokenizer:
        word = self._tokenizer_word
        if self._given_store is None and bpe_vocab_size(word) is None:
            return make_tokenizer(word, self.corpus if word == "char" else None, self.end_token)
        if not (self.store_path / "tokenizer.json").is_file():
            raise RuntimeError(
                f"the tokenizer {word} is trained when the corpus is prepared: call `prepare_data()` first, or run "
                f"`python -m recipes.prepare`."
            )
        return self._open_store().tokenizer

    def _open_store(self) -> TokenStore:
        store = TokenStore(self.store_path)
        word = self._tokenizer_word
        if self._given_store is None or not word:
            return store
        made_from_corpus = word == "char" or bpe_vocab_size(word) is not None
        if made_from_corpus:  # whichever the store was made from
            if store.meta.tokenizer != word:
                raise ValueError(
                    f"the token store {store.path} was written with the tokenizer {store.meta.tokenizer}, not with {word}: leave out "
                    f"`--data.tokenizer`, or give the store of that tokenizer."
                )
        else:
            store.check_tokenizer(make_tokenizer(word, None, self.end_token).sha256, word)
        return store

    def prepare_data(self) -> None:
        """Tokenize the corpus unless that is done. Lightning calls this on one process of each node."""
        if self._given_store is None:
            self.prepare()

    def prepare(
        self, part: tuple[int, int] = (1, 1), num_processes: int | None = None, progress: bool = True
    ) -> Path:
        """Tokenize the corpus, or part I of N, unless that is done; return the store's folder. See `build_store`.

        Raises:
            ValueError: a store was given, which needs no preparing; a document that is no text.
            RuntimeError: no disk space.
        """
        if self._given_store is not None:
            raise ValueError(
                f"store={self._given_store} is prepared already: leave it out to prepare a corpus"
            )
        processes = self.prepare_processes if num_processes is None else num_processes
        return build_store(
            self.corpus,
            self._tokenizer_word,
            self.data_dir,
            self.end_token,
            part,
            processes,
            progress=progress,
        )

    @property
    def splits(self) -> Splits:
        """The training, validation and test samples.

        Raises:
            RuntimeError: `setup` was not called yet.
        """
        if self._splits is None:
            raise RuntimeError(
                "the data is not set up: call `prepare_data()` and `setup()`, as the Trainer does"
            )
        return self._splits

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenized data, for manifests."""
        return self.splits.store.fingerprint

    # ---- set-up

    def setup(self, stage: str | None = None) -> None:
        """Open the store, make the splits and, for a fit, settle accumulation.

        Raises:
            FileNotFoundError: the store was not prepared.
            ValueError: a corpus shorter than a block; a batch that does not divide; Trainer arguments that do not go with an endless
                stream.
        """
        if self._splits is None:
            self._splits = Splits(self._open_store(), self.spec, self._limits)
            rank_zero_info(self._splits.summary())
        if self.trainer is None or stage != "fit":
            return
        if self.trainer is not self._base_trainer:  # a new run; a checkpoint's position is loaded after this
            self._base_trainer, self._base_samples, self._base_step = self.trainer, 0, 0
            self._accumulation_set = self._saved_accumulation = None
        world_size = self._layout()[1]
        needed = self.accumulation(world_size)
        batch = f"global_batch_size={self.global_batch_size} in micro-batches of {self.micro_batch_size} on {world_size} ranks"
        set_accumulation(self.trainer, needed, self._accumulation_set, batch)
        self._accumulation_set = needed
        check_limits(self.trainer, needed, self.samples_per_epoch / self.samples_per_update)

    def _layout(self) -> tuple[int, int]:
        """Return (rank, number of ranks) that share the data; without a trainer (0, 1)."""
        layout = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (layout["rank"], layout["num_replicas"]) if layout else (0, 1)

    def accumulation(self, world_size: int) -> int:
        """Return the micro-batches per rank that make one update.

        Raises:
            ValueError: the global batch does not divide; names numbers that do.
        """
        if self.global_batch_size is None:
            return self.trainer.accumulate_grad_batches if self.trainer is not None else 1
        return sample_order.accumulation(self.global_batch_size, self.micro_batch_size, world_size)

    # ---- position

    @property
    def samples_per_update(self) -> int:
        """Rows of one update over all ranks."""
        world_size = self._layout()[1]
        return self.accumulation(world_size) * self.micro_batch_size * world_size

    @property
    def samples_per_epoch(self) -> int:
        """Rows in one pass over the training split."""
        return self.splits.samples_per_epoch

    @property
    def samples_consumed(self) -> int:
        """Rows of all updates so far, skipped updates included; a window that is not finished does not count."""
        updates = self.trainer.global_step - self._base_step if self.trainer is not None else 0
        return self._base_samples + max(0, updates) * self.samples_per_update

    @property
    def epoch(self) -> float:
        """Passes over the training split so far, fractional."""
        return self.samples_consumed / self.samples_per_epoch

    def _identity(self) -> dict[str, Any]:
        """Return what a position is a position in."""
        return {
            "fingerprint": self.fingerprint,
            **asdict(self.spec),
            "shuffle": self.shuffle,
            "samples_per_epoch": self.samples_per_epoch,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it is one in; independent of ranks, workers and micro-batch size."""
        if self._splits is None:
            return {}
        return {
            "samples_consumed": self.samples_consumed,
            "global_step": self.trainer.global_step if self.trainer is not None else 0,
            "accumulation": self.accumulation(self._layout()[1]),
            **self._identity(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint stood; evaluation takes nothing from it.

        Raises:
            ValueError: the checkpoint's position is one in other data, or in another order; names each difference.
        """
        if not state_dict or (self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING):
            return
        now = self._identity()
        different = [
            f"{k} was {state_dict.get(k)!r}, is {v!r}" for k, v in now.items() if state_dict.get(k) != v
        ]
        if different:
            raise ValueError(
                "the checkpoint's position does not fit this data: "
                + "; ".join(different)
                + ". Use the values of the run that wrote "
                "it; to train its weights on other data, start a new run from the weights alone."
            )
        self._base_samples = int(state_dict["samples_consumed"])
        self._base_step = int(state_dict["global_step"])
        self._saved_accumulation = int(state_dict["accumulation"])

    def _start(self) -> int:
        """Return the position; called when the first training batch is wanted, which is after everything is restored."""
        if self.trainer is not None and self._saved_accumulation is not None:
            realign_micro_batches(self.trainer, self._saved_accumulation)
            self._saved_accumulation = None
        return self.samples_consumed

    # ---- loaders

    def _options(self) -> LoaderOptions:
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return LoaderOptions(
            num_workers=self.num_workers,
            pin_memory=on_gpu if self.pin_memory is None else self.pin_memory,
            eot_id=self.eot_id if self.in_document_attention else None,
        )

    def train_dataloader(self) -> TrainLoader:
        """Return this rank's share of the endless training stream."""
        return TrainLoader(
            self.splits.samples[TRAIN],
            sample_order.SampleOrder(self.samples_per_epoch, self.seed, self.shuffle),
            self.micro_batch_size,
            *self._layout(),
            self._start,
            self._options(),
        )

    def _evaluation_loader(self, kind: int) -> EvalLoader:
        return EvalLoader(
            self.splits.samples[kind],
            self.splits.evaluation_indices(kind),
            self.micro_batch_size,
            *self._layout(),
            self._options(),
        )

    @property
    def _test_kind(self) -> int:
        return TEST if self.spec.test_fraction else VAL

    def val_dataloader(self) -> EvalLoader:
        """Return this rank's share of the validation blocks, each read once over all ranks."""
        return self._evaluation_loader(VAL)

    def test_dataloader(self) -> EvalLoader:
        """Return the test blocks; with `test_fraction=0` the validation blocks."""
        return self._evaluation_loader(self._test_kind)

    def predict_dataloader(self) -> EvalLoader:
        """Return the validation blocks; `recipes.sample` is what continues prompts."""
        return self._evaluation_loader(VAL)

    # ---- numbers

    @property
    def num_train_blocks(self) -> int:
        """Rows in one epoch."""
        return self.samples_per_epoch

    @property
    def num_train_tokens(self) -> int:
        """Targets in one epoch."""
        return self.splits.tokens_per_epoch

    @property
    def num_train_tail_tokens(self) -> int:
        """Targets at the end of the training stream that do not fill a block and are left out of every epoch."""
        return self.splits.samples[TRAIN].num_tail_tokens

    @property
    def val_evaluation(self) -> Evaluation:
        """Tokens and bytes of one validation, for bits per byte."""
        return self.splits.evaluation(VAL)

    @property
    def test_evaluation(self) -> Evaluation:
        """Tokens and bytes of one test."""
        return self.splits.evaluation(self._test_kind)

    @property
    def val_bytes_per_token(self) -> float:
        """UTF-8 bytes of text per target of the validation set: bits per byte = nats per token / ln 2 / this."""
        return self.val_evaluation.bytes_per_token

    @property
    def test_bytes_per_token(self) -> float:
        """The same of the test set."""
        return self.test_evaluation.bytes_per_token

    @cached_property
    def token_bytes(self) -> torch.Tensor | None:
        """Bytes of text per id, (vocab_size,) int64, 0 for the end token; None if ids do not stand for fixed bytes.

        `token_bytes[targets].sum()` over the targets of any batches gives the exact denominator of their bits per byte.
        """
        table = self.splits.store.tokenizer.token_bytes()
        return None if table is None else torch.from_numpy(np.asarray(table, dtype=np.int64))

    def summary(self) -> str:
        """Return a few lines on the prepared data, for people."""
        return (self._splits or Splits(self._open_store(), self.spec, self._limits)).summary()
