"""One read of a row: maximum, sum of exponentials and the centred weighted sums together, with the logits at the ids.

Every lane keeps a running maximum of its own and rescales once a tile of DEPTH values, so that nothing crosses lanes
before the end of the row; the lanes are then combined like shards are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2E, LOWEST, capped, lane_start, row_inverse, row_offset, weighted


@triton.jit
def _update(u, live, m, s, w, c, n, scale, ENTROPY: tl.constexpr, MEAN: tl.constexpr):
    m_new = tl.maximum(m, tl.max(u, axis=0))
    d = u - m_new[None, :]
    e = tl.exp2(d * scale)
    shift = m - m_new
    keep = tl.exp2(shift * scale)
    if ENTROPY:
        # A weight of zero belongs to a difference of -inf or close to it: bounding it makes their product 0, not NaN.
        w = weighted(keep, w + s * shift) + tl.sum(e * tl.maximum(d, LOWEST), axis=0)
    if MEAN:
        c = c + weighted(n, shift) + tl.sum(tl.where(live, d, 0.0), axis=0)
        n = n + tl.sum(live.to(tl.float32), axis=0)
    s = s * keep + tl.sum(e, axis=0)
    return m_new, s, w, c, n


@triton.jit
def _leave_out(u, columns, index_ptr, row, n_ids, start, begin, ignore_index, TILE: tl.constexpr):
    for k in range(n_ids):
        token = tl.load(index_ptr + row * n_ids + k)
        local = token - start
        if (local >= begin) & (local < begin + TILE) & (token != ignore_index):
            u = tl.where(columns == local, float("-inf"), u)
    return u


@triton.jit(do_not_specialize=["n_rows", "start", "n_ids", "ignore_index", "unknown"])
def row_stats_forward_kernel(
    x_ptr,
    index_ptr,
    inverse_ptr,
    packed_ptr,
    n_rows,
    n_cols,
    inner,
    outer_stride,
    inner_stride,
    start,
    n_ids,
    inverse,
    softcap,
    ignore_index,
    unknown,
    VECTORS: tl.constexpr,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
    EXCLUDE: tl.constexpr,
    SKIP: tl.constexpr,
    IDS: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    out_ptr = packed_ptr + row * (n_ids + 4)
    if row == 0:
        header = packed_ptr + n_rows.to(tl.int64) * (n_ids + 4)
        tl.store(header, n_cols * 1.0)
        tl.store(header + 1, start * 1.0)
    base = lane_start(x_ptr + row_offset(row, inner, outer_stride, inner_stride), unknown, VECTORS)
    end = n_cols
    if SKIP:
        end = tl.where(tl.load(index_ptr + row) == ignore_index, 0, n_cols)
    scale = row_inverse(inverse_ptr, inverse, row, PER_ROW) * LOG2E
    TILE: tl.constexpr = DEPTH * LANES
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    m = tl.full([LANES], LOWEST, tl.float32)
    s = tl.zeros([LANES], tl.float32)
    w = tl.zeros([LANES], tl.float32)
    c = tl.zeros([LANES], tl.float32)
    n = tl.zeros([LANES], tl.float32)
    whole = end // TILE * TILE
    for begin in tl.range(0, whole, TILE, num_stages=STAGES):
        u = capped(tl.load(base + begin + tile, eviction_policy=EVICT).to(tl.float32), softcap, SOFTCAP)
        if EXCLUDE:
            u = _leave_out(u, begin + tile, index_ptr, row, n_ids, start, begin, ignore_index, TILE)
        m, s, w, c, n = _update(u, tile >= 0, m, s, w, c, n, scale, ENTROPY, MEAN)
    if whole < end:
        live = whole + tile < end
        u = capped(tl.load(base + whole + tile, mask=live, other=0.0).to(tl.float32), softcap, SOFTCAP)
        u = tl.where(live, u, float("-inf"))
        if EXCLUDE:
            u = _leave_out(u, whole + tile, index_ptr, row, n_ids, start, whole, ignore_index, TILE)
        m, s, w, c, n = _update(u, live, m, s, w, c, n, scale, ENTROPY, MEAN)

    top = tl.max(m, axis=0)
    shift = m - top
    keep = tl.exp2(shift * scale)
    tl.store(out_ptr, top)
    tl.store(out_ptr + 1, tl.sum(s * keep, axis=0))
    if ENTROPY:
        tl.store(out_ptr + 2, tl.sum(weighted(keep, w + s * shift), axis=0))
    if MEAN:
        tl.store(out_ptr + 3, tl.sum(c + weighted(n, shift), axis=0))
    if IDS > 0:
        k = tl.arange(0, IDS)
        local = tl.load(index_ptr + row * n_ids + k, mask=k < n_ids, other=-1) - start
        owned = (k < n_ids) & (local >= 0) & (local < n_cols)
        x = tl.load(base + local, mask=owned, other=0.0).to(tl.float32)
        tl.store(out_ptr + 4 + k, capped(x, softcap, SOFTCAP), mask=k < n_ids)
