"""Data for sequence groups: every rank of a group sees the same batch, each data-parallel group another.

`sequence_parallel_sampler` splits a dataset over data parallelism only. `SequenceParallelLoader` then makes the batches
of a group equal by construction: its first rank reads, the others receive what it read, so a loader may shuffle,
augment at random or stream as it likes.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from autosp import mesh
from autosp.agreement import digest_of
from autosp.errors import InputError, RankMismatchError
from autosp.mesh import AutoSPState

_POSITION = "autosp_position"


def sequence_parallel_sampler(
    dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False, state: AutoSPState | None = None
) -> DistributedSampler[Any]:
    """A `DistributedSampler` over the data-parallel axis: one part for each sequence group, the same on all its ranks.

    Args:
        dataset: has a length.
        shuffle: a new order each epoch, by `seed` and ``set_epoch``.
        seed: the same on every rank.
        drop_last: leave out the last samples that do not fill a round; otherwise the first ones fill it up.
        state: as `autosp.initialize` returns it; by default the latest.

    Raises:
        InputError: `autosp.initialize` was not called, or the dataset has no length.
    """
    found = _state(state, "sequence_parallel_sampler")
    if not hasattr(dataset, "__len__"):
        raise InputError(
            f"sequence_parallel_sampler: a {type(dataset).__name__} has no length; split a stream in its own __iter__ "
            "by state.coordinates['dp'] of state.sizes['dp']"
        )
    return DistributedSampler(
        dataset,  # type: ignore[arg-type]
        num_replicas=found.sizes["dp"],
        rank=found.coordinates["dp"],
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


class SequenceParallelLoader:
    """Wraps a loader so that all ranks of a sequence group iterate over the batches of the group's first rank.

    ``state_dict`` counts what the training loop has taken, not what workers have read ahead, and holds the loader's own
    state where it has one (torchdata's ``StatefulDataLoader``); without one, `load_state_dict` skips batches. For that
    a ``DataLoader``'s random sampler without a generator gets one, seeded by `seed` and the epoch; a sampler of your
    own must give an epoch's order again when it is asked again. Iterating is collective over the group: its ranks must
    take the same number of batches.

    Args:
        loader: a ``DataLoader``, or anything that can be iterated again for each epoch. Only the first rank of a group
            iterates over it.
        state: as `autosp.initialize` returns it; by default the latest.
        seed: of a ``DataLoader``'s workers, together with the data-parallel rank, the epoch and the worker's number.
            Persistent workers are seeded when they start, so only their first epoch is drawn again by a resumed run.
        check: compare the first batch of each epoch between data-parallel groups.

    Raises:
        InputError: `autosp.initialize` was not called, or the loader reads a whole dataset in each of several
            data-parallel groups, or its sampler splits it into another number of parts than there are groups.
    """

    def __init__(
        self, loader: Iterable[Any], *, state: AutoSPState | None = None, seed: int = 0, check: bool = True
    ) -> None:
        self.loader = loader
        self.state = _state(state, "SequenceParallelLoader")
        self.epoch = 0
        self.taken = 0
        # Passes begun in this epoch, for a loop that never calls `set_epoch`; and the state of the generator that draws
        # the order, where that is the user's own.
        self._turn = -1
        self._order: torch.Tensor | None = None
        self._check = check
        self._resume: dict[str, Any] | None = None
        self._inner_state: Any = None
        self._seed = seed
        self._first = self.state.sp_rank == 0
        if isinstance(loader, DataLoader):
            self._check_sampler(loader)

    def _check_sampler(self, loader: DataLoader[Any]) -> None:
        dp = self.state.sizes["dp"]
        if isinstance(loader.dataset, IterableDataset):
            return
        sampler = _sampler_of(loader)
        plain = type(sampler).__module__ == "torch.utils.data.sampler"
        replicas = getattr(sampler, "num_replicas", None)
        if (plain and dp > 1) or replicas not in (None, dp):
            groups = "there is 1 data-parallel group" if dp == 1 else f"there are {dp} data-parallel groups"
            what = f"splits the dataset into {replicas} parts" if replicas else "gives each of them the whole dataset"
            raise InputError(
                f"{groups}, but the loader's {type(sampler).__name__} {what}; pass "
                "DataLoader(..., sampler=autosp.data.sequence_parallel_sampler(dataset))"
            )

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Start epoch `epoch` with the next iteration: a new order, if the sampler or the dataset knows epochs."""
        self.epoch = epoch
        self._turn = -1
        loader = self.loader
        for part in (loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))):
            setter = getattr(part, "set_epoch", None)
            if setter is not None:
                setter(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: epoch, batches taken in it, and the loader's own state; the same on every rank of a
        group, another in each data-parallel group if the loader has a state of its own.
        """
        position = {"epoch": self.epoch, "turn": self._turn, "taken": self.taken, "order": self._order}
        return {_POSITION: position, "loader": self._inner_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch that was taken last.

        Raises:
            InputError: `state` is none of ours.
        """
        if not isinstance(state, dict) or _POSITION not in state:
            raise InputError("this is no state of a SequenceParallelLoader; give what its state_dict() returned")
        position = state[_POSITION]
        self.set_epoch(position["epoch"])
        self._turn, self.taken, self._order = position["turn"], position["taken"], position["order"]
        self._inner_state = state["loader"]
        self._resume = state

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        if resume is None:
            self.taken, self._order = 0, None
            self._turn += 1
        batches = self._read(resume) if self._first else iter(())
        first = True
        while True:
            kind, batch, inner = self._next(batches)
            if self._check and first and self.state.sizes["dp"] > 1:
                # A group whose loader is empty or has failed takes part too: the others must not wait for it.
                _compare(self.state, _digest(batch) if kind == "batch" else None)
            if kind == "error":
                raise batch
            if kind == "end":
                return
            first = False
            self.taken += 1
            self._inner_state, self._order = inner
            yield batch

    def _read(self, resume: dict[str, Any] | None) -> Iterator[Any]:
        if isinstance(self.loader, DataLoader):
            self._seed_workers(self.loader)
            if not hasattr(self.loader, "load_state_dict"):
                self._seed_order(self.loader)
        skip = 0
        if resume is not None:
            if resume["loader"] is not None:
                self.loader.load_state_dict(resume["loader"])  # type: ignore[attr-defined]
            else:
                skip = self.taken
        batches = iter(self.loader)
        for _ in range(skip):
            next(batches, None)
        return batches

    def _seed_workers(self, loader: DataLoader[Any]) -> None:
        """Worker seeds by data-parallel rank and epoch, the same again after a resume."""
        if loader.num_workers == 0:
            return
        seed = _seed_of(self._seed, self.epoch, self._turn, self.state.coordinates["dp"], "workers")
        before = loader.worker_init_fn
        if isinstance(before, partial) and before.func is _seed_worker:
            before = before.keywords["then"]
        loader.worker_init_fn = partial(_seed_worker, seed=seed, then=before)

    def _seed_order(self, loader: DataLoader[Any]) -> None:
        """Make a shuffled order one that can be drawn again: batches are skipped after a resume, in that order.

        A random sampler without a generator would draw from the process's own, wherever that stands.
        """
        sampler = _sampler_of(loader)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator) and not isinstance(generator, _Generator):
            if self._order is None:
                self._order = generator.get_state()
            else:
                generator.set_state(self._order)
        elif hasattr(sampler, "generator"):
            drawn = _seed_of(self._seed, self.epoch, self._turn, self.state.coordinates["dp"], "order")
            sampler.generator = _Generator().manual_seed(drawn)

    def _next(self, batches: Iterator[Any]) -> tuple[str, Any, Any]:
        """The next batch on every rank of the group, or that there is none, or what went wrong on the first rank."""
        if self.state.check_group is None:
            return self._take(batches)
        message: list[Any] = [self._take(batches) if self._first else None]
        source = self.state.ranks["sp"][0]
        try:
            dist.broadcast_object_list(message, src=source, group=self.state.check_group)
        except RuntimeError as error:
            raise RankMismatchError(
                f"ranks {list(self.state.ranks['sp'])} of a sequence group did not all ask for a batch within "
                f"{self.state.config.verify_timeout:g} s (verify_timeout): they make different numbers of steps, or "
                f"rank {source} reads too slowly. Reported by gloo: {str(error).splitlines()[0]}"
            ) from error
        return message[0]

    def _take(self, batches: Iterator[Any]) -> tuple[str, Any, Any]:
        try:
            batch = next(batches)
        except StopIteration:
            return "end", None, None
        except Exception as error:  # a rank that raised alone would leave the others waiting
            return "error", _picklable(error), None
        stateful = getattr(self.loader, "state_dict", None)
        return "batch", batch, (stateful() if callable(stateful) else None, self._order)


