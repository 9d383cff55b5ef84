"""What the kernels share: where a tile lies, its scores, and what is visible of it.

Scores are computed in fp32 in base 2 where they are exponentiated. Tensors are addressed in 64 bits once a tile, in 32
bits inside of it; ``fits_tiles`` says whether a tensor's strides allow that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Where things are in ``place``, the numbers that all kernels get: how many heads, rows of q and rows of k; positions of
# the first query and key; first batch row and head; which rows of k exist; bounds of ``query - key``; the last position
# of a query and of a key; query heads a key head.
HEADS, ROWS, KEYS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
QUERY_0, KEY_0 = tl.constexpr(3), tl.constexpr(4)
FIRST_BATCH, FIRST_HEAD = tl.constexpr(5), tl.constexpr(6)
KEY_FIRST, KEY_LAST = tl.constexpr(7), tl.constexpr(8)
LOW, HIGH = tl.constexpr(9), tl.constexpr(10)
QUERY_LAST, KEY_END, GROUP = tl.constexpr(11), tl.constexpr(12), tl.constexpr(13)
# Rows or columns of a tile, at most: what is addressed in 32 bits.
LARGEST = 256


def fits_tiles(x: torch.Tensor) -> bool:
    """Whether offsets inside of a tile of ``x`` fit 32 bits."""
    return (x.stride(2) + x.stride(3)) * LARGEST < 2**31


@triton.jit
def load_tile(pointer, first, count, stride, column_stride, BLOCK: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
              CHECK: tl.constexpr):  # fmt: skip
    """Rows from ``first`` on as ``[BLOCK, PAD]``; zeros beyond ``SIZE`` columns and, if CHECK, ``count`` rows."""
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, PAD)
    at = pointer + first.to(tl.int64) * stride + rows[:, None] * stride + columns[None, :] * column_stride
    if CHECK:
        inside = (first + rows)[:, None] < count
        if SIZE != PAD:
            inside = inside & (columns[None, :] < SIZE)
        return tl.load(at, mask=inside, other=0.0)
    elif SIZE != PAD:
        return tl.load(at, mask=columns[None, :] < SIZE, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_tile(pointer, first, count, stride, column_stride, tile, BLOCK: tl.constexpr, SIZE: tl.constexpr,
               PAD: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, PAD)
    at = pointer + first.to(tl.int64) * stride + rows[:, None] * stride + columns[None, :] * column_stride
    inside = ((first + rows)[:, None] < count) & (columns[None, :] < SIZE)
    tl.store(at, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def positions(rows, origin, last):
    """Positions of rows of q or k: those beyond the ends are like the nearest real one."""
    return tl.minimum(tl.maximum(rows + origin, 0), last)


@triton.jit
def visible(scores, row, key, query_at, key_at, batch, head, place, row_ok, key_ok, inputs,
            SEE: tl.constexpr, HAS_MASK: tl.constexpr):  # fmt: skip
    """Which scores of a partial tile count."""
    distance = query_at - key_at
    shown = (key >= place[KEY_FIRST]) & (key < place[KEY_LAST]) & (distance >= place[LOW]) & (distance <= place[HIGH])
    if HAS_MASK:
        shown = shown & SEE(scores, row, key, query_at, key_at, batch, head, place, row_ok, key_ok, inputs)
    return shown
