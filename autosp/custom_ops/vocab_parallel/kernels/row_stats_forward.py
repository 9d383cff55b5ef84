"""One read of a row: maximum, sum of exponentials and the centred weighted sums together, with the logits at the ids.

Every lane keeps a running maximum of its own and rescales once a tile of DEPTH values, so that nothing crosses lanes
before the end of the row; the lanes are then combined like shards are. A whole vocabulary is finished here; a shard's
statistics are packed for the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LN2, LOG2E, LOWEST, capped, lane_start, row_inverse, row_offset, weighted


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


@triton.jit
def _logits_at(base, index_ptr, row, start, n_cols, n_ids, softcap, SOFTCAP: tl.constexpr, IDS: tl.constexpr):
    """``(u of the row's ids, 0 where another shard holds it; the ids; which of the IDS places are ids)``."""
    i = tl.arange(0, IDS)
    named = i < n_ids
    token = tl.load(index_ptr + row * n_ids + i, mask=named, other=-1)
    local = token - start
    owned = named & (local >= 0) & (local < n_cols)
    x = tl.load(base + local, mask=owned, other=0.0).to(tl.float32)
    return capped(x, softcap, SOFTCAP), token, named


@triton.jit(do_not_specialize=["n_rows", "start", "n_ids", "ignore_index", "unknown"])
def row_stats_forward_kernel(
    x_ptr,
    index_ptr,
    inverse_ptr,
    packed_ptr,
    logp_ptr,
    lse_ptr,
    entropy_ptr,
    mean_ptr,
    argmax_ptr,
    saved_ptr,
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
    WHOLE: tl.constexpr,
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
    base = lane_start(x_ptr + row_offset(row, inner, outer_stride, inner_stride), unknown, VECTORS)
    end = n_cols
    if SKIP:
        end = tl.where(tl.load(index_ptr + row) == ignore_index, 0, n_cols)
    k = row_inverse(inverse_ptr, inverse, row, PER_ROW)
    scale = k * LOG2E
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
    row_s = tl.sum(s * keep, axis=0)
    row_w = 0.0
    row_c = 0.0
    if ENTROPY:
        row_w = tl.sum(weighted(keep, w + s * shift), axis=0)
    if MEAN:
        row_c = tl.sum(c + weighted(n, shift), axis=0)
    if WHOLE:
        log_s = tl.log2(row_s) * LN2
        ignored_row = row < 0
        if SKIP:
            ignored_row = tl.load(index_ptr + row) == ignore_index
        reference = top
        subtract = log_s
        if IDS > 0:
            u, token, named = _logits_at(base, index_ptr, row, start, n_cols, n_ids, softcap, SOFTCAP, IDS)
            inside = (token >= 0) & (token < n_cols)
            ignored = token == ignore_index
            if EXCLUDE:
                reference = tl.maximum(top, tl.max(tl.where(inside & (ignored == 0), u, LOWEST), axis=0))
                subtract = 0.0
            logp = tl.where(inside, (u - reference) * k - subtract, float("nan"))
            out = row * n_ids + tl.arange(0, IDS)
            tl.store(logp_ptr + out, tl.where(ignored, 0.0, logp), mask=named)
            tl.store(argmax_ptr + out, (inside & (ignored == 0) & (u >= top)).to(tl.uint8), mask=named)
        lse = (top - reference) * k + log_s if EXCLUDE else top * k + log_s
        tl.store(lse_ptr + row, tl.where(ignored_row, 0.0, lse))
        if ENTROPY:
            tl.store(entropy_ptr + row, log_s - row_w / row_s * k)
        if MEAN:
            tl.store(mean_ptr + row, tl.where(ignored_row, 0.0, row_c / n_cols * k - log_s))
        tl.store(saved_ptr + row, top)
        tl.store(saved_ptr + n_rows + row, log_s)
        if row == 0:
            tl.store(saved_ptr + 2 * n_rows, n_cols * 1.0)
    else:
        out_ptr = packed_ptr + row * (n_ids + 4)
        tl.store(out_ptr, top)
        tl.store(out_ptr + 1, row_s)
        tl.store(out_ptr + 2, row_w)
        tl.store(out_ptr + 3, row_c)
        if IDS > 0:
            u, token, named = _logits_at(base, index_ptr, row, start, n_cols, n_ids, softcap, SOFTCAP, IDS)
            tl.store(out_ptr + 4 + tl.arange(0, IDS), u, mask=named)
        if row == 0:
            header = packed_ptr + n_rows.to(tl.int64) * (n_ids + 4)
            tl.store(header, n_cols * 1.0)
            tl.store(header + 1, start * 1.0)