class _Generator(torch.Generator):
    """A generator of ours, in the place of one that was not given."""


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """What draws the order of a loader: its sampler, or a batch sampler that has none."""
    if loader.batch_sampler is None:
        return loader.sampler
    return getattr(loader.batch_sampler, "sampler", loader.batch_sampler)


def _seed_of(*parts: int | str) -> int:
    """A seed of 48 bits for these parts, so that seeds counted up from it stay apart from each other's."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")


def check_batch(batch: Any, *, state: AutoSPState | None = None) -> None:
    """Check that the ranks of each sequence group hold the same batch, and data-parallel groups different ones.

    Collective over all ranks. One exchange of 32 bytes a rank: call it for the first batch of a loader of your own.

    Raises:
        RankMismatchError: on every rank, if a group's ranks differ, or two groups have equal batches: the loader then
            splits the data over all ranks, or not at all.
    """
    found = _state(state, "check_batch")
    if dist.is_initialized() and dist.get_world_size() > 1:
        _compare(found, _digest(batch))


def _compare(state: AutoSPState, digest: str | None) -> None:
    """Compare digests over the world; None for a rank without a batch."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (state.coordinates["dp"], digest))
    groups: dict[int, set[str | None]] = {}
    for group, one in everyone:
        groups.setdefault(group, set()).add(one)
    torn = sorted(group for group, digests in groups.items() if len(digests) > 1)
    remedy = "split the data over the data-parallel axis only: autosp.data.sequence_parallel_sampler"
    if torn:
        raise RankMismatchError(f"ranks of the data-parallel groups {torn} hold different batches; {remedy}")
    found = [one for digests in groups.values() for one in digests if one is not None]
    if len(set(found)) < len(found):
        raise RankMismatchError(
            f"{len(found)} data-parallel groups hold {len(set(found))} different batches, so data is seen twice; "
            f"{remedy} (check=False if the data really repeats)"
        )


