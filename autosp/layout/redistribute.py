"""From one layout to another, with the adjoint that keeps every gradient exact.

A whole value has its whole gradient on every rank. Where it feeds sharded computation each rank's gradient is a part,
so that edge sums over the group in the backward (``partial_grad``).
"""

from __future__ import annotations

import torch

from .axis import Axis
from .padding import pad_rows
from .placement import Partial, Placement, Replicate, Shard, same_placement


def _cut_args(shard: Shard) -> tuple:
    return shard.dim, shard.length, shard.size, shard.start, shard.outer, shard.inner


def redistribute(
    x: torch.Tensor,
    current: Placement,
    needed: Placement,
    axis: Axis,
    *,
    dtype: torch.dtype,
    fill: float | None = None,
    partial_grad: bool = False,
) -> torch.Tensor:
    """Local tensor of a value in another layout.

    Args:
        x: local tensor in layout ``current``.
        current: layout of ``x``.
        needed: layout of the result.
        axis: the mesh axis.
        dtype: dtype of the whole value (a partial sum may be held wider).
        fill: value of padding rows when a whole tensor is cut; None repeats the nearest row.
        partial_grad: the result feeds sharded computation, so a whole result gets only a part of its gradient on each
            rank.
    """
    ops = torch.ops.autosp
    if isinstance(current, Partial) and not isinstance(needed, Partial):
        x = ops.all_reduce_sum(x, axis.group)
        x = x if x.dtype == dtype else x.to(dtype)
        current = Replicate()
    if same_placement(current, needed):
        if isinstance(needed, Replicate) and partial_grad and x.requires_grad:
            return ops.enter_sharded(x, "sum", axis.group)
        return x
    if isinstance(current, Replicate):
        return ops.shard_sequence(x, *_cut_args(needed), fill, axis.group)
    if isinstance(needed, Replicate) and _is_short_window(current):
        x = ops.all_reduce_sum(read_window(x, current, axis), axis.group)
        return ops.enter_sharded(x, "sum", axis.group) if partial_grad and x.requires_grad else x
    if isinstance(needed, Replicate):
        return ops.all_gather_sequence(x, *_cut_args(current), partial_grad, axis.group)
    if current.dim != needed.dim and current.is_unfactored and needed.is_plain:
        return exchange(x, current, needed, axis)
    whole = redistribute(x, current, Replicate(), axis, dtype=dtype)
    return ops.shard_sequence(whole, *_cut_args(needed), fill, axis.group)


def _is_short_window(shard: Shard) -> bool:
    """A window of a fixed number of rows, out of a sequence whose length is open."""
    fixed = isinstance(shard.size, int) and not isinstance(shard.length, int)
    return fixed and shard.is_unfactored and not shard.is_full


def read_window(x: torch.Tensor, shard: Shard, axis: Axis) -> torch.Tensor:
    """The whole window with this rank's rows in place and zeros elsewhere: its traffic is that of the window alone."""
    block = axis.block(shard.length)
    row = torch.arange(shard.size, device=x.device) + shard.start - axis.rank * block
    mine = ((row >= 0) & (row < block)).reshape([-1] + [1] * (x.dim() - 1 - shard.dim))
    taken = x.index_select(shard.dim, row.clamp(0, block - 1))
    return torch.where(mine, taken, torch.zeros_like(taken))


def exchange(x: torch.Tensor, current: Shard, needed: Shard, axis: Axis) -> torch.Tensor:
    """Move the cut from one dimension to another in one all-to-all; each rank sends ``1/P`` of what it holds to
    each.
    """
    ranks = axis.size
    block, target_block = axis.block(current.length), axis.block(needed.length)
    rows = x.movedim((needed.dim, current.dim), (0, 1))
    if axis.has_padding(needed):
        rows = pad_rows(rows, 0, ranks * target_block - needed.length)
    rest = list(rows.shape[2:])
    flat = rows.reshape(-1)
    piece = flat.numel() // ranks
    flat = torch.ops.autosp.all_to_all(flat, [piece] * ranks, [piece] * ranks, axis.group)
    rows = flat.reshape(ranks, target_block, block, *rest).movedim(0, 1).reshape(target_block, ranks * block, *rest)
    if axis.has_padding(current):
        rows = rows.narrow(1, current.start, current.size)
    else:
        rows = rows.reshape(target_block, current.size, *rest)
    return rows.movedim((0, 1), (needed.dim, current.dim)).contiguous()
