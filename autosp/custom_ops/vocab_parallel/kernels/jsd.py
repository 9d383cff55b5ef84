"""The Jensen-Shannon sums from global probabilities, and both gradients in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..divergence_plain import PairOptions
from .common import (
    LN2,
    LOG2E,
    cap_slope,
    capped,
    hardware_log2,
    lane_start,
    log2_of,
    on_device_of,
    pointer_or,
    row_inverse,
    row_offset,
)
from .kl import element_bytes, pair_arguments

# By bytes of an element of the narrower input, from the sweeps in docs/benchmarks_losses.md.
FORWARD = {
    2: dict(BLOCK=1024, STAGES=1, EVICT="", num_warps=4),
    4: dict(BLOCK=4096, STAGES=2, EVICT="", num_warps=8),
}
BACKWARD = {2: dict(BLOCK=4096, EVICT="", num_warps=4), 4: dict(BLOCK=4096, EVICT="", num_warps=8)}


@triton.jit
def _mixture(x_p, x_q, m_p, m_q, log_s_p, log_s_q, scale, softcap, beta, SOFTCAP: tl.constexpr, FAST: tl.constexpr):
    """``(P > Q or equal, larger, smaller, log2(larger/M), log2(smaller/M))``; see ``divergence_plain.mixture_logs``.

    ``log_s`` and ``scale`` are in base 2. The bound on the gap only replaces infinities and NaNs that meet a weight of
    zero; NaN logits reach the results through ``log_s``.
    """
    log_p = (capped(x_p, softcap, SOFTCAP) - m_p) * scale - log_s_p
    log_q = (capped(x_q, softcap, SOFTCAP) - m_q) * scale - log_s_q
    p_larger = log_p >= log_q
    gap = tl.minimum(tl.abs(log_p - log_q), 1e30)
    ratio = tl.exp2(-gap)
    larger = tl.exp2(tl.maximum(log_p, log_q))
    mixed = log2_of(1.0 + tl.where(p_larger, beta, 1.0 - beta) * (ratio - 1.0), FAST)
    return p_larger, larger, larger * ratio, -mixed, -gap - mixed


@triton.jit(do_not_specialize=["n_rows", "unknown"])
def jsd_forward_kernel(
    p_ptr,
    q_ptr,
    inverse_ptr,
    saved_ptr,
    sums_ptr,
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
    beta,
    unknown,
    VECTORS: tl.constexpr,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
):
    # Last rows first: the statistics pass read them last, so they are what the cache may still hold.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    p_row = lane_start(p_ptr + row_offset(row, p_inner, p_outer_stride, p_inner_stride), unknown, VECTORS)
    q_row = lane_start(q_ptr + row_offset(row, q_inner, q_outer_stride, q_inner_stride), unknown, VECTORS)
    k = row_inverse(inverse_ptr, inverse, row, PER_ROW)
    m_p = tl.load(saved_ptr + row)
    log_s_p = tl.load(saved_ptr + n_rows + row)
    m_q = tl.load(saved_ptr + 2 * n_rows + row)
    log_s_q = tl.load(saved_ptr + 3 * n_rows + row)
    scale = k * LOG2E
    base_p = log_s_p * LOG2E
    base_q = log_s_q * LOG2E
    sum_p = tl.zeros([BLOCK], tl.float32)
    sum_q = tl.zeros([BLOCK], tl.float32)
    whole = n_cols // BLOCK * BLOCK
    columns = tl.arange(0, BLOCK)
    for begin in tl.range(0, whole, BLOCK, num_stages=STAGES):
        x_p = tl.load(p_row + begin + columns, eviction_policy=EVICT).to(tl.float32)
        x_q = tl.load(q_row + begin + columns, eviction_policy=EVICT).to(tl.float32)
        p_larger, larger, smaller, big, small = _mixture(
            x_p, x_q, m_p, m_q, base_p, base_q, scale, softcap, beta, SOFTCAP, FAST
        )
        sum_p += tl.where(p_larger, larger * big, smaller * small)
        sum_q += tl.where(p_larger, smaller * small, larger * big)
    if whole < n_cols:
        live = whole + columns < n_cols
        x_p = tl.load(p_row + whole + columns, mask=live, other=0.0).to(tl.float32)
        x_q = tl.load(q_row + whole + columns, mask=live, other=0.0).to(tl.float32)
        p_larger, larger, smaller, big, small = _mixture(
            x_p, x_q, m_p, m_q, base_p, base_q, scale, softcap, beta, SOFTCAP, FAST
        )
        sum_p += tl.where(live, tl.where(p_larger, larger * big, smaller * small), 0.0)
        sum_q += tl.where(live, tl.where(p_larger, smaller * small, larger * big), 0.0)
    # NaN where a normalisation is not finite: minimum and maximum above may have dropped it.
    poison = (log_s_p - log_s_p) + (log_s_q - log_s_q)
    tl.store(sums_ptr + row, tl.sum(sum_p, axis=0) * LN2 + poison)
    tl.store(sums_ptr + n_rows + row, tl.sum(sum_q, axis=0) * LN2 + poison)


@triton.jit(do_not_specialize=["n_rows", "n_groups"])
def jsd_backward_kernel(
    p_ptr,
    q_ptr,
    grad_p_ptr,
    grad_q_ptr,
    inverse_ptr,
    sums_ptr,
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
    beta,
    PER_ROW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEED_P: tl.constexpr,
    NEED_Q: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICT: tl.constexpr,
):
    # The order of the forward's second pass reversed again, for the cache.
    program = tl.program_id(0)
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
    p_larger, larger, smaller, big, small = _mixture(
        x_p,
        x_q,
        tl.load(saved_ptr + row),
        tl.load(saved_ptr + 2 * n_rows + row),
        tl.load(saved_ptr + n_rows + row) * LOG2E,
        tl.load(saved_ptr + 3 * n_rows + row) * LOG2E,
        k * LOG2E,
        softcap,
        beta,
        SOFTCAP,
        FAST,
    )
    if NEED_P:
        p = tl.where(p_larger, larger, smaller)
        value = p * (tl.where(p_larger, big, small) * LN2 - tl.load(sums_ptr + row)) * (g * k * (1.0 - beta))
        if SOFTCAP:
            value = value * cap_slope(x_p, softcap)
        value = tl.where(live, value, 0.0).to(grad_p_ptr.dtype.element_ty)
        tl.store(grad_p_ptr + row * n_cols + columns, value, mask=columns < n_cols, eviction_policy=EVICT)
    if NEED_Q:
        q = tl.where(p_larger, smaller, larger)
        value = q * (tl.where(p_larger, small, big) * LN2 - tl.load(sums_ptr + n_rows + row)) * (g * k * beta)
        if SOFTCAP:
            value = value * cap_slope(x_q, softcap)
        value = tl.where(live, value, 0.0).to(grad_q_ptr.dtype.element_ty)
        tl.store(grad_q_ptr + row * n_cols + columns, value, mask=columns < n_cols, eviction_policy=EVICT)


def local_jsd_sums(
    p: torch.Tensor, q: torch.Tensor, saved: torch.Tensor, beta: float, options: PairOptions
) -> torch.Tensor:
    """As ``divergence_plain.local_jsd_sums``, in one read of each."""
    a, b, vectors, strides = pair_arguments(p, q, reduces=True)
    sums = torch.empty(2, a.rows, dtype=torch.float32, device=p.device)
    if a.rows:
        with on_device_of(p):
            jsd_forward_kernel[(a.rows,)](
                a.tensor,
                b.tensor,
                pointer_or(options.inverse_rows, saved),
                saved,
                sums,
                a.rows,
                options.valid,
                *strides,
                options.inverse,
                options.softcap,
                beta,
                0,
                VECTORS=vectors,
                PER_ROW=options.inverse_rows is not None,
                SOFTCAP=options.softcap != 0.0,
                FAST=hardware_log2(p),
                **FORWARD[element_bytes(p, q)],
            )
    return sums


def jsd_backward(
    p: torch.Tensor,
    q: torch.Tensor,
    sums: torch.Tensor,
    saved: torch.Tensor,
    upstream: torch.Tensor,
    beta: float,
    options: PairOptions,
    grad_p: torch.Tensor | None,
    grad_q: torch.Tensor | None,
) -> None:
    """As ``divergence_plain.jsd_backward``, both gradients from one read of each input."""
    a, b, _, strides = pair_arguments(p, q, reduces=False)
    if a.rows == 0 or a.cols == 0 or (grad_p is None and grad_q is None):
        return
    config = BACKWARD[element_bytes(p, q)]
    groups = triton.cdiv(a.cols, config["BLOCK"])
    with on_device_of(p):
        jsd_backward_kernel[(a.rows * groups,)](
            a.tensor,
            b.tensor,
            pointer_or(grad_p, saved),
            pointer_or(grad_q, saved),
            pointer_or(options.inverse_rows, saved),
            sums,
            saved,
            upstream,
            a.rows,
            a.cols,
            options.valid,
            groups,
            *strides,
            options.inverse,
            options.softcap,
            beta,
            PER_ROW=options.inverse_rows is not None,
            SOFTCAP=options.softcap != 0.0,
            NEED_P=grad_p is not None,
            NEED_Q=grad_q is not None,
            FAST=hardware_log2(p),
            **config,
        )
