"""Process groups by name, and the few collectives that the fused losses issue.

Operators take a group as a string: the empty string is "no group" (never the world). Everything goes through functional
collectives, so that the public functions work under ``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autosp.errors import InputError, RankMismatchError


def group_name(group: object, argument: str) -> str:
    """The name of ``group``: ``None`` gives ``""``, a string itself, a ProcessGroup its registered name.

    Raises:
        InputError: ``group`` is something else.
    """
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    name = getattr(group, "group_name", None)
    if not isinstance(name, str) or not name:
        raise InputError(
            f"{argument} is a {type(group).__name__}; allowed are None (no group), a torch.distributed.ProcessGroup "
            "and the name of one"
        )
    return name


def group_size(name: str) -> int:
    """Number of ranks of the group; 1 without a group."""
    return _resolve(name).size() if name else 1


def group_rank(name: str) -> int:
    """This rank's place in the group; 0 without a group."""
    return _resolve(name).rank() if name else 0


def _resolve(name: str):
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def start_all_reduce(tensor: torch.Tensor, op: str, name: str) -> torch.Tensor:
    """Start an all-reduce of the contiguous ``tensor`` in place; :func:`finish` it before reading."""
    if group_size(name) == 1:
        return tensor
    return torch.ops._c10d_functional.all_reduce_(tensor, op, name)


def finish(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a collective started on ``tensor``; a tensor without one is returned at once."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


def all_reduce(tensor: torch.Tensor, op: str, name: str) -> torch.Tensor:
    """All-reduce the contiguous ``tensor`` in place and wait; the identity for a group of one."""
    if group_size(name) == 1:
        return tensor
    return finish(start_all_reduce(tensor, op, name))


def gather_ints(values: list[int], device: torch.device, name: str) -> list[list[int]]:
    """The integers of every rank, in rank order; one small all-gather and one host synchronisation."""
    size = group_size(name)
    if size == 1:
        return [list(values)]
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(mine, size, name)
    return finish(gathered).view(size, len(values)).tolist()


@dataclass(frozen=True)
class Shards:
    """Where this rank's vocabulary rows lie: ``[start, start + local)`` of ``total``; ``largest`` over the group."""

    start: int
    local: int
    total: int
    largest: int


STATISTICS, PAIR, FORMED, FORMED_IN_PLACE, PAIR_FORMED = 0, 8, 16, 24, 32
"""How a loss is computed: each issues collectives of its own. The last three add the bits of the hidden gradients that
they sum over the group."""


def agree_on_shards(
    rows: int, start: int, end: int, tokens: int, chunk_size: int, device: torch.device, tp: str, way: int
) -> Shards:
    """Lay out the vocabulary over ``tp``, and check that the ranks agree on what decides the collectives.

    Args:
        rows: rows of the local weight.
        start, end: this rank's bounds, both ``-1`` when they are to be derived from the sizes of the shards.
        tokens: number of tokens that take part; must be the same on every rank.
        chunk_size: the caller's chunk size or 0; must be the same on every rank.
        way: which collectives follow, as above; must be the same on every rank.

    Raises:
        RankMismatchError: on every rank of the group, when ranks disagree or their bounds overlap or leave a gap.
    """
    given = start >= 0
    local = end - start if given else rows
    table = gather_ints([local, start, tokens, chunk_size, int(given), way], device, tp)
    for column, what in ((2, "tokens that count"), (3, "chunk_size"), (4, "vocabulary bounds given")):
        values = [row[column] for row in table]
        if len(set(values)) > 1:
            raise RankMismatchError(
                f"ranks of the tensor-parallel group disagree on {what}: {values}; every rank of the group must "
                "be given the same hidden states, targets and settings"
            )
    ways = [row[5] for row in table]
    if len(set(ways)) > 1:
        raise RankMismatchError(
            f"ranks of the tensor-parallel group disagree on when the gradient is formed ({ways}); give every rank the "
            'same reduction, memory and requires_grad. With memory="auto" ranks of very different shards, or with '
            'little memory, decide apart: pass memory="fast" or "lean"'
        )
    total = sum(row[0] for row in table)
    largest = max(row[0] for row in table)
    if not given:
        start = sum(row[0] for row in table[: group_rank(tp)])
        return Shards(start, local, total, largest)
    if group_size(tp) == 1:
        return Shards(start, local, local, largest)
    position = 0
    for low, length in sorted((row[1], row[0]) for row in table if row[0] > 0):
        if low != position:
            kind = "overlap" if low < position else "leave a gap"
            raise RankMismatchError(
                f"vocabulary bounds {kind}: shards [start, length] are {[[r[1], r[0]] for r in table]}, but a shard "
                f"starts at {low} where {position} was expected; give contiguous bounds that cover the vocabulary once"
            )
        position += length
    return Shards(start, local, total, largest)


def check_same(tensor: torch.Tensor, name: str, tp: str) -> None:
    """Debug mode: raise on every rank when ``tensor`` has other bits on another rank of ``tp``.

    Raises:
        RankMismatchError: the checksums differ.
    """
    if group_size(tp) == 1:
        return
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.contiguous().view(kind).to(torch.int64).flatten()
    weights = torch.arange(bits.numel(), device=bits.device) % 65521 + 1
    sums = gather_ints([int(bits.sum()), int((bits * weights).sum())], tensor.device, tp)
    if any(other != sums[0] for other in sums):
        raise RankMismatchError(
            f"{name} differs between the ranks of the tensor-parallel group (checksums {sums}); a vocabulary-parallel "
            "head needs the same hidden states and targets on every rank: check dropout seeds and the data loader"
        )
