"""The process group of a vocabulary: names, sizes, and the one collective that the losses need.

``torch.distributed.distributed_c10d._resolve_process_group`` is the only private name used here; it is what functional
collectives themselves resolve a group's name with (torch 2.11 to 2.14).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from ...errors import InputError

# Shard bounds travel with the packed statistics as float32, which holds integers exactly up to here.
MAX_VOCABULARY = 1 << 24


def group_name(group: Any, argument: str) -> str:
    """The name that operators take: ``""`` for no group at all (which is never the world).

    Args:
        group: None, a ``ProcessGroup`` or a group's name.
        argument: the argument's name, for the message.

    Raises:
        InputError: for anything else, such as the marker that ``new_group`` returns on a rank that is not a member.
    """
    if group is None:
        return ""
    if isinstance(group, str):
        if not group:
            raise InputError(f"{argument} is an empty string; pass None for no group, or the name of a process group.")
        return group
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    raise InputError(
        f"{argument} must be None, a torch.distributed.ProcessGroup or a group's name, got {type(group).__name__}"
        " (a rank outside a group gets no ProcessGroup from new_group: such a rank must not call this)."
    )


def group_size_and_rank(group: str) -> tuple[int, int]:
    """``(size, rank)`` of the named group; ``(1, 0)`` for no group."""
    if not group:
        return 1, 0
    process_group = _resolve_process_group(group)
    return process_group.size(), process_group.rank()


def gather_packed(packed: torch.Tensor, group: str) -> torch.Tensor:
    """All ranks' flat ``packed`` buffers as ``[ranks, length]``, in rank order and the same on every rank."""
    size, _ = group_size_and_rank(group)
    if size == 1:
        return packed.unsqueeze(0)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(packed, size, group)
    return torch.ops._c10d_functional.wait_tensor(gathered).view(size, packed.numel())


def sum_in_rank_order(values: torch.Tensor) -> torch.Tensor:
    """Sum ``[ranks, ...]`` over its first dimension one rank after the other: the order is part of the result."""
    total = values[0].clone()
    for rank in range(1, values.shape[0]):
        total += values[rank]
    return total


def shard_bounds(columns: int, start: int, end: int, total: int, group: str) -> tuple[int, int]:
    """``(first global id, number of valid columns)`` of this rank's shard.

    Args:
        columns: columns of the local logits.
        start: first global id, or -1 when the caller gave none.
        end: one past the last global id, or -1 when the caller gave none.
        total: size of the whole vocabulary, or -1 when unknown.
        group: name of the vocabulary's group, ``""`` for none.

    Without bounds the shards follow ``torch.chunk`` of ``total``; without ``total`` too they are taken as equal, which
    the combination of the shards verifies on the device (see ``row_stats``).

    Raises:
        InputError: the local logits have fewer columns than the shard that ``total`` gives to this rank, or equal
            shards make a vocabulary of 2**24 ids or more.
    """
    if start >= 0:
        return start, (end if end >= 0 else start + columns) - start
    size, rank = group_size_and_rank(group)
    if total < 0:
        if size * columns >= MAX_VOCABULARY:
            raise InputError(
                f"{size} shards of {columns} columns; the largest vocabulary supported is {MAX_VOCABULARY - 1} ids."
            )
        return rank * columns, columns
    chunk = -(-total // size)
    first = min(rank * chunk, total)
    valid = min(chunk, total - first)
    if valid > columns:
        raise InputError(
            f"global_vocab_size={total} over {size} ranks gives rank {rank} the ids {first}..{first + valid - 1}, but"
            f" its logits have {columns} columns. Pass vocab_start_index and vocab_end_index for other shards."
        )
    return first, valid
