"""Blocks by torch's own FlashAttention, where a block's mask is nothing but a band of distances.

FlashAttention (arXiv:2307.08691) aligns the last query with the last key; a band ``low <= query - key <= high`` is then
a window on the left and one on the right, once the keys outside of everybody's reach are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import Problem

_LARGE = 2**30
# Where the Triton kernels were measured faster (docs/attention.md): heads of these sizes, compute capability 9.0, from
# this many products of one number with another on; a smaller block takes less time than the making of its tile lists.
_MEASURED_HEADS = (64, 128)
_WORK = 2**37


@dataclass(frozen=True)
class Band:
    """Local rows ``[first, last)`` of q against rows ``[start, stop)`` of k, and its windows (-1: open)."""

    first: int
    last: int
    start: int
    stop: int
    left: int
    right: int

    @property
    def scores(self) -> int:
        """Pairs of a query and a key that it sees: all but the two corners that the windows cut off."""
        rows, count = self.last - self.first, self.stop - self.start
        cut = [size - 1 - window for size, window in ((count, self.left), (rows, self.right)) if 0 <= window < size]
        return rows * count - sum(side * (side + 1) // 2 for side in cut)


def serves(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention can compute this block at all."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16) or problem.program["steps"]:
        return False
    if problem.has_mask or problem.has_scores or not q.dtype == k.dtype == v.dtype:
        return False
    size = q.shape[-1]
    return (
        size == v.shape[-1] and size % 8 == 0 and size <= 256 and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def is_slow(part: Band, q: Tensor) -> bool:
    """Whether the Triton kernels take less time: FlashAttention 2 uses none of what came with Hopper."""
    batch, heads, _, size = q.shape
    work = batch * heads * size * part.scores
    return size in _MEASURED_HEADS and work >= _WORK and torch.cuda.get_device_capability(q.device) == (9, 0)


def band(problem: Problem, queries: int, keys: int) -> Band | None:
    """The block's band; None when some query in the middle of it sees nothing, which windows cannot say."""
    q0, k0 = problem.origin[2], problem.origin[3]
    first, last = max(0, -q0), min(queries, problem.sizes[0] - q0)
    low, high = problem.bounds[0] - (q0 - k0), problem.bounds[1] - (q0 - k0)
    # ``row - key`` of local rows lies in [low, high]; keys that exist and that the first and last row bound:
    start = max(0, -k0, first - high)
    stop = min(keys, problem.sizes[1] - k0, last - low)
    # Queries from which on the band reaches no key are left out, and so are those before it.
    first, last = max(first, start + low), min(last, stop + high)
    if first >= last or start >= stop:
        return Band(0, 0, 0, 0, -1, -1)
    rows, count = last - first, stop - start
    shift = first - start
    left, right = (high - shift) + count - rows, rows - count - (low - shift)
    if left < 0 or right < 0:
        return None
    return Band(first, last, start, stop, left if left < _LARGE else -1, right if right < _LARGE else -1)


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    """``[B, rows, heads, size]`` of some rows, as FlashAttention takes them."""
    return x[:, :, start:stop].transpose(1, 2)


def _window(size: int) -> int | None:
    return None if size < 0 else size


def forward(problem: Problem, part: Band, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` as ``blocks.forward`` gives them."""
    batch, heads, rows, size = q.shape
    out = q.new_zeros(batch, heads, rows, size)
    lse = torch.full((batch, heads, rows), float("-inf"), dtype=torch.float32, device=q.device)
    if part.first == part.last or out.numel() == 0:
        return out, lse
    mixed, found, *_ = torch.ops.aten._flash_attention_forward(
        _rows(q, part.first, part.last), _rows(k, part.start, part.stop), _rows(v, part.start, part.stop),
        None, None, part.last - part.first, part.stop - part.start, 0.0, False, False, scale=problem.scale,
        window_size_left=_window(part.left), window_size_right=_window(part.right),
    )  # fmt: skip
    out[:, :, part.first : part.last] = mixed.transpose(1, 2)
    # A row that sees nothing has +inf there, so that its probabilities are zero.
    lse[:, :, part.first : part.last] = torch.where(found.isposinf(), float("-inf"), found)
    return out, lse


def backward(
    problem: Problem, part: Band, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` as ``blocks.backward`` gives them."""
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    if part.first == part.last or dq.numel() == 0:
        return dq, dk, dv
    rows, keys = slice(part.first, part.last), slice(part.start, part.stop)
    some = lse[:, :, rows]
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)
    found = torch.ops.aten._flash_attention_backward(
        _rows(grad, part.first, part.last), _rows(q, part.first, part.last), _rows(k, part.start, part.stop),
        _rows(v, part.start, part.stop), _rows(out, part.first, part.last),
        torch.where(some.isneginf(), float("inf"), some).contiguous(), None, None, part.last - part.first,
        part.stop - part.start, 0.0, False, unused, unused, scale=problem.scale,
        window_size_left=_window(part.left), window_size_right=_window(part.right),
    )  # fmt: skip
    for place, where, value in zip((dq, dk, dv), (rows, keys, keys), found, strict=True):
        place[:, :, where] = value.transpose(1, 2)
    return dq, dk, dv
