"""Read training batches beside a run, without moving its position in the data (layer T; for `lr_range.py`).

Lightning holds an iterator over the training loader before a fit's first hook. A second one must not share anything with it that
moves: so it is made from a shallow copy of the loader, whose counters are its own. What a copy still shares (a generator of random
numbers, a data set with a position) is put back: generators by their states, the rest by the `state_dict` and `load_state_dict` of
loader and datamodule, which also prove that the position is the one from before.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader


class ReadAside:
    """Context with an endless iterator `batches`; after it, loader and datamodule are where they were.

    Args:
        loader: one training loader. Without `state_dict` and `load_state_dict` it has to start anew at every `iter()`, as torch's
            DataLoader does, and keep no position in the objects that it holds.
        datamodule: put back as well, if it has these methods.

    Raises:
        ValueError: several loaders; an iterator that cannot be put back; a loader without a batch.
        RuntimeError: at the end, a state that `load_state_dict` did not bring back.
    """

    def __init__(self, loader: Any, datamodule: Any = None) -> None:
        if isinstance(loader, (Mapping, list, tuple)):
            raise ValueError(
                f"the training data is a {type(loader).__name__} of {len(loader)} loaders, and one can be read beside a run: give "
                "one training loader, or leave LRRangeTest out"
            )
        if hasattr(loader, "__next__") and not _has_state(loader):
            raise ValueError(
                f"{type(loader).__name__} is an iterator, and what is read from it cannot be put back: give a loader that starts anew "
                "at every iter(), or state_dict and load_state_dict; or leave LRRangeTest out"
            )
        self._loader = loader
        self._stateful = [x for x in (loader, datamodule) if _has_state(x)]
        self.batches: Iterator[Any] = iter(())

    def __enter__(self) -> "ReadAside":
        self._states = [copy.deepcopy(x.state_dict()) for x in self._stateful]
        self._generators = [(g, g.get_state()) for g in _generators(self._loader)]
        reader = copy.copy(self._loader)
        if isinstance(reader, DataLoader):
            # Private in torch: the run's own iterator, which persistent workers would have us share.
            # tests/lit_gpt_loop/test_read_aside.py notices if torch renames it.
            reader._iterator = None
        self.batches = _endless(reader)
        return self

    def __exit__(self, exc_type: Any, *exc: Any) -> None:
        self.batches.close()  # type: ignore[attr-defined]
        for generator, state in self._generators:
            generator.set_state(state)
        for owner, state in zip(self._stateful, self._states, strict=True):
            if is_same(owner.state_dict(), state):
                continue
            owner.load_state_dict(copy.deepcopy(state))
            if not is_same(owner.state_dict(), state) and exc_type is None:
                raise RuntimeError(
                    f"{type(owner).__name__}.load_state_dict did not bring back what state_dict gave before batches were read: "
                    f"{state} became {owner.state_dict()}. Mend the two methods, or leave LRRangeTest out"
                )


def _has_state(owner: Any) -> bool:
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        passed, batches = 0, iter(loader)
        try:
            for batch in batches:
                passed += 1
                yield batch
        finally:
            if hasattr(batches, "close"):  # now, so that its clean-up comes before the position is put back
                batches.close()
        if not passed:
            raise ValueError(f"the training loader ({type(loader).__name__}) gave no batch")


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of random numbers that a loader and its samplers draw from."""
    samplers = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers.append(getattr(samplers[-1], "sampler", None))
    found = [getattr(s, "generator", None) for s in samplers]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def is_same(a: Any, b: Any) -> bool:
    """Whether two states are equal, values of tensors and arrays included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(is_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
