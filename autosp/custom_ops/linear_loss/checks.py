"""Checks of the arguments of the public functions. Every one raises before anything is computed or changed."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autosp.errors import InputError

from ..forward_mode import refuse_tangent
from .modes import compute_dtype

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
REDUCTIONS = ("none", "sum", "mean")
MEMORY = ("auto", "fast", "lean")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")


def number(name: str, value: object, low: float, high: float, inclusive: bool = True) -> None:
    """``value`` is a real number in ``[low, high]``, or above ``low`` when not ``inclusive``."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not (low <= value <= high) or (not inclusive and value == low):
        bracket = "[" if inclusive else "("
        raise InputError(f"{name} is {value!r}; allowed is a number in {bracket}{low}, {high}]")


def whole(name: str, value: object) -> None:
    """``value`` is an integer (numpy's too), and no bool."""
    if isinstance(value, bool) or not isinstance(value, (int, numbers.Integral)):
        raise InputError(f"{name} is {value!r}; allowed is an integer")


def head(hidden: Tensor, weight: Tensor, bias: Tensor | None, side: str = "") -> torch.dtype:
    """Check hidden ``[..., H]``, weight ``[V, H]`` and bias ``[V]``; return the compute dtype of the GEMMs."""
    for name, tensor in ((f"{side}hidden", hidden), (f"{side}weight", weight), (f"{side}bias", bias)):
        if tensor is None and name.endswith("bias"):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}; a tensor is needed")
        if isinstance(tensor, DTensor):
            raise InputError(
                f"{name} is a DTensor {tensor.placements}; pass the part of this rank (.to_local(), with tp_group "
                "where the vocabulary is sharded), or the whole (.full_tensor())"
            )
        if tensor.dtype not in _FLOATS:
            raise InputError(f"{name} is {tensor.dtype}; allowed are float16, bfloat16, float32 and float64")
        if tensor.device != hidden.device:
            raise InputError(f"{name} is on {tensor.device}, {side}hidden on {hidden.device}; move them to one device")
        refuse_tangent(name, tensor)
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise InputError(
            f"{side}hidden has shape {tuple(hidden.shape)} and {side}weight {tuple(weight.shape)}; needed are "
            "[..., H] and [V_local, H] (the layout of nn.Linear.weight) with the same H"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise InputError(
            f"{side}bias has shape {tuple(bias.shape)}; needed is [{weight.shape[0]}], one a row of weight"
        )
    dtype = compute_dtype(hidden)
    dtypes = [t.dtype for t in (hidden, weight, bias) if t is not None]
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(hidden.device.type):
        raise InputError(
            f"{side}hidden, weight and bias have dtypes {[str(d) for d in dtypes]}; cast them to one dtype, or run "
            "under torch.autocast"
        )
    if len(set(dtypes)) > 1 and torch.float64 in dtypes:
        raise InputError(f"{side}hidden, weight and bias mix float64 with another dtype ({[str(d) for d in dtypes]})")
    return dtype


def target(value: Tensor, hidden: Tensor, top_k: bool = False) -> None:
    """``value`` holds integer ids, one a token; with ``top_k`` a further trailing dimension is allowed."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _INTEGERS:
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"target is {got}; needed is a tensor of token ids of an integer dtype (int64)")
    if value.device != hidden.device:
        raise InputError(f"target is on {value.device}, hidden on {hidden.device}; move them to one device")
    lead = tuple(hidden.shape[:-1])
    if tuple(value.shape) != lead and not (top_k and tuple(value.shape[:-1]) == lead and value.dim() == len(lead) + 1):
        extra = " (or that with a trailing top-k dimension)" if top_k else ""
        raise InputError(
            f"target has shape {tuple(value.shape)}; needed is {lead}{extra}, the shape of hidden without its "
            "last dimension"
        )


def bounds(start: int | None, end: int | None, rows: int) -> tuple[int, int]:
    """The vocabulary bounds, ``(-1, -1)`` when none are given; ``rows`` of the weight may exceed them (padding)."""
    if (start is None) != (end is None):
        raise InputError(
            f"vocab_start_index is {start} and vocab_end_index is {end}; give both bounds of this rank's "
            "shard, or neither"
        )
    if start is None or end is None:
        return -1, -1
    whole("vocab_start_index", start)
    whole("vocab_end_index", end)
    if not 0 <= start <= end or end - start > rows:
        raise InputError(
            f"vocabulary bounds [{start}, {end}) do not fit a weight of {rows} rows; needed is 0 <= start <= end and "
            "end - start <= rows (rows beyond it are padding)"
        )
    return start, end


def chunk(chunk_size: int | None) -> int:
    if chunk_size is None:
        return 0
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size <= 0:
        raise InputError(
            f"chunk_size is {chunk_size!r}; allowed is a positive number of tokens, or None for the default"
        )
    return chunk_size


def softcap(value: float | None, name: str = "softcap") -> float:
    if value is None:
        return 0.0
    number(name, value, 0.0, float("inf"), inclusive=False)
    return float(value)


def temperature(value: float | Tensor, hidden: Tensor) -> Tensor | None:
    """``None`` for 1, else a fp32 (fp64 for fp64) tensor ``[1]`` or ``[N]``."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if not isinstance(value, torch.Tensor):
        number("temperature", value, 0.0, float("inf"), inclusive=False)
        return None if value == 1 else torch.full((1,), float(value), dtype=wide, device=hidden.device)
    lead = tuple(hidden.shape[:-1])
    if tuple(value.shape) not in (lead, ()) and value.numel() != 1:
        raise InputError(f"temperature has shape {tuple(value.shape)}; needed is a number or one a token, {lead}")
    if value.requires_grad:
        raise InputError("temperature requires a gradient, which these losses do not give; detach it")
    return value.to(device=hidden.device, dtype=wide).reshape(-1)


def mask(value: Tensor | None, hidden: Tensor) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.dtype != torch.bool or value.shape != hidden.shape[:-1]:
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(
            f"mask is {got}; needed is a bool tensor of shape {tuple(hidden.shape[:-1])}, True where it counts"
        )
    return value.reshape(-1)


def main_grad(value: Tensor | bool | None, weight: Tensor) -> Tensor | None:
    """The buffer itself, ``weight.main_grad`` for ``True``, ``None`` for ``None`` or ``False``."""
    if value is None or value is False:
        return None
    if value is True:
        value = getattr(weight, "main_grad", None)
        if value is None:
            raise InputError("main_grad=True, but the weight has no attribute main_grad; set it, or pass the tensor")
    if not isinstance(value, torch.Tensor):
        raise InputError(f"main_grad is {value!r}; allowed are a tensor, True (weight.main_grad) and None")
    if (
        value.dtype != torch.float32
        or value.shape != weight.shape
        or value.device != weight.device
        or value.requires_grad
        or not value.is_contiguous()
    ):
        raise InputError(
            f"main_grad is {value.dtype} {tuple(value.shape)} on {value.device} (requires_grad={value.requires_grad}); "
            f"needed is a contiguous float32 tensor of shape {tuple(weight.shape)} on {weight.device}, no requires_grad"
        )
    return value
