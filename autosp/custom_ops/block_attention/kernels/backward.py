"""The backward: probabilities again from the log-sum-exp (FlashAttention-2, arXiv:2307.08691, algorithm 2).

One kernel for the gradients of keys and values, by block of keys, and one for that of queries, by block of queries, so
that every sum has one owner and needs no atomics. ``delta`` is ``sum(grad * out) - grad_lse`` of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import common
from .common import load_tile, positions, store_tile, visible

GROUP, HEADS, ROWS, KEYS = common.GROUP, common.HEADS, common.ROWS, common.KEYS
QUERY_0, QUERY_LAST, KEY_0, KEY_END = common.QUERY_0, common.QUERY_LAST, common.KEY_0, common.KEY_END
LOG2E = common.LOG2E


@triton.jit
def delta_kernel(
    grad_ptr, out_ptr, grad_lse_ptr, delta_ptr, rows, heads, grad_strides, out_strides,
    HAS_LSE: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(rows, BLOCK_Q)
    first = tl.program_id(0) % blocks * BLOCK_Q
    line = tl.program_id(0) // blocks
    batch, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
    grad = load_tile(grad_ptr + batch * grad_strides[0] + head * grad_strides[1], first, rows, grad_strides[2],
                     grad_strides[3], BLOCK_Q, DV, DV_PAD, True)  # fmt: skip
    out = load_tile(out_ptr + batch * out_strides[0] + head * out_strides[1], first, rows, out_strides[2],
                    out_strides[3], BLOCK_Q, DV, DV_PAD, True)  # fmt: skip
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    row = first + tl.arange(0, BLOCK_Q)
    at = line.to(tl.int64) * rows + row
    if HAS_LSE:
        delta -= tl.load(grad_lse_ptr + at, mask=row < rows, other=0.0)
    tl.store(delta_ptr + at, delta, mask=row < rows)


@triton.jit
def _weights(
    raw, lse, row, key, query_at, key_at, batch, head, place, row_ok, key_ok, inputs, CHANGE: tl.constexpr,
    SEE: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Probabilities of a tile, and where they count. Without a program the scores are to base 2 already, and rows that
    do not exist do no harm, since their queries, gradients and delta are zeros.
    """
    scores = raw
    if HAS_SCORE:
        scores = CHANGE(raw, row, key, query_at, key_at, batch, head, place, row_ok, key_ok, inputs) * LOG2E
    weights = tl.exp2(scores - tl.where(lse == float("-inf"), 0.0, lse * LOG2E))
    shown = row_ok
    if PARTIAL:
        shown = row_ok & visible(raw, row, key, query_at, key_at, batch, head, place, row_ok, key_ok, inputs, SEE,
                                 HAS_MASK)  # fmt: skip
    if PARTIAL or HAS_SCORE:
        weights = tl.where(shown, weights, 0.0)
    return weights, shown