def _digest(batch: Any) -> str:
    """Of the tensors and arrays in a batch, by their values."""
    found = hashlib.sha256()
    for leaf in torch.utils._pytree.tree_leaves(batch):
        if isinstance(leaf, Mapping):  # no node of a tree: the BatchEncoding of transformers, for one
            found.update(_digest(dict(leaf)).encode())
            continue
        if isinstance(leaf, torch.Tensor):
            found.update(digest_of(leaf))
        elif isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biufc":
            found.update(f"{leaf.dtype}{leaf.shape}".encode())
            found.update(leaf.tobytes())
        else:
            # Without an address of the process, which is in the default representation.
            found.update(re.sub(r" at 0x[0-9a-f]+", "", repr(leaf)).encode())
    return found.hexdigest()


def _seed_worker(worker: int, *, seed: int, then: Callable[[int], None] | None) -> None:
    torch.manual_seed(seed + worker)
    random.seed(seed + worker)
    numpy.random.seed((seed + worker) % 2**32)
    if then is not None:
        then(worker)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"the loader raised {type(error).__name__}: {error}")
    return error


def _state(state: AutoSPState | None, who: str) -> AutoSPState:
    found = mesh.current() if state is None else state
    if found is None:
        raise InputError(f"{who}: call autosp.initialize(config) first, it says which ranks share a sequence")
    return found
