"""Step 6 of 8: the DataModule that ties corpus, tokenizer, store, order and loaders together.

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
"""

import math
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_gpt_loop import sample_order
from lit_gpt_loop.corpus import Corpus, open_corpus
from lit_gpt_loop.loaders import EvalLoader, LoaderOptions, TrainLoader
from lit_gpt_loop.packing import (
    TEST,
    TRAIN,
    VAL,
    DocumentRows,
    PackedBlocks,
    split_by_document,
    split_tail,
    target_bytes,
)
from lit_gpt_loop.store_build import build_store, make_tokenizer, store_path
from lit_gpt_loop.token_store import TokenStore
from lit_gpt_loop.tokenizer import TextTokenizer, bpe_vocab_size

_DEFAULT_TOKENIZER = "bpe:4096"
_SPLIT_NAMES = {TRAIN: "train", VAL: "val", TEST: "test"}


class TextDataModule(pl.LightningDataModule):
    """Documents to batches for pretraining: prepared once, resumable at any sample, on any number of ranks.

    Args:
        corpus: factbook, kjv, sympy, installed; a path, glob or folder, or a list of them; hf:NAME for `datasets.load_dataset`.
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
        corpus: str | list[str] | Corpus = "factbook",
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
        for name, value in (("context_length", context_length), ("micro_batch_size", micro_batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value}: at least 1")
        if min(val_fraction, test_fraction) < 0 or val_fraction + test_fraction >= 1:
            raise ValueError(
                f"val_fraction={val_fraction} and test_fraction={test_fraction}: neither below 0, and together below 1, "
                f"so that something is left to train on"
            )
        if val_split not in ("document", "tail"):
            raise ValueError(f"val_split={val_split!r}: document or tail")
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
        self.tokenizer_word, self.end_token = tokenizer, end_token
        self.data_dir, self.prepare_processes = data_dir, prepare_processes
        self.context_length, self.micro_batch_size = context_length, micro_batch_size
        self.global_batch_size = global_batch_size
        self.packed, self.in_document_attention, self.shuffle, self.seed = (
            packed,
            in_document_attention,
            shuffle,
            seed,
        )
        self.val_split, self.val_fraction, self.test_fraction = val_split, val_fraction, test_fraction
        self._limits = {TRAIN: limit_train_blocks, VAL: limit_val_blocks, TEST: limit_test_blocks}
        self.num_workers, self.pin_memory = num_workers, pin_memory

        self._store: TokenStore | None = None
        self._samples: dict[int, PackedBlocks | DocumentRows] = {}
        self._given_store = Path(store) if store is not None else None
        if self._given_store is None:
            self.tokenizer_word = tokenizer or _DEFAULT_TOKENIZER
        self.vocab_size, self.eot_id = self._vocabulary()
        self.pad_id = self.eot_id
        self._base_samples = self._base_step = 0  # position when the trainer stood at `_base_step` updates
        self._base_trainer: pl.Trainer | None = None
        self._accumulation_we_set: int | None = None
        self._loaded_accumulation: int | None = None

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
        return store_path(self.data_dir, self.corpus, self.tokenizer_word or "", self.end_token)

    def _vocabulary(self) -> tuple[int, int]:
        """Return (vocabulary size, end token) from the arguments; reads the corpus for `char` only."""
        word = self.tokenizer_word or ""
        if self._given_store is not None:
            opened = TokenStore(self._given_store)
            return opened.vocab_size, opened.eot_id
        if word == "gpt2":
            return 50257, 50256
        if (size := bpe_vocab_size(word)) is not None:
            return size, 0
        return self.tokenizer.vocab_size, self.tokenizer.eot_id

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer; one that is trained on the corpus exists once the store is prepared.

        Raises:
            RuntimeError: it does not exist yet.
        """
        if self._store is not None:
            return self._store.tokenizer
        word = self.tokenizer_word or ""
        if self._given_store is not None or bpe_vocab_size(word) is not None:
            if not (self.store_path / "tokenizer.json").is_file():
                raise RuntimeError(
                    f"the tokenizer {word} is trained when the corpus is prepared: call `prepare_data()` first, or run "
                    f"`python -m recipes.prepare`."
                )
            return TokenStore(self.store_path).tokenizer
        return make_tokenizer(word, self.corpus if word == "char" else None, self.end_token)

    def prepare_data(self) -> None:
        """Tokenize the corpus unless that is done. Lightning calls this on one process of each node."""
        if self._given_store is None:
            self.prepare()

    def prepare(
        self, part: tuple[int, int] = (1, 1), num_processes: int | None = None, progress: bool = True
    ) -> Path:
        """Tokenize the corpus, or part I of N, unless that is done; return the store's folder. See `build_store`."""
        return build_store(
            self.corpus,
            self.tokenizer_word or "",
            self.data_dir,
            self.end_token,
            part,
            num_processes or self.prepare_processes,
            progress=progress,
        )

    @property
    def store(self) -> TokenStore:
        """The opened token store.

        Raises:
            RuntimeError: `setup` was not called yet.
        """
        if self._store is None:
            raise RuntimeError(
                "the data is not set up: call `prepare_data()` and `setup()`, as the Trainer does"
            )
        return self._store

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenized data, for manifests."""
        return self.store.fingerprint

    # ---- set-up

    def setup(self, stage: str | None = None) -> None:
        """Open the store, make the splits and, for a fit, settle accumulation.

        Raises:
            FileNotFoundError: the store was not prepared.
            ValueError: a corpus shorter than a block; a batch that does not divide; Trainer arguments that do not fit an endless stream.
        """
        if self._store is None:
            store = TokenStore(self.store_path)
            if self._given_store is not None and self.tokenizer_word is not None:
                wanted = make_tokenizer(self.tokenizer_word, None, self.end_token)
                store.check_tokenizer(wanted.sha256, self.tokenizer_word)
            self._samples = self._split(store)
            self._store = store
            self.__dict__.pop("tokenizer", None)
            rank_zero_info(self.summary())
        if self.trainer is not None and stage == "fit":
            self._settle_trainer(self.trainer)

    def _split(self, store: TokenStore) -> dict[int, PackedBlocks | DocumentRows]:
        if self.val_split == "tail":
            streams = split_tail(store, self.val_fraction, self.test_fraction)
        else:
            streams = split_by_document(store, self.seed, self.val_fraction, self.test_fraction)
        samples: dict[int, PackedBlocks | DocumentRows] = {}
        for kind, stream in zip((TRAIN, VAL, TEST), streams, strict=True):
            if self.packed:
                samples[kind] = PackedBlocks(
                    stream, self.context_length, self.pad_id, keep_tail=kind != TRAIN
                )
            else:
                samples[kind] = DocumentRows(stream, self.context_length, self.pad_id)
        if not samples[TRAIN].num_samples:
            raise ValueError(
                f"the training split of {store.path} has {streams[TRAIN].num_tokens} tokens, fewer than one block of "
                f"context_length + 1 = {self.context_length + 1}: take a larger corpus or `--data.context_length` "
                f"{max(1, streams[TRAIN].num_tokens - 1)} or less."
            )
        if self.val_fraction > 0 and not samples[VAL].num_samples:
            raise ValueError(
                f"the validation split of {store.path} has {streams[VAL].num_tokens} tokens; it takes 2 to predict one. "
                f"Raise `--data.val_fraction`, now {self.val_fraction}."
            )
        return samples

    def _settle_trainer(self, trainer: pl.Trainer) -> None:
        """Set accumulation and refuse what does not go with an endless stream."""
        if trainer is not self._base_trainer:
            self._base_trainer, self._base_samples, self._base_step = trainer, 0, 0
            self._loaded_accumulation = self._accumulation_we_set = None
        if any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "GradientAccumulationScheduler changes the global batch during a run: leave it out."
            )
        world_size = self._layout()[1]
        needed = self.accumulation(world_size)
        if trainer.accumulate_grad_batches not in (1, needed, self._accumulation_we_set):
            raise ValueError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}), but global_batch_size={self.global_batch_size} in "
                f"micro-batches of {self.micro_batch_size} on {world_size} ranks takes {needed}: leave accumulate_grad_batches out, "
                f"or leave global_batch_size out."
            )
        if trainer.lightning_module is None or trainer.lightning_module.automatic_optimization:
            trainer.accumulate_grad_batches = self._accumulation_we_set = needed
        limit = trainer.limit_train_batches
        if (overfit := getattr(trainer, "overfit_batches", 0)) > 0:  # the Trainer does not declare it
            raise ValueError(
                f"Trainer(overfit_batches={overfit}): use `--data.limit_train_blocks N` to train on the same N blocks again and again."
            )
        if isinstance(limit, float) and limit != 1.0:
            raise ValueError(
                f"Trainer(limit_train_batches={limit}) is a share of an endless stream: use max_steps, or limit_train_blocks."
            )
        if isinstance(limit, int) and limit % needed and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            raise ValueError(
                f"Trainer(limit_train_batches={limit}) cuts a window of {needed} micro-batches: take a multiple of {needed}, for "
                f"example {math.ceil(limit / needed) * needed}."
            )
        if trainer.max_steps == -1 and trainer.max_epochs != -1 and not isinstance(limit, int):
            per_epoch = self.samples_per_epoch / self.samples_per_update
            asked = f"max_epochs={trainer.max_epochs} is {math.ceil(per_epoch * (trainer.max_epochs or 1))} updates"
            raise ValueError(
                f"the training stream is endless, so max_epochs does not end it: set Trainer(max_steps=...). One epoch of this "
                f"corpus is {per_epoch:.1f} updates, {asked}; max_epochs=-1 without max_steps runs until it is stopped."
            )

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
        n, limit = self._samples[TRAIN].num_samples, self._limits[TRAIN]
        return n if limit is None else min(n, limit)

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
        return {
            "fingerprint": self.fingerprint,
            "context_length": self.context_length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "packed": self.packed,
            "val_split": self.val_split,
            "val_fraction": self.val_fraction,
            "test_fraction": self.test_fraction,
            "samples_per_epoch": self.samples_per_epoch,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it is a position in; independent of ranks, workers and micro-batch size."""
        if self._store is None:
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
        if self._store is not None:
            now = self._identity()
            different = [
                f"{k} was {state_dict.get(k)!r}, is {v!r}" for k, v in now.items() if state_dict.get(k) != v
            ]
            if different:
                raise ValueError(
                    "the checkpoint's position does not fit this data: "
                    + "; ".join(different)
                    + ". Use the values of the run that "
                    "wrote it; to train its weights on other data, start a new run from the weights alone."
                )
        self._base_samples = int(state_dict["samples_consumed"])
        self._base_step = int(state_dict["global_step"])
        self._loaded_accumulation = int(state_dict["accumulation"])

    def _start(self) -> int:
        """Return the position, called when the first training batch is wanted; set Lightning's micro-batch counters to match.

        Lightning counts micro-batches and steps when accumulate_grad_batches divides the count. After a checkpoint in the middle
        of a window, or with another accumulation than now, the count would put the next update's end in the wrong place.
        """
        if self.trainer is not None and self._loaded_accumulation is not None:
            # `epoch_loop.batch_progress` has no public setter; tests fail if Lightning changes it.
            progress = self.trainer.fit_loop.epoch_loop.batch_progress
            for counts in (progress.current, progress.total):
                windows = counts.ready // self._loaded_accumulation
                shift = windows * self.trainer.accumulate_grad_batches - counts.ready
                for name in ("ready", "started", "processed", "completed"):
                    setattr(counts, name, getattr(counts, name) + shift)
            self._loaded_accumulation = None
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
            self._samples[TRAIN],
            sample_order.SampleOrder(self.samples_per_epoch, self.seed, self.shuffle),
            self.micro_batch_size,
            *self._layout(),
            self._start,
            self._options(),
        )

    def _eval_indices(self, kind: int) -> range | list[int]:
        n, limit = self._samples[kind].num_samples, self._limits[kind]
        return range(n) if limit is None or limit >= n else [i * n // limit for i in range(limit)]

    def _eval_loader(self, kind: int) -> EvalLoader:
        return EvalLoader(
            self._samples[kind],
            self._eval_indices(kind),
            self.micro_batch_size,
            *self._layout(),
            self._options(),
        )

    def val_dataloader(self) -> EvalLoader:
        """Return this rank's share of the validation blocks, each read once over all ranks."""
        return self._eval_loader(VAL)

    def test_dataloader(self) -> EvalLoader:
        """Return the test blocks; with `test_fraction=0` the validation blocks."""
        return self._eval_loader(TEST if self.test_fraction else VAL)

    def predict_dataloader(self) -> EvalLoader:
        """Return the validation blocks; `recipes.sample` is what continues prompts."""
        return self._eval_loader(VAL)

    # ---- numbers

    @property
    def num_train_blocks(self) -> int:
        """Rows in one epoch."""
        return self.samples_per_epoch

    @property
    def num_train_tokens(self) -> int:
        """Targets in one epoch."""
        if self._limits[TRAIN] is None:
            return self._samples[TRAIN].num_targets
        return sum(b - a for a, b in map(self._samples[TRAIN].token_range, range(self.samples_per_epoch)))

    @property
    def num_train_tail_tokens(self) -> int:
        """Targets at the end of the training stream that do not fill a block and are left out of every epoch."""
        return self._samples[TRAIN].num_tail_tokens

    def _eval_tokens(self, kind: int) -> int:
        return sum(b - a for a, b in map(self._samples[kind].token_range, self._eval_indices(kind)))

    @cached_property
    def val_tokens(self) -> int:
        """Targets of one validation."""
        return self._eval_tokens(VAL)

    @cached_property
    def test_tokens(self) -> int:
        """Targets of one test."""
        return self._eval_tokens(TEST if self.test_fraction else VAL)

    def _eval_bytes(self, kind: int) -> tuple[float, bool]:
        return target_bytes(self._samples[kind], self._eval_indices(kind), self.store.tokenizer.token_bytes())

    @cached_property
    def val_bytes(self) -> float:
        """UTF-8 bytes of the text that the targets of one validation stand for; end tokens stand for none."""
        return self._eval_bytes(VAL)[0]

    @cached_property
    def test_bytes(self) -> float:
        """UTF-8 bytes of the text that the targets of one test stand for."""
        return self._eval_bytes(TEST if self.test_fraction else VAL)[0]

    @property
    def val_bytes_per_token(self) -> float:
        """`val_bytes / val_tokens`: bits per byte = loss in nats per token / ln 2 / this."""
        return self.val_bytes / self.val_tokens

    @property
    def test_bytes_per_token(self) -> float:
        """`test_bytes / test_tokens`."""
        return self.test_bytes / self.test_tokens

    @cached_property
    def token_bytes(self) -> torch.Tensor | None:
        """Bytes of text per id, (vocab_size,) int64, 0 for the end token; None if ids do not stand for fixed bytes.

        `token_bytes[targets].sum()` over the targets of any batches gives the exact denominator of their bits per byte.
        """
        table = self.store.tokenizer.token_bytes()
        return None if table is None else torch.from_numpy(np.asarray(table, dtype=np.int64))

    def summary(self) -> str:
        """Return a few lines on the data, for people."""
        store = self._store or TokenStore(self.store_path)
        samples = self._samples or self._split(store)
        lines = [
            f"data {store.path}: {store.num_documents:,} documents ({store.empty_documents:,} empty ones skipped), "
            f"{store.num_tokens:,} tokens, {store.text_bytes:,} bytes, {store.text_bytes / store.num_tokens:.2f} bytes per token, "
            f"vocabulary {store.vocab_size:,}"
        ]
        unit = "blocks" if self.packed else "rows"
        for kind, name in _SPLIT_NAMES.items():
            part = samples[kind]
            if part.num_samples:
                tail = f", {part.num_tail_tokens:,} at the end left out" if part.num_tail_tokens else ""
                lines.append(
                    f"  {name:5s} {part.stream.num_documents:,} documents, {part.num_targets:,} targets in {part.num_samples:,} {unit} "
                    f"of {self.context_length}{tail}"
                )
        return "\n".join(lines)
