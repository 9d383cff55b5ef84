"""Triton kernels over a block of logits: row statistics, and the row gradient in place.

One program a row for the statistics (one read of the block), one program a row and 4096 columns for the gradient.
Rows are addressed in 64 bit. A program reads only its own row, so a row's bits do not depend on the rows around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from .rows import Coefficients

LOWEST = tl.constexpr(-3.4028234663852886e38)
# Tiles of the statistics by bytes of a logit: what the row statistics of sharded logits were found to like best.
STATISTICS = {
    2: dict(DEPTH=4, LANES=1024, STAGES=3, num_warps=4),
    4: dict(DEPTH=8, LANES=1024, STAGES=1, num_warps=8),
}
GRADIENT_BLOCK = 4096
SCALE_BLOCK = 4096


@triton.jit
def _tanh(x):
    # By exp(-2|x|), which cannot overflow; exact to an absolute 1e-7, on values that are multiplied by the cap.
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _effective(x, mask, softcap, inverse, HAS_CAP: tl.constexpr, HAS_T: tl.constexpr):
    """Raw logits to the logits that count, -inf where ``mask`` is false."""
    x = x.to(tl.float32)
    if HAS_CAP:
        x = softcap * _tanh(x / softcap)
    if HAS_T:
        x = x * inverse
    return tl.where(mask, x, float("-inf"))


@triton.jit
def _gather_tile(x, mask, top, total, weighted, centred, count, WEIGHTED: tl.constexpr, CENTRED: tl.constexpr):
    """Add a tile ``[DEPTH, LANES]`` to the statistics that each lane keeps."""
    new_top = tl.maximum(top, tl.max(x, 0))
    d = x - new_top[None, :]
    e = tl.exp(d)
    shift = top - new_top
    scale = tl.exp(shift)
    if WEIGHTED:
        # A weight of zero belongs to a difference of -inf or close to it: bounded, their product is 0 and not NaN.
        carried = tl.where(scale == 0.0, 0.0, weighted + total * shift)
        weighted = scale * carried + tl.sum(e * tl.maximum(d, LOWEST), 0)
    if CENTRED:
        moved = centred + tl.where(count == 0.0, 0.0, count * shift)
        centred = moved + tl.sum(tl.where(mask, d, 0.0), 0)
        count += tl.sum(mask.to(tl.float32), 0)
    total = scale * total + tl.sum(e, 0)
    return new_top, total, weighted, centred, count


@triton.jit
def _statistics_kernel(
    x_ptr, out_ptr, inverse_ptr, target_ptr, picked_ptr, rows, cols, stride, softcap, column, seen,
    HAS_CAP: tl.constexpr, HAS_T: tl.constexpr, WEIGHTED: tl.constexpr, CENTRED: tl.constexpr, PICK: tl.constexpr,
    CARRY: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = x_ptr + row * stride
    inverse = 1.0
    if HAS_T:
        inverse = tl.load(inverse_ptr + row)
    # Every lane has a maximum and sums of its own until the end: nothing crosses lanes in the loop. The maximum starts
    # at the lowest finite number, so that differences to it are defined.
    top = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    centred = tl.zeros([LANES], tl.float32)
    count = tl.zeros([LANES], tl.float32)
    TILE: tl.constexpr = DEPTH * LANES
    tile = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = cols // TILE * TILE
    for first in tl.range(0, whole, TILE, num_stages=STAGES):
        x = _effective(tl.load(base + first + tile), tile >= 0, softcap, inverse, HAS_CAP, HAS_T)
        top, total, weighted, centred, count = _gather_tile(
            x, tile >= 0, top, total, weighted, centred, count, WEIGHTED, CENTRED
        )
    if whole < cols:
        mask = whole + tile < cols
        x = tl.load(base + whole + tile, mask=mask, other=0.0)
        x = _effective(x, mask, softcap, inverse, HAS_CAP, HAS_T)
        top, total, weighted, centred, count = _gather_tile(
            x, mask, top, total, weighted, centred, count, WEIGHTED, CENTRED
        )
    lanes = top
    top = tl.max(lanes, 0)
    shift = lanes - top
    scale = tl.exp(shift)
    s = tl.sum(total * scale, 0)
    w = 0.0
    z = 0.0
    if WEIGHTED:
        w = tl.sum(tl.where(scale == 0.0, 0.0, scale * (weighted + total * shift)), 0)
    if CENTRED:
        z = tl.sum(centred + tl.where(count == 0.0, 0.0, count * shift), 0)
    # A row of -inf alone has no maximum.
    top = tl.where(s == 0.0, float("-inf"), top)
    if CARRY:
        # Merge with the columns seen before, as State.merged does.
        old_top = tl.load(out_ptr + row)
        old_s = tl.load(out_ptr + rows + row)
        new_top = tl.maximum(old_top, top)
        shift = tl.where(s == 0.0, 0.0, top - new_top)
        old_shift = tl.where(old_s == 0.0, 0.0, old_top - new_top)
        scale = tl.where(s == 0.0, 0.0, tl.exp(shift))
        old_scale = tl.where(old_s == 0.0, 0.0, tl.exp(old_shift))
        if WEIGHTED:
            old_w = tl.load(out_ptr + 2 * rows + row)
            w = scale * tl.where(scale == 0.0, 0.0, w + s * shift)
            w += old_scale * tl.where(old_scale == 0.0, 0.0, old_w + old_s * old_shift)
        if CENTRED:
            z += tl.load(out_ptr + 3 * rows + row) + seen * (old_top - new_top) + cols * (top - new_top)
        s = scale * s + old_scale * old_s
        top = new_top
    tl.store(out_ptr + row, top)
    tl.store(out_ptr + rows + row, s)
    if WEIGHTED:
        tl.store(out_ptr + 2 * rows + row, w)
    if CENTRED:
        tl.store(out_ptr + 3 * rows + row, z)
    if PICK:
        target = tl.load(target_ptr + row) - column
        hit = (target >= 0) & (target < cols)
        x = tl.load(base + target, mask=hit, other=0.0).to(tl.float32)
        if HAS_CAP:
            x = softcap * _tanh(x / softcap)
        if HAS_T:
            x = x * inverse
        tl.store(picked_ptr + row, x, mask=hit)


@triton.jit
def _gradient_kernel(
    out_ptr, x_ptr, inverse_ptr, top_ptr, log_total_ptr, a_ptr, b_ptr, c_ptr, d_ptr, target_ptr,
    cols, x_stride, out_stride, softcap,
    HAS_CAP: tl.constexpr, HAS_T: tl.constexpr, HAS_A: tl.constexpr, HAS_C: tl.constexpr, HAS_D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < cols
    z = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    top = tl.load(top_ptr + row)
    log_total = tl.load(log_total_ptr + row)
    slope = 1.0
    x = z
    if HAS_CAP:
        t = _tanh(z / softcap)
        x = softcap * t
        slope = 1.0 - t * t
    if HAS_T:
        inverse = tl.load(inverse_ptr + row)
        x = x * inverse
        slope = slope * inverse
    lp = (x - top) - log_total
    p = tl.exp(lp)
    grad = p * tl.load(b_ptr + row)
    if HAS_C:
        grad += tl.where(p > 0.0, p * lp, 0.0) * tl.load(c_ptr + row)
    if HAS_D:
        grad += tl.load(d_ptr + row)
    if HAS_A:
        target = tl.load(target_ptr + row)
        grad += tl.where(offsets == target, tl.load(a_ptr + row), 0.0)
    if HAS_CAP or HAS_T:
        grad = grad * slope
    tl.store(out_ptr + row * out_stride + offsets, grad.to(out_ptr.dtype.element_ty), mask=mask)


def row_statistics(
    logits: torch.Tensor, softcap: float, inverse: torch.Tensor | None, weighted: bool, centred: bool,
    table: torch.Tensor, seen: int, target: torch.Tensor | None = None, column: int = 0,
    picked: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Maximum, sum of exponentials, weighted and centred sum of ``logits`` ``[n, v]`` into ``table`` (fp32 ``[4, n]``).

    Args:
        seen: columns that ``table`` holds the statistics of already; they are merged. The last two rows of ``table``
            are left alone unless wanted.
        target: ``[n]`` int64 ids; where ``target - column`` lies in the block its logit goes to ``picked`` (``[n]``).
    """
    n, v = logits.shape
    _statistics_kernel[(n,)](
        logits, table, table if inverse is None else inverse, table if target is None else target,
        table if picked is None else picked, n, v, logits.stride(0), softcap, column, float(seen),
        HAS_CAP=softcap != 0.0, HAS_T=inverse is not None, WEIGHTED=weighted, CENTRED=centred,
        PICK=target is not None, CARRY=seen > 0,
        **STATISTICS[logits.element_size()],
    )  # fmt: skip


