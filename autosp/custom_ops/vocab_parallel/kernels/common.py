"""What the kernels share: the soft cap, the scaling arguments and the launch context.

Kernels work in base 2: ``exp(k d) = exp2(d * k log2(e))``, so a temperature costs nothing. A running maximum starts at
the lowest finite number, not at -inf: differences to it are then defined, and a row without a finite value shows as a
sum of 0. A row's result depends on its own values and on the block sizes alone, which depend on the operator and the
dtype, never on the number of rows: results are deterministic and batch-invariant.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

_HERE = contextlib.nullcontext()
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def capped(x, softcap, SOFTCAP: tl.constexpr):
    """``softcap * tanh(x / softcap)`` in float32, by a series near 0 where the exponential form cancels."""
    if SOFTCAP:
        y = x * (1.0 / softcap)
        t = tl.exp2(tl.abs(y) * (-2.0 * LOG2E))
        y2 = y * y
        series = tl.abs(y) * (1.0 - y2 * (1.0 / 3.0) + y2 * y2 * (2.0 / 15.0))
        tanh = tl.where(y2 < 0.01, series, (1.0 - t) * (1.0 / (1.0 + t)))
        x = softcap * tl.where(y < 0, -tanh, tanh)
    return x


@triton.jit
def cap_slope(x, softcap):
    """``1 - tanh(x / softcap)^2 = 4 t / (1 + t)^2`` with ``t = exp(-2 |x / softcap|)``: no cancellation."""
    t = tl.exp2(tl.abs(x * (1.0 / softcap)) * (-2.0 * LOG2E))
    r = 1.0 / (1.0 + t)
    return 4.0 * t * r * r


@triton.jit
def weighted(weight, value):
    """``weight * value`` where the weight is not zero; a NaN weight stays NaN."""
    return tl.where(weight == 0.0, 0.0, weight * value)


@triton.jit
def log2_of(x, FAST: tl.constexpr):
    """``log2(x)``: the hardware's instruction (absolute error 2**-22 near 1, and exactly 0 at 1) where FAST."""
    if FAST:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def row_inverse(inverse_ptr, inverse, row, PER_ROW: tl.constexpr):
    """Inverse temperature of one row."""
    if PER_ROW:
        return tl.load(inverse_ptr + row)
    else:
        return inverse


@triton.jit
def block_inverse(inverse_ptr, inverse, row, live, PER_ROW: tl.constexpr):
    """Inverse temperatures of a block of rows."""
    if PER_ROW:
        return tl.load(inverse_ptr + row, mask=live, other=1.0)
    else:
        return tl.zeros(row.shape, tl.float32) + inverse


@triton.jit
def lane_start(pointer, unknown, VECTORS: tl.constexpr):
    """The start of a row; ``unknown`` (always 0) hides its alignment where loads must not be vectors."""
    if not VECTORS:
        pointer = pointer + unknown
    return pointer


@triton.jit
def row_offset(row, inner, outer_stride, inner_stride):
    """Element offset of a row in 64 bits: rows x vocabulary passes 2**31."""
    row = row.to(tl.int64)
    return (row // inner) * outer_stride + (row % inner) * inner_stride


def on_device_of(tensor: torch.Tensor):
    """Launch where ``tensor`` lives, whatever the current device is."""
    device = tensor.device
    if device.type == "cpu" or device.index == torch.accelerator.current_device_index():
        return _HERE
    return getattr(torch, device.type).device(device)


def hardware_log2(tensor: torch.Tensor) -> bool:
    """Whether the device has a log2 instruction that Triton exposes: CUDA has, the interpreter and others have not."""
    return tensor.is_cuda and torch.version.hip is None


def pointer_or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A kernel argument for an optional tensor: ``other`` where there is none (the kernel does not touch it then)."""
    return other if tensor is None else tensor
