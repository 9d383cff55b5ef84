"""The packed statistics of all ranks become results, in rank order: the same bits on every rank and in every run."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LN2, LOG2E, LOWEST, block_inverse, weighted


@triton.jit(do_not_specialize=["length", "n_ranks", "n_rows", "n_ids", "stated_total", "ignore_index"])
def row_stats_combine_kernel(
    gathered_ptr,
    length,
    n_ranks,
    index_ptr,
    inverse_ptr,
    logp_ptr,
    lse_ptr,
    entropy_ptr,
    mean_ptr,
    argmax_ptr,
    saved_ptr,
    n_rows,
    n_ids,
    inverse,
    stated_total,
    ignore_index,
    PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr,
    MEAN: tl.constexpr,
    EXCLUDE: tl.constexpr,
    SKIP: tl.constexpr,
    CHECK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    k = block_inverse(inverse_ptr, inverse, row, live, PER_ROW)
    scale = k * LOG2E
    fields = row * (n_ids + 4)
    header = n_rows.to(tl.int64) * (n_ids + 4)

    m = tl.full([ROWS], LOWEST, tl.float32)
    total = 0.0
    poison = 0.0
    for rank in range(n_ranks):
        shard = gathered_ptr + rank * length
        m = tl.maximum(m, tl.load(shard + fields, mask=live, other=0.0))
        if tl.load(shard + header + 1) != total:
            poison = float("nan")
        total += tl.load(shard + header)
    if (stated_total >= 0) & (total != stated_total):
        poison = float("nan")
    if not CHECK:
        poison = 0.0
    s = tl.zeros([ROWS], tl.float32)
    w = tl.zeros([ROWS], tl.float32)
    c = tl.zeros([ROWS], tl.float32)
    for rank in range(n_ranks):
        shard = gathered_ptr + rank * length + fields
        m_of = tl.load(shard, mask=live, other=0.0)
        s_of = tl.load(shard + 1, mask=live, other=1.0)
        shift = m_of - m
        keep = tl.exp2(shift * scale)
        s += keep * s_of
        if ENTROPY:
            w += weighted(keep, tl.load(shard + 2, mask=live, other=0.0) + s_of * shift)
        if MEAN:
            n = tl.load(gathered_ptr + rank * length + header)
            c += tl.load(shard + 3, mask=live, other=0.0) + weighted(n, shift)
    log_s = tl.log2(s) * LN2

    ignored_row = row < 0
    if SKIP:
        ignored_row = tl.load(index_ptr + row, mask=live, other=0) == ignore_index
    reference = m
    subtract = log_s
    if EXCLUDE:
        for i in range(n_ids):
            u, token = _logit_of(gathered_ptr, length, n_ranks, header, fields, index_ptr, row, i, n_ids, live)
            inside = (token >= 0) & (token < total)
            ignored = token == ignore_index
            reference = tl.where(inside & (ignored == 0), tl.maximum(reference, u), reference)
        subtract = tl.zeros([ROWS], tl.float32)
    for i in range(n_ids):
        u, token = _logit_of(gathered_ptr, length, n_ranks, header, fields, index_ptr, row, i, n_ids, live)
        inside = (token >= 0) & (token < total)
        ignored = token == ignore_index
        logp = tl.where(inside, (u - reference) * k - subtract, float("nan")) + poison
        logp = tl.where(ignored, 0.0, logp)
        tl.store(logp_ptr + row * n_ids + i, logp, mask=live)
        best = inside & (ignored == 0) & (u >= m)
        tl.store(argmax_ptr + row * n_ids + i, best.to(tl.uint8), mask=live)
    lse = m * k + log_s
    if EXCLUDE:
        lse = (m - reference) * k + log_s
    tl.store(lse_ptr + row, tl.where(ignored_row, 0.0, lse) + poison, mask=live)
    if ENTROPY:
        tl.store(entropy_ptr + row, log_s - w / s * k + poison, mask=live)
    if MEAN:
        mean = tl.where(ignored_row, 0.0, c / total * k - log_s)
        tl.store(mean_ptr + row, mean + poison, mask=live)
    tl.store(saved_ptr + row, m + poison, mask=live)
    tl.store(saved_ptr + n_rows + row, log_s, mask=live)
    if tl.program_id(0) == 0:
        tl.store(saved_ptr + 2 * n_rows, total)


@triton.jit
def _logit_of(gathered_ptr, length, n_ranks, header, fields, index_ptr, row, i, n_ids, live):
    """``(u of the i-th id, the id)`` for a block of rows; u is 0 for an id that nobody holds."""
    token = tl.load(index_ptr + row * n_ids + i, mask=live, other=-1)
    u = tl.zeros(row.shape, tl.float32)
    for rank in range(n_ranks):
        shard = gathered_ptr + rank * length
        first = tl.load(shard + header + 1)
        owned = (token >= first) & (token < first + tl.load(shard + header))
        u = tl.where(owned, tl.load(shard + fields + 4 + i, mask=live, other=0.0), u)
    return u, token
