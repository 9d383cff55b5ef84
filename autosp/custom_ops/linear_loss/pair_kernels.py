"""Triton kernels over a student's and a teacher's block of logits: divergences and gradients, each in one read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .kernels import _tanh

if TYPE_CHECKING:
    from .pair_rows import Kind, PairGradient, Side

VALUES_BLOCK = 4096
GRADIENT_BLOCK = 2048


@triton.jit
def _logprob(ptr, offsets, mask, softcap, inverse, top, log_total, HAS_CAP: tl.constexpr, HAS_T: tl.constexpr):
    x = tl.load(ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    slope = tl.full(x.shape, 1.0, tl.float32)
    if HAS_CAP:
        t = _tanh(x / softcap)
        x = tl.where(mask, softcap * t, float("-inf"))
        slope = 1.0 - t * t
    if HAS_T:
        x = x * inverse
        slope = slope * inverse
    return (x - top) - log_total, slope


@triton.jit
def _log_ratios(s, t, log_beta, log_rest, KIND: tl.constexpr):
    if KIND == 0:
        a = t - s
        b = t - s
    elif KIND == 1:
        a = s - t
        b = s - t
    else:
        u = t + log_beta
        v = s + log_rest
        high = tl.maximum(u, v)
        low = tl.minimum(u, v)
        gap = tl.where(low == float("-inf"), float("-inf"), low - high)
        m = high + tl.log(1.0 + tl.exp(gap))
        a = tl.where(s == t, 0.0, t - m)
        b = tl.where(s == t, 0.0, s - m)
    return a, b


@triton.jit
def _values_kernel(
    out_ptr, s_ptr, t_ptr, inverse_ptr, s_top, s_log, t_top, t_log, rows, cols, s_stride, t_stride,
    s_cap, t_cap, log_beta, log_rest,
    S_CAP: tl.constexpr, T_CAP: tl.constexpr, HAS_T: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inverse = 1.0
    if HAS_T:
        inverse = tl.load(inverse_ptr + row)
    top_s, log_s = tl.load(s_top + row), tl.load(s_log + row)
    top_t, log_t = tl.load(t_top + row), tl.load(t_log + row)
    total_a = 0.0
    total_b = 0.0
    for first in range(0, cols, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        mask = offsets < cols
        s, _ = _logprob(s_ptr + row * s_stride, offsets, mask, s_cap, inverse, top_s, log_s, S_CAP, HAS_T)
        t, _ = _logprob(t_ptr + row * t_stride, offsets, mask, t_cap, inverse, top_t, log_t, T_CAP, HAS_T)
        a, b = _log_ratios(s, t, log_beta, log_rest, KIND)
        if KIND != 1:
            p = tl.exp(t)
            total_a += tl.sum(tl.where(p == 0.0, 0.0, p * a), 0)
        if KIND != 0:
            p = tl.exp(s)
            total_b += tl.sum(tl.where(p == 0.0, 0.0, p * b), 0)
    tl.store(out_ptr + row, total_a)
    tl.store(out_ptr + rows + row, total_b)


@triton.jit
def _gradients_kernel(
    ds_ptr, dt_ptr, s_ptr, t_ptr, inverse_ptr, s_top, s_log, t_top, t_log, up_ptr, a_ptr, b_ptr,
    cols, s_stride, t_stride, ds_stride, dt_stride, s_cap, t_cap, log_beta, log_rest, beta,
    S_CAP: tl.constexpr, T_CAP: tl.constexpr, HAS_T: tl.constexpr, KIND: tl.constexpr,
    NEED_S: tl.constexpr, NEED_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inverse = 1.0
    if HAS_T:
        inverse = tl.load(inverse_ptr + row)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < cols
    top_s, log_s = tl.load(s_top + row), tl.load(s_log + row)
    top_t, log_t = tl.load(t_top + row), tl.load(t_log + row)
    s, slope_s = _logprob(s_ptr + row * s_stride, offsets, mask, s_cap, inverse, top_s, log_s, S_CAP, HAS_T)
    t, slope_t = _logprob(t_ptr + row * t_stride, offsets, mask, t_cap, inverse, top_t, log_t, T_CAP, HAS_T)
    left, right = _log_ratios(s, t, log_beta, log_rest, KIND)
    p_s = tl.exp(s)
    p_t = tl.exp(t)
    up = tl.load(up_ptr + row)
    a = tl.load(a_ptr + row)
    b = tl.load(b_ptr + row)
    if NEED_S:
        ds = p_s - p_t
        if KIND != 0:
            ds = tl.where(p_s == 0.0, 0.0, p_s * (right - b))
        if KIND == 2:
            ds = (1.0 - beta) * ds
        ds = ds * up * slope_s
        tl.store(ds_ptr + row * ds_stride + offsets, ds.to(ds_ptr.dtype.element_ty), mask=mask)
    if NEED_T:
        dt = p_t - p_s
        if KIND != 1:
            dt = tl.where(p_t == 0.0, 0.0, p_t * (left - a))
        if KIND == 2:
            dt = beta * dt
        dt = dt * up * slope_t
        tl.store(dt_ptr + row * dt_stride + offsets, dt.to(dt_ptr.dtype.element_ty), mask=mask)


def pair_values(out: torch.Tensor, student: Side, teacher: Side, kind: Kind) -> None:
    """Fill ``out`` (fp32 ``[2, n]``) with the block's parts of A and B."""
    n, v = student.logits.shape
    inverse = student.shape.inverse_temperature
    _values_kernel[(n,)](
        out, student.logits, teacher.logits, out if inverse is None else inverse,
        student.top, student.log_total, teacher.top, teacher.log_total, n, v,
        student.logits.stride(0), teacher.logits.stride(0), student.shape.softcap, teacher.shape.softcap,
        *kind.log_weights, S_CAP=student.shape.softcap != 0.0, T_CAP=teacher.shape.softcap != 0.0,
        HAS_T=inverse is not None, KIND=kind.code,
        BLOCK=min(VALUES_BLOCK, max(16, triton.next_power_of_2(v))), num_warps=8,
    )  # fmt: skip


def pair_gradients(
    student_out: torch.Tensor | None, teacher_out: torch.Tensor | None, student: Side, teacher: Side, kind: Kind,
    gradient: PairGradient,
) -> None:  # fmt: skip
    """Write the gradients of the raw logits, ``[n, v]``, of the sides that are wanted."""
    n, v = student.logits.shape
    inverse = student.shape.inverse_temperature
    ds = student.logits if student_out is None else student_out
    dt = teacher.logits if teacher_out is None else teacher_out
    block = min(GRADIENT_BLOCK, max(16, triton.next_power_of_2(v)))
    _gradients_kernel[(n, triton.cdiv(v, block))](
        ds, dt, student.logits, teacher.logits, student.top if inverse is None else inverse,
        student.top, student.log_total, teacher.top, teacher.log_total, gradient.upstream, gradient.a, gradient.b,
        v, student.logits.stride(0), teacher.logits.stride(0), ds.stride(0), dt.stride(0),
        student.shape.softcap, teacher.shape.softcap, *kind.log_weights, kind.beta,
        S_CAP=student.shape.softcap != 0.0, T_CAP=teacher.shape.softcap != 0.0, HAS_T=inverse is not None,
        KIND=kind.code, NEED_S=student_out is not None, NEED_T=teacher_out is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
