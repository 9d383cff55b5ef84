"""The forward: online softmax over the tiles of a list (FlashAttention-2, arXiv:2307.08691, algorithm 1).

One program a block of queries and head. Partial tiles come first and look at the mask; full ones do not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import common
from .common import load_tile, positions, store_tile, visible

GROUP, HEADS, ROWS, KEYS = common.GROUP, common.HEADS, common.ROWS, common.KEYS
QUERY_0, QUERY_LAST, KEY_0, KEY_END = common.QUERY_0, common.QUERY_LAST, common.KEY_0, common.KEY_END
LOG2E, LN2 = common.LOG2E, common.LN2


@triton.jit
def _visit(
    q, acc, top, total, tile, k_ptr, v_ptr, row, query_at, row_ok, batch, head, place, k_strides, v_strides, inputs,
    scale, CHANGE: tl.constexpr, SEE: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr,
    PARTIAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = tile * BLOCK_K
    key = first + tl.arange(0, BLOCK_K)
    k = load_tile(k_ptr, first, place[KEYS], k_strides[2], k_strides[3], BLOCK_K, D, D_PAD, PARTIAL)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    key_row = key[None, :]
    key_at = positions(key_row, place[KEY_0], place[KEY_END])
    key_ok = key_row < place[KEYS]
    raw = scores
    if HAS_SCORE:
        scores = CHANGE(raw, row, key_row, query_at, key_at, batch, head, place, row_ok, key_ok, inputs) * LOG2E
    if PARTIAL:
        shown = visible(raw, row, key_row, query_at, key_at, batch, head, place, row_ok, key_ok, inputs, SEE, HAS_MASK)
        scores = tl.where(shown, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet has no maximum: its exponentials are those of -inf, zero.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    share = tl.exp2(top - base)
    total = total * share + tl.sum(weights, 1)
    acc = acc * share[:, None]
    v = load_tile(v_ptr, first, place[KEYS], v_strides[2], v_strides[3], BLOCK_K, DV, DV_PAD, PARTIAL)
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, order_ptr, counts_ptr, inputs, place, q_strides, k_strides, v_strides,
    order_strides, scale,
    CHANGE: tl.constexpr, SEE: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    heads, rows, group = place[HEADS], place[ROWS], place[GROUP]
    blocks = tl.cdiv(rows, BLOCK_Q)
    # The last block of queries, which sees most under a causal mask, is started first.
    block = blocks - 1 - tl.program_id(0) % blocks
    line = tl.program_id(0) // blocks
    batch, head = line // heads, line % heads
    first = block * BLOCK_Q
    row_line = first + tl.arange(0, BLOCK_Q)
    row = row_line[:, None]
    row_ok = row < rows
    query_at = positions(row, place[QUERY_0], place[QUERY_LAST])
    k_ptr += batch.to(tl.int64) * k_strides[0] + (head // group).to(tl.int64) * k_strides[1]
    v_ptr += batch.to(tl.int64) * v_strides[0] + (head // group).to(tl.int64) * v_strides[1]
    q_ptr += batch.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1]
    q = load_tile(q_ptr, first, rows, q_strides[2], q_strides[3], BLOCK_Q, D, D_PAD, True)
    listed = (batch * order_strides[0] + head * order_strides[1]).to(tl.int64) + block
    order_ptr += listed * order_strides[2]
    partial = tl.load(counts_ptr + listed * 2)
    full = tl.load(counts_ptr + listed * 2 + 1)
    acc = tl.zeros([BLOCK_Q, DV_PAD], tl.float32)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    # Without a program the scale carries the change of base as well.
    factor = scale
    if not HAS_SCORE:
        factor = scale * LOG2E
    for i in tl.range(0, partial):
        tile = tl.load(order_ptr + i).to(tl.int32)
        acc, top, total = _visit(
            q, acc, top, total, tile, k_ptr, v_ptr, row, query_at, row_ok, batch, head, place, k_strides, v_strides,
            inputs, factor, CHANGE, SEE, HAS_SCORE, HAS_MASK, True, D, DV, D_PAD, DV_PAD, BLOCK_K, PRECISION,
        )  # fmt: skip
    for i in tl.range(partial, partial + full):
        tile = tl.load(order_ptr + i).to(tl.int32)
        acc, top, total = _visit(
            q, acc, top, total, tile, k_ptr, v_ptr, row, query_at, row_ok, batch, head, place, k_strides, v_strides,
            inputs, factor, CHANGE, SEE, HAS_SCORE, HAS_MASK, False, D, DV, D_PAD, DV_PAD, BLOCK_K, PRECISION,
        )  # fmt: skip
    seen = total != 0.0
    out = acc / tl.where(seen, total, 1.0)[:, None]
    lse = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * LN2, float("-inf"))
    line_start = line.to(tl.int64) * rows
    store_tile(out_ptr + line_start * DV, first, rows, DV, 1, out, BLOCK_Q, DV, DV_PAD)
    tl.store(lse_ptr + line_start + row_line, lse, mask=row_line < rows)
