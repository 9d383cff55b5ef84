"""Gradient of the row statistics: one read and one write, probabilities recomputed in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2E, cap_slope, capped, row_inverse, row_offset, weighted


@triton.jit
def _id_gradient(token, g, total, ignore_index):
    """An id's upstream gradient: 0 for an ignored one, NaN for one that nobody holds."""
    g = tl.where(((token < 0) | (token >= total)) & (g != 0.0), float("nan"), g)
    return tl.where(token == ignore_index, 0.0, g)


@triton.jit
def _sum_of_ids(index_ptr, g_ptr, row, n_ids, total, ignore_index):
    """Sum of the upstream gradients of a row's ids, and whether any of them is not zero."""
    summed = 0.0
    some = False
    for k in range(n_ids):
        g = _id_gradient(tl.load(index_ptr + row * n_ids + k), tl.load(g_ptr + row * n_ids + k), total, ignore_index)
        summed += g
        some = some | (g != 0.0)
    return summed, some


@triton.jit(do_not_specialize=["n_rows", "n_groups", "start", "n_ids", "ignore_index"])
def row_stats_backward_kernel(
    x_ptr,
    out_ptr,
    index_ptr,
    inverse_ptr,
    saved_ptr,
    entropy_ptr,
    g_logp_ptr,
    g_lse_ptr,
    g_entropy_ptr,
    g_mean_ptr,
    n_rows,
    n_cols,
    n_valid,
    n_groups,
    inner,
    outer_stride,
    inner_stride,
    start,
    n_ids,
    inverse,
    softcap,
    ignore_index,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXCLUDE: tl.constexpr,
    SKIP: tl.constexpr,
    ONE_ID: tl.constexpr,
    G_LOGP: tl.constexpr,
    G_LSE: tl.constexpr,
    G_ENTROPY: tl.constexpr,
    G_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    EVICT: tl.constexpr,
):
    # Last rows first: the forward read them last, so they are what the cache may still hold.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // n_groups).to(tl.int64)
    group = program % n_groups
    k = row_inverse(inverse_ptr, inverse, row, PER_ROW)
    m = tl.load(saved_ptr + row)
    log_s = tl.load(saved_ptr + n_rows + row)
    total = tl.load(saved_ptr + 2 * n_rows)
    a = 0.0
    b = 0.0
    c = 0.0
    some = False
    if G_LSE:
        a += tl.load(g_lse_ptr + row)
    if G_ENTROPY:
        g = tl.load(g_entropy_ptr + row)
        a -= weighted(g, tl.load(entropy_ptr + row))
        b -= g
    if G_MEAN:
        g = tl.load(g_mean_ptr + row)
        a -= g
        c += g / total
    if SKIP:
        ignored = tl.load(index_ptr + row) == ignore_index
        a = tl.where(ignored, 0.0, a)
        b = tl.where(ignored, 0.0, b)
        c = tl.where(ignored, 0.0, c)
    d = 0.0
    if G_LOGP:
        if ONE_ID:
            token = tl.load(index_ptr + row)
            d = _id_gradient(token, tl.load(g_logp_ptr + row), total, ignore_index)
            some = d != 0.0
        else:
            d, some = _sum_of_ids(index_ptr, g_logp_ptr, row, n_ids, total, ignore_index)
        if EXCLUDE:
            a = tl.where(d != d, d, a)
        else:
            a -= d
    some = some | (a != 0.0) | (b != 0.0) | (c != 0.0)
    if EXCLUDE:
        # An empty tail has no probability anywhere.
        log_s = tl.where(log_s == float("-inf"), float("inf"), log_s)
    # A row without any upstream gradient is not read.
    limit = tl.where(some, n_valid, 0)
    x_row = x_ptr + row_offset(row, inner, outer_stride, inner_stride)
    out_row = out_ptr + row * n_cols
    for step in tl.static_range(STEPS):
        begin = (group * STEPS + step) * BLOCK
        columns = begin + tl.arange(0, BLOCK)
        live = columns < limit
        x = tl.load(x_row + columns, mask=live, other=0.0, eviction_policy=EVICT).to(tl.float32)
        z = (capped(x, softcap, SOFTCAP) - m) * k - log_s
        p = tl.exp2(z * LOG2E)
        g = weighted(p, a + b * z) if G_ENTROPY else p * a
        g = g + c
        if ONE_ID and G_LOGP:
            local = token - start
            held = (local >= 0) & (local < n_valid) & (token != ignore_index)
            local = tl.where(held, local, -1).to(tl.int32)
            if EXCLUDE:
                g = tl.where(columns == local, 0.0, g)
            g = tl.where(columns == local, g + d, g)
        elif G_LOGP or EXCLUDE:
            g = _at_ids(
                g, columns, begin, index_ptr, g_logp_ptr, row, n_ids, start, ignore_index, EXCLUDE, G_LOGP, BLOCK
            )
        g = g * k
        if SOFTCAP:
            g = g * cap_slope(x, softcap)
        g = tl.where(live, g, 0.0)
        tl.store(out_row + columns, g.to(out_ptr.dtype.element_ty), mask=columns < n_cols, eviction_policy=EVICT)


@triton.jit
def _at_ids(
    g,
    columns,
    begin,
    index_ptr,
    g_ptr,
    row,
    n_ids,
    start,
    ignore_index,
    EXCLUDE: tl.constexpr,
    G_LOGP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add each id's own gradient at its column; with EXCLUDE that replaces what the tail gave there."""
    if EXCLUDE:
        for k in range(n_ids):
            token = tl.load(index_ptr + row * n_ids + k)
            local = token - start
            if (local >= begin) & (local < begin + BLOCK) & (token != ignore_index):
                g = tl.where(columns == local, 0.0, g)
    if G_LOGP:
        for k in range(n_ids):
            token = tl.load(index_ptr + row * n_ids + k)
            local = token - start
            if (local >= begin) & (local < begin + BLOCK) & (token != ignore_index):
                g = tl.where(columns == local, g + tl.load(g_ptr + row * n_ids + k), g)
    return g
