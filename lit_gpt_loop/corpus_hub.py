"""Anything that `datasets.load_dataset` takes: hub names, local builders, streaming.

`hf:allenai/c4` with `corpus_options: {name: en, split: train, streaming: true, revision: ...}`. Pin `revision` for a hub data
set: a stream has no content hash before it is read, so a new revision would not be noticed. A map-style data set is cut
into ranges of rows, a stream into its shards; a shard is the unit that processes and jobs share out.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from lit_gpt_loop.corpus import Corpus, Piece, WorkItem

_ROWS_PER_ITEM = 10_000


class HubCorpus(Corpus):
    """One split of a data set.

    Args:
        path: first argument of `load_dataset`.
        options: its other arguments; `split` is `train` unless given.
        text_field: the column that holds the text.

    Raises:
        ValueError: the data set has no such column, or no such split.
        FileNotFoundError: it is neither here nor on a hub that can be reached.
    """

    def __init__(self, path: str, options: dict[str, Any], text_field: str = "text") -> None:
        self.path, self.options, self.text_field = path, {"split": "train", **options}, text_field
        self.name = path.rsplit("/", 1)[-1]
        self._dataset = self._load()
        columns = self._dataset.column_names
        if columns is not None and text_field not in columns:
            raise ValueError(
                f"hf:{path} has no column {text_field!r} (found: {', '.join(columns)}): name it with `--data.text_field`."
            )

    def _load(self) -> Any:
        import datasets

        try:
            dataset = datasets.load_dataset(self.path, **self.options)
        except (FileNotFoundError, ConnectionError) as e:
            raise FileNotFoundError(
                f"corpus hf:{self.path}: {e}. Check the name and the network; HF_HUB_OFFLINE=1 reads only what was downloaded before."
            ) from e
        if isinstance(dataset, (dict, datasets.DatasetDict, datasets.IterableDatasetDict)):
            raise ValueError(
                f"hf:{self.path}: split={self.options['split']!r} names several splits: name one."
            )
        return dataset

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_dataset"}  # a process loads its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._dataset = self._load()

    @property
    def _is_streaming(self) -> bool:
        return bool(self.options.get("streaming"))

    def items(self) -> list[WorkItem]:
        """Return ranges of rows, or shards of a stream."""
        if self._is_streaming:
            return [WorkItem((Piece(self.path, i, i + 1),)) for i in range(self._dataset.num_shards)]
        n = len(self._dataset)
        return [
            WorkItem((Piece(self.path, i, min(i + _ROWS_PER_ITEM, n)),)) for i in range(0, n, _ROWS_PER_ITEM)
        ]

    def read(self, item: WorkItem) -> Iterator[str]:
        """Yield the text of the item's rows."""
        for piece in item.pieces:
            assert piece.start is not None and piece.stop is not None
            if self._is_streaming:
                rows = self._dataset.shard(num_shards=self._dataset.num_shards, index=piece.start)
            else:
                rows = self._dataset.select(range(piece.start, piece.stop))
            for i, row in enumerate(rows.select_columns([self.text_field])):
                text = row[self.text_field]
                if not isinstance(text, str):
                    raise ValueError(
                        f"hf:{self.path}, row {i} of piece {piece.start}: {self.text_field!r} is {type(text).__name__}, not text."
                    )
                yield text

    def source_key(self) -> str:
        """Return a hash over the arguments and over what the library knows of the data's version."""
        info = self._dataset.info
        known: list[Any] = [
            self.path,
            self.text_field,
            {k: v for k, v in self.options.items() if k != "num_proc"},
        ]
        known += [str(info.version), info.dataset_size, sorted(info.download_checksums or {})]
        if self._is_streaming:
            known.append(self._dataset.num_shards)
        else:
            # The library's name for this very table (of builder, configuration and files' time stamps); it has no public one.
            known += [len(self._dataset), self._dataset._fingerprint]
        return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()

    def num_bytes(self) -> int | None:
        """Return the size that the data set states."""
        size = self._dataset.info.dataset_size
        return int(size) if size else None
