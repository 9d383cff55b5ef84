"""KL(P || Q) of two rows in one read of each, its combination over ranks, and both gradients in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..divergence_plain import KL_FIELDS, PairOptions
from ..rows import count_rows, lane_view, row_view
from .common import (
    LN2,
    LOG2E,
    LOWEST,
    block_inverse,
    cap_slope,
    capped,
    lane_start,
    on_device_of,
    pointer_or,
    row_inverse,
    row_offset,
    weighted,
)

# By bytes of an element of the narrower input, from the sweeps in docs/benchmarks_losses.md.
FORWARD = {
    2: dict(DEPTH=4, LANES=1024, STAGES=3, EVICT="", num_warps=4),
    4: dict(DEPTH=4, LANES=512, STAGES=1, EVICT="", num_warps=4),
}
BACKWARD = {2: dict(BLOCK=4096, EVICT="", num_warps=4), 4: dict(BLOCK=2048, EVICT="", num_warps=8)}
_COMBINE_ROWS = 32


@triton.jit
def _update(u_p, u_q, m_p, s_p, m_q, s_q, acc, scale):
    n_p = tl.maximum(m_p, tl.max(u_p, axis=0))
    n_q = tl.maximum(m_q, tl.max(u_q, axis=0))
    d_p = u_p - n_p[None, :]
    d_q = u_q - n_q[None, :]
    e_p = tl.exp2(d_p * scale)
    shift_p = m_p - n_p
    shift_q = m_q - n_q
    keep = tl.exp2(shift_p * scale)
    term = e_p * tl.where(e_p == 0.0, 0.0, d_p - d_q)
    acc = weighted(keep, acc + weighted(s_p, shift_p - shift_q)) + tl.sum(term, axis=0)
    s_p = s_p * keep + tl.sum(e_p, axis=0)
    s_q = s_q * tl.exp2(shift_q * scale) + tl.sum(tl.exp2(d_q * scale), axis=0)
    return n_p, s_p, n_q, s_q, acc


@triton.jit(do_not_specialize=["n_rows", "unknown"])
def kl_forward_kernel(
    p_ptr,
    q_ptr,
    inverse_ptr,
    packed_ptr,
    kl_ptr,
    saved_ptr,
    n_rows,
    n_cols,
    p_inner,
    p_outer_stride,
    p_inner_stride,
    q_inner,
    q_outer_stride,
    q_inner_stride,
    inverse,
    softcap,
    unknown,
    VECTORS: tl.constexpr,
    WHOLE: tl.constexpr,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = lane_start(p_ptr + row_offset(row, p_inner, p_outer_stride, p_inner_stride), unknown, VECTORS)
    q_row = lane_start(q_ptr + row_offset(row, q_inner, q_outer_stride, q_inner_stride), unknown, VECTORS)
    k = row_inverse(inverse_ptr, inverse, row, PER_ROW)
    scale = k * LOG2E
    TILE: tl.constexpr = DEPTH * LANES
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    m_p = tl.full([LANES], LOWEST, tl.float32)
    m_q = tl.full([LANES], LOWEST, tl.float32)
    s_p = tl.zeros([LANES], tl.float32)
    s_q = tl.zeros([LANES], tl.float32)
    acc = tl.zeros([LANES], tl.float32)
    whole = n_cols // TILE * TILE
    for begin in tl.range(0, whole, TILE, num_stages=STAGES):
        u_p = capped(tl.load(p_row + begin + tile, eviction_policy=EVICT).to(tl.float32), softcap, SOFTCAP)
        u_q = capped(tl.load(q_row + begin + tile, eviction_policy=EVICT).to(tl.float32), softcap, SOFTCAP)
        m_p, s_p, m_q, s_q, acc = _update(u_p, u_q, m_p, s_p, m_q, s_q, acc, scale)
    if whole < n_cols:
        live = whole + tile < n_cols
        u_p = capped(tl.load(p_row + whole + tile, mask=live, other=0.0).to(tl.float32), softcap, SOFTCAP)
        u_q = capped(tl.load(q_row + whole + tile, mask=live, other=0.0).to(tl.float32), softcap, SOFTCAP)
        u_p = tl.where(live, u_p, float("-inf"))
        u_q = tl.where(live, u_q, float("-inf"))
        m_p, s_p, m_q, s_q, acc = _update(u_p, u_q, m_p, s_p, m_q, s_q, acc, scale)

    top_p = tl.max(m_p, axis=0)
    top_q = tl.max(m_q, axis=0)
    shift_p = m_p - top_p
    shift_q = m_q - top_q
    keep = tl.exp2(shift_p * scale)
    moved = weighted(s_p, shift_p - shift_q)
    row_s_p = tl.sum(s_p * keep, axis=0)
    row_s_q = tl.sum(s_q * tl.exp2(shift_q * scale), axis=0)
    row_acc = tl.sum(weighted(keep, acc + moved), axis=0)
    if WHOLE:
        log_p = tl.log2(row_s_p) * LN2
        log_q = tl.log2(row_s_q) * LN2
        tl.store(kl_ptr + row, row_acc / row_s_p * k - (log_p - log_q))
        tl.store(saved_ptr + row, top_p)
        tl.store(saved_ptr + n_rows + row, log_p)
        tl.store(saved_ptr + 2 * n_rows + row, top_q)
        tl.store(saved_ptr + 3 * n_rows + row, log_q)
    else:
        out = packed_ptr + row * 5
        tl.store(out, top_p)
        tl.store(out + 1, row_s_p)
        tl.store(out + 2, top_q)
        tl.store(out + 3, row_s_q)
        tl.store(out + 4, row_acc)


@triton.jit(do_not_specialize=["n_ranks", "n_rows"])
def kl_combine_kernel(
    gathered_ptr,
    n_ranks,
    inverse_ptr,
    kl_ptr,
    saved_ptr,
    n_rows,
    inverse,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    k = block_inverse(inverse_ptr, inverse, row, live, PER_ROW)
    scale = k * LOG2E
    m_p = tl.full([ROWS], LOWEST, tl.float32)
    m_q = tl.full([ROWS], LOWEST, tl.float32)
    length = n_rows.to(tl.int64) * 5
    for rank in range(n_ranks):
        fields = gathered_ptr + rank * length + row * 5
        m_p = tl.maximum(m_p, tl.load(fields, mask=live, other=0.0))
        m_q = tl.maximum(m_q, tl.load(fields + 2, mask=live, other=0.0))
    s_p = tl.zeros([ROWS], tl.float32)
    s_q = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS], tl.float32)
    for rank in range(n_ranks):
        fields = gathered_ptr + rank * length + row * 5
        shift_p = tl.load(fields, mask=live, other=0.0) - m_p
        shift_q = tl.load(fields + 2, mask=live, other=0.0) - m_q
        of_s = tl.load(fields + 1, mask=live, other=1.0)
        keep = tl.exp2(shift_p * scale)
        moved = weighted(of_s, shift_p - shift_q)
        acc += weighted(keep, tl.load(fields + 4, mask=live, other=0.0) + moved)
        s_p += keep * of_s
        s_q += tl.exp2(shift_q * scale) * tl.load(fields + 3, mask=live, other=1.0)
    log_p = tl.log2(s_p) * LN2
    log_q = tl.log2(s_q) * LN2
    tl.store(kl_ptr + row, acc / s_p * k - (log_p - log_q), mask=live)
    tl.store(saved_ptr + row, m_p, mask=live)
    tl.store(saved_ptr + n_rows + row, log_p, mask=live)
    tl.store(saved_ptr + 2 * n_rows + row, m_q, mask=live)
    tl.store(saved_ptr + 3 * n_rows + row, log_q, mask=live)


@triton.jit(do_not_specialize=["n_rows", "n_groups"])
def kl_backward_kernel(
    p_ptr,
    q_ptr,
    grad_p_ptr,
    grad_q_ptr,
    inverse_ptr,
    kl_ptr,
    saved_ptr,
    g_ptr,
    n_rows,
    n_cols,
    n_valid,
    n_groups,
    p_inner,
    p_outer_stride,
    p_inner_stride,
    q_inner,
    q_outer_stride,
    q_inner_stride,
    inverse,
    softcap,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEED_P: tl.constexpr,
    NEED_Q: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
):
    # Last rows first: the forward read them last, so they are what the cache may still hold.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // n_groups).to(tl.int64)
    columns = (program % n_groups) * BLOCK + tl.arange(0, BLOCK)
    k = row_inverse(inverse_ptr, inverse, row, PER_ROW)
    g = tl.load(g_ptr + row)
    # A row without an upstream gradient is not read.
    live = columns < tl.where(g == 0.0, 0, n_valid)
    x_p = tl.load(
        p_ptr + row_offset(row, p_inner, p_outer_stride, p_inner_stride) + columns,
        mask=live,
        other=0.0,
        eviction_policy=EVICT,
    )
    x_q = tl.load(
        q_ptr + row_offset(row, q_inner, q_outer_stride, q_inner_stride) + columns,
        mask=live,
        other=0.0,
        eviction_policy=EVICT,
    )
    x_p = x_p.to(tl.float32)
    x_q = x_q.to(tl.float32)
    log_s_p = tl.load(saved_ptr + n_rows + row)
    log_s_q = tl.load(saved_ptr + 3 * n_rows + row)
    d_p = capped(x_p, softcap, SOFTCAP) - tl.load(saved_ptr + row)
    d_q = capped(x_q, softcap, SOFTCAP) - tl.load(saved_ptr + 2 * n_rows + row)
    p = tl.exp2((d_p * k - log_s_p) * LOG2E)
    if NEED_P:
        value = weighted(p, ((d_p - d_q) * k - (log_s_p - log_s_q)) - tl.load(kl_ptr + row)) * (g * k)
        if SOFTCAP:
            value = value * cap_slope(x_p, softcap)
        value = tl.where(live, value, 0.0).to(grad_p_ptr.dtype.element_ty)
        tl.store(grad_p_ptr + row * n_cols + columns, value, mask=columns < n_cols, eviction_policy=EVICT)
    if NEED_Q:
        value = (tl.exp2((d_q * k - log_s_q) * LOG2E) - p) * (g * k)
        if SOFTCAP:
            value = value * cap_slope(x_q, softcap)
        value = tl.where(live, value, 0.0).to(grad_q_ptr.dtype.element_ty)
        tl.store(grad_q_ptr + row * n_cols + columns, value, mask=columns < n_cols, eviction_policy=EVICT)


def pair_arguments(p: torch.Tensor, q: torch.Tensor, reduces: bool):
    """``(P's rows, Q's rows, stride arguments of both, whether to load vectors)``; see ``rows.lane_view``."""
    (a, vectors), (b, _) = (lane_view(p), lane_view(q)) if reduces else ((row_view(p), True), (row_view(q), True))
    return a, b, vectors, (a.inner, a.outer_stride, a.inner_stride, b.inner, b.outer_stride, b.inner_stride)


def element_bytes(p: torch.Tensor, q: torch.Tensor) -> int:
    """Bytes of an element of the narrower input, which choose the block sizes.

    A lane loads 16 bytes, so the narrower one needs the wider tile: in a tile that is too narrow for its vectors, the
    maximum of every tile would cross warps.
    """
    return min(p.element_size(), q.element_size())


def local_kl_stats(p: torch.Tensor, q: torch.Tensor, options: PairOptions) -> torch.Tensor:
    """As ``divergence_plain.local_kl_stats``, in one read of each."""
    packed = torch.empty(count_rows(p) * KL_FIELDS, dtype=torch.float32, device=p.device)
    _forward(p, q, options, packed, packed, packed, whole=False)
    return packed


def whole_kl_stats(p: torch.Tensor, q: torch.Tensor, options: PairOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Both steps in one launch, for a vocabulary that is not sharded."""
    rows = count_rows(p)
    kl, saved = (torch.empty(shape, dtype=torch.float32, device=p.device) for shape in ((rows,), (4, rows)))
    _forward(p, q, options, saved, kl, saved, whole=True)
    return kl, saved