def row_gradient(
    out: torch.Tensor, logits: torch.Tensor, softcap: float, inverse: torch.Tensor | None, co: Coefficients
) -> None:
    """Write the row gradient of ``logits`` ``[n, v]`` to ``out`` (it may be the same tensor)."""
    n, v = logits.shape
    block = min(GRADIENT_BLOCK, max(16, triton.next_power_of_2(v)))

    def given(part: torch.Tensor | None) -> torch.Tensor:
        return co.top if part is None else part

    _gradient_kernel[(n, triton.cdiv(v, block))](
        out, logits, given(inverse), co.top, co.log_total, given(co.a), co.b, given(co.c), given(co.d),
        given(co.target), v, logits.stride(0), out.stride(0), softcap,
        HAS_CAP=softcap != 0.0, HAS_T=inverse is not None, HAS_A=co.a is not None, HAS_C=co.c is not None,
        HAS_D=co.d is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _scale_kernel(out_ptr, x_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    x = tl.load(x_ptr + offsets, mask=mask) * tl.load(factor_ptr)
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=mask)


def scale_into(out: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> None:
    """``out = factor * x`` of contiguous fp32 ``x`` and a one-element fp32 ``factor``, rounded once to ``out``'s dtype.

    PyTorch's ``mul`` into another dtype converts element by element, at a third of the bandwidth.
    """
    count = x.numel()
    _scale_kernel[(triton.cdiv(count, SCALE_BLOCK),)](out, x, factor, count, BLOCK=SCALE_BLOCK, num_warps=4)