@triton.jit
def _visit_queries(
    k, v, dk, dv, tile, q_ptr, grad_ptr, lse_ptr, delta_ptr, key, key_at, key_ok, batch, head, place, q_strides,
    grad_strides, inputs, factor, CHANGE: tl.constexpr, SEE: tl.constexpr, PULL: tl.constexpr, HAS_SCORE: tl.constexpr,
    HAS_MASK: tl.constexpr, PARTIAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile, keys along its rows."""
    first = tile * BLOCK_Q
    row_line = first + tl.arange(0, BLOCK_Q)
    row = row_line[None, :]
    row_ok = row < place[ROWS]
    query_at = positions(row, place[QUERY_0], place[QUERY_LAST])
    q = load_tile(q_ptr, first, place[ROWS], q_strides[2], q_strides[3], BLOCK_Q, D, D_PAD, True)
    grad = load_tile(grad_ptr, first, place[ROWS], grad_strides[2], grad_strides[3], BLOCK_Q, DV, DV_PAD, True)
    lse = tl.load(lse_ptr + row_line, mask=row_line < place[ROWS], other=0.0)
    delta = tl.load(delta_ptr + row_line, mask=row_line < place[ROWS], other=0.0)
    raw = tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor
    weights, shown = _weights(raw, lse[None, :], row, key, query_at, key_at, batch, head, place, row_ok, key_ok, inputs,
                              CHANGE, SEE, HAS_SCORE, HAS_MASK, PARTIAL)  # fmt: skip
    dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision=PRECISION)
    change = weights * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
    if HAS_SCORE:
        change = PULL(change, raw, row, key, query_at, key_at, batch, head, place, row_ok, key_ok, inputs, inputs)
        change = tl.where(shown, change, 0.0)
    dk = tl.dot(change.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, order_ptr, counts_ptr, inputs, place, q_strides,
    k_strides, v_strides, grad_strides, order_strides, scale, shared,
    CHANGE: tl.constexpr, SEE: tl.constexpr, PULL: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``shared``: query heads whose sum a program makes; dk and dv are ``[batch, heads / shared, keys, size]``."""
    heads, rows, keys, group = place[HEADS], place[ROWS], place[KEYS], place[GROUP]
    blocks = tl.cdiv(keys, BLOCK_K)
    # The first block of keys is seen by most queries under a causal mask.
    block = tl.program_id(0) % blocks
    line = tl.program_id(0) // blocks
    lines = heads // shared
    batch, first_head = line // lines, line % lines * shared
    key_head = (first_head // group).to(tl.int64)
    first = block * BLOCK_K
    key = (first + tl.arange(0, BLOCK_K))[:, None]
    key_ok = key < keys
    key_at = positions(key, place[KEY_0], place[KEY_END])
    wide = batch.to(tl.int64)
    k = load_tile(k_ptr + wide * k_strides[0] + key_head * k_strides[1], first, keys, k_strides[2], k_strides[3],
                  BLOCK_K, D, D_PAD, True)  # fmt: skip
    v = load_tile(v_ptr + wide * v_strides[0] + key_head * v_strides[1], first, keys, v_strides[2], v_strides[3],
                  BLOCK_K, DV, DV_PAD, True)  # fmt: skip
    factor = scale
    if not HAS_SCORE:
        factor = scale * LOG2E
    dk = tl.zeros([BLOCK_K, D_PAD], tl.float32)
    dv = tl.zeros([BLOCK_K, DV_PAD], tl.float32)
    for one in tl.range(0, shared):
        head = first_head + one
        wide_head = head.to(tl.int64)
        q_head = q_ptr + wide * q_strides[0] + wide_head * q_strides[1]
        grad_head = grad_ptr + wide * grad_strides[0] + wide_head * grad_strides[1]
        rows_before = (wide * heads + wide_head) * rows
        listed = (batch * order_strides[0] + head * order_strides[1]).to(tl.int64) + block
        order = order_ptr + listed * order_strides[2]
        partial = tl.load(counts_ptr + listed * 2)
        full = tl.load(counts_ptr + listed * 2 + 1)
        for i in tl.range(0, partial):
            tile = tl.load(order + i).to(tl.int32)
            dk, dv = _visit_queries(
                k, v, dk, dv, tile, q_head, grad_head, lse_ptr + rows_before, delta_ptr + rows_before, key, key_at,
                key_ok, batch, head, place, q_strides, grad_strides, inputs, factor, CHANGE, SEE, PULL, HAS_SCORE,
                HAS_MASK, True, D, DV, D_PAD, DV_PAD, BLOCK_Q, PRECISION,
            )  # fmt: skip
        for i in tl.range(partial, partial + full):
            tile = tl.load(order + i).to(tl.int32)
            dk, dv = _visit_queries(
                k, v, dk, dv, tile, q_head, grad_head, lse_ptr + rows_before, delta_ptr + rows_before, key, key_at,
                key_ok, batch, head, place, q_strides, grad_strides, inputs, factor, CHANGE, SEE, PULL, HAS_SCORE,
                HAS_MASK, False, D, DV, D_PAD, DV_PAD, BLOCK_Q, PRECISION,
            )  # fmt: skip
    start = line.to(tl.int64) * keys
    store_tile(dk_ptr + start * D, first, keys, D, 1, dk * scale, BLOCK_K, D, D_PAD)
    store_tile(dv_ptr + start * DV, first, keys, DV, 1, dv, BLOCK_K, DV, DV_PAD)


@triton.jit
def _visit_keys(
    q, grad, lse, delta, dq, tile, k_ptr, v_ptr, row, query_at, row_ok, batch, head, place, k_strides, v_strides,
    inputs, gradients, factor, CHANGE: tl.constexpr, SEE: tl.constexpr, PULL: tl.constexpr, HAS_SCORE: tl.constexpr,
    HAS_MASK: tl.constexpr, PARTIAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile, queries along its rows."""
    first = tile * BLOCK_K
    key = (first + tl.arange(0, BLOCK_K))[None, :]
    key_ok = key < place[KEYS]
    key_at = positions(key, place[KEY_0], place[KEY_END])
    k = load_tile(k_ptr, first, place[KEYS], k_strides[2], k_strides[3], BLOCK_K, D, D_PAD, PARTIAL)
    v = load_tile(v_ptr, first, place[KEYS], v_strides[2], v_strides[3], BLOCK_K, DV, DV_PAD, PARTIAL)
    raw = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
    weights, shown = _weights(raw, lse, row, key, query_at, key_at, batch, head, place, row_ok, key_ok, inputs, CHANGE,
                              SEE, HAS_SCORE, HAS_MASK, PARTIAL)  # fmt: skip
    change = weights * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta)
    if HAS_SCORE:
        change = PULL(change, raw, row, key, query_at, key_at, batch, head, place, row_ok, key_ok, inputs, gradients)
        change = tl.where(shown, change, 0.0)
    return tl.dot(change.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, order_ptr, counts_ptr, inputs, gradients, place,
    q_strides, k_strides, v_strides, grad_strides, order_strides, scale,
    CHANGE: tl.constexpr, SEE: tl.constexpr, PULL: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``gradients``: buffers that ``PULL`` adds to."""
    heads, rows, group = place[HEADS], place[ROWS], place[GROUP]
    blocks = tl.cdiv(rows, BLOCK_Q)
    block = blocks - 1 - tl.program_id(0) % blocks
    line = tl.program_id(0) // blocks
    batch, head = line // heads, line % heads
    wide, wide_head, key_head = batch.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)
    first = block * BLOCK_Q
    row_line = first + tl.arange(0, BLOCK_Q)
    row = row_line[:, None]
    row_ok = row < rows
    query_at = positions(row, place[QUERY_0], place[QUERY_LAST])
    k_ptr += wide * k_strides[0] + key_head * k_strides[1]
    v_ptr += wide * v_strides[0] + key_head * v_strides[1]
    q = load_tile(q_ptr + wide * q_strides[0] + wide_head * q_strides[1], first, rows, q_strides[2], q_strides[3],
                  BLOCK_Q, D, D_PAD, True)  # fmt: skip
    grad = load_tile(grad_ptr + wide * grad_strides[0] + wide_head * grad_strides[1], first, rows, grad_strides[2],
                     grad_strides[3], BLOCK_Q, DV, DV_PAD, True)  # fmt: skip
    rows_before = line.to(tl.int64) * rows
    lse = tl.load(lse_ptr + rows_before + row_line, mask=row_line < rows, other=0.0)[:, None]
    delta = tl.load(delta_ptr + rows_before + row_line, mask=row_line < rows, other=0.0)[:, None]
    listed = (batch * order_strides[0] + head * order_strides[1]).to(tl.int64) + block
    order_ptr += listed * order_strides[2]
    partial = tl.load(counts_ptr + listed * 2)
    full = tl.load(counts_ptr + listed * 2 + 1)
    factor = scale
    if not HAS_SCORE:
        factor = scale * LOG2E
    dq = tl.zeros([BLOCK_Q, D_PAD], tl.float32)
    for i in tl.range(0, partial):
        tile = tl.load(order_ptr + i).to(tl.int32)
        dq = _visit_keys(
            q, grad, lse, delta, dq, tile, k_ptr, v_ptr, row, query_at, row_ok, batch, head, place, k_strides,
            v_strides, inputs, gradients, factor, CHANGE, SEE, PULL, HAS_SCORE, HAS_MASK, True, D, DV, D_PAD, DV_PAD,
            BLOCK_K, PRECISION,
        )  # fmt: skip
    for i in tl.range(partial, partial + full):
        tile = tl.load(order_ptr + i).to(tl.int32)
        dq = _visit_keys(
            q, grad, lse, delta, dq, tile, k_ptr, v_ptr, row, query_at, row_ok, batch, head, place, k_strides,
            v_strides, inputs, gradients, factor, CHANGE, SEE, PULL, HAS_SCORE, HAS_MASK, False, D, DV, D_PAD, DV_PAD,
            BLOCK_K, PRECISION,
        )  # fmt: skip
    store_tile(dq_ptr + rows_before * D, first, rows, D, 1, dq * scale, BLOCK_Q, D, D_PAD)