def _forward(p, q, options: PairOptions, packed, kl, saved, whole: bool) -> None:
    a, b, vectors, strides = pair_arguments(p, q, reduces=True)
    if a.rows == 0:
        return
    with on_device_of(p):
        kl_forward_kernel[(a.rows,)](
            a.tensor,
            b.tensor,
            pointer_or(options.inverse_rows, packed),
            packed,
            kl,
            saved,
            a.rows,
            options.valid,
            *strides,
            options.inverse,
            options.softcap,
            0,
            VECTORS=vectors,
            WHOLE=whole,
            PER_ROW=options.inverse_rows is not None,
            SOFTCAP=options.softcap != 0.0,
            **FORWARD[element_bytes(p, q)],
        )


def combine_kl_stats(gathered: torch.Tensor, options: PairOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``divergence_plain.combine_kl_stats``."""
    rows = gathered.shape[1] // KL_FIELDS
    kl, saved = (torch.empty(shape, dtype=torch.float32, device=gathered.device) for shape in ((rows,), (4, rows)))
    if rows:
        with on_device_of(gathered):
            kl_combine_kernel[(triton.cdiv(rows, _COMBINE_ROWS),)](
                gathered,
                gathered.shape[0],
                pointer_or(options.inverse_rows, gathered),
                kl,
                saved,
                rows,
                options.inverse,
                PER_ROW=options.inverse_rows is not None,
                ROWS=_COMBINE_ROWS,
                num_warps=1,
            )
    return kl, saved


def kl_backward(
    p: torch.Tensor,
    q: torch.Tensor,
    kl: torch.Tensor,
    saved: torch.Tensor,
    upstream: torch.Tensor,
    options: PairOptions,
    grad_p: torch.Tensor | None,
    grad_q: torch.Tensor | None,
) -> None:
    """As ``divergence_plain.kl_backward``, both gradients from one read of each input."""
    a, b, _, strides = pair_arguments(p, q, reduces=False)
    if a.rows == 0 or a.cols == 0 or (grad_p is None and grad_q is None):
        return
    config = BACKWARD[element_bytes(p, q)]
    groups = triton.cdiv(a.cols, config["BLOCK"])
    with on_device_of(p):
        kl_backward_kernel[(a.rows * groups,)](
            a.tensor,
            b.tensor,
            pointer_or(grad_p, saved),
            pointer_or(grad_q, saved),
            pointer_or(options.inverse_rows, saved),
            kl,
            saved,
            upstream,
            a.rows,
            a.cols,
            options.valid,
            groups,
            *strides,
            options.inverse,
            options.softcap,
            PER_ROW=options.inverse_rows is not None,
            SOFTCAP=options.softcap != 0.0,
            NEED_P=grad_p is not None,
            NEED_Q=grad_q is not None,
            **config,
        )
