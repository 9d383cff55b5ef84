"""Matrix products of the fused losses: 16-bit operands, fp32 accumulation, fp32 results where it matters.

Whether a device multiplies 16-bit matrices into an fp32 result is asked of the dispatcher, never tried and caught: a
real failure such as out of memory must surface as itself. Where the device does not register it, operands are widened a
slab at a time, which gives the same numbers.
"""

from __future__ import annotations

import torch

_SLAB = 1 << 22
_HALVES = (torch.bfloat16, torch.float16)


def has_mixed_gemm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``mm`` and ``addmm`` of 16-bit ``dtype`` into fp32 are registered for ``device``."""
    if dtype not in _HALVES or device.type == "cpu" or torch.version.hip is not None:
        return False
    key = "CUDA" if device.type == "cuda" else device.type.upper()
    try:
        return all(
            torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
            for name in ("aten::mm.dtype_out", "aten::addmm.dtype_out")
        )
    except RuntimeError:
        # The dispatcher does not know the key: no such backend in this build, hence no such kernel.
        return False


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64, everything else accumulates in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logits_dtype(device: torch.device, dtype: torch.dtype, has_bias: bool) -> torch.dtype:
    """The dtype in which a block of logits is kept.

    16-bit where the GEMM accumulates in fp32 and rounds once; fp32 otherwise, and for fp16 with a bias, whose product
    alone may overflow although the sum is small.
    """
    if dtype not in _HALVES:
        return dtype
    if not has_mixed_gemm(device, dtype) or (has_bias and dtype == torch.float16):
        return torch.float32
    return dtype


def logits_into(out: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """``out[n, v] = hidden[n, H] @ weight[v, H].T + bias[v]``, rounded once to ``out``'s dtype."""
    if out.numel() == 0:
        return
    if out.dtype == hidden.dtype:
        if bias is None:
            torch.mm(hidden, weight.t(), out=out)
        else:
            torch.addmm(bias.to(out.dtype), hidden, weight.t(), out=out)
        return
    matmul_into(out, hidden, weight.t())
    if bias is not None:
        out += bias.to(out.dtype)


def matmul_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, accumulate: bool = False) -> None:
    """``out (+)= a[m, k] @ b[k, n]``, accumulated in fp32 at least and rounded once to ``out``'s dtype."""
    if out.numel() == 0:
        return
    if a.shape[1] == 0:
        if not accumulate:
            out.zero_()
        return
    if a.dtype == out.dtype and (a.dtype not in _HALVES or has_mixed_gemm(a.device, a.dtype)):
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    elif out.dtype == torch.float32 and has_mixed_gemm(a.device, a.dtype):
        if accumulate:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        _matmul_by_slabs(out, a, b, accumulate)


def _matmul_by_slabs(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, accumulate: bool) -> None:
    """The same with widened copies of a bounded size: columns of ``b``, then rows of ``a``."""
    wide = accumulator_dtype(out.dtype)
    depth = a.shape[1]
    step = max(1, _SLAB // max(1, depth))
    for m in range(0, a.shape[0], step):
        rows = a[m : m + step].to(wide)
        for n in range(0, b.shape[1], step):
            part = rows @ b[:, n : n + step].to(wide)
            target = out[m : m + step, n : n + step]
            target.copy_(part + target if accumulate else part)
