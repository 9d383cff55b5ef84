"""Modes around the operators: autocast is decided once, by the public functions, and a second derivative is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autosp.errors import InputError


@contextlib.contextmanager
def exact_products(tensor: torch.Tensor) -> Iterator[None]:
    """Inside it ``tensor``'s device does no autocast, and its 16-bit GEMMs sum in fp32 also when they split K."""
    with torch.autocast(tensor.device.type, enabled=False):
        if tensor.device.type == "cuda":
            with fp32_reductions():
                yield
        else:
            yield


@contextlib.contextmanager
def fp32_reductions() -> Iterator[None]:
    """Forbid cuBLAS to add partial sums in 16 bit, and restore the caller's settings."""
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    # Where torch has a second setting for split-K, assigning a plain bool to the first would reset it.
    before = [(getattr(matmul, name), getattr(matmul, f"{name}_split_k", True)) for name in names]
    try:
        for name, (_, split_k) in zip(names, before, strict=True):
            setattr(matmul, name, False if split_k else (False, False))
        yield
    finally:
        for name, (allowed, split_k) in zip(names, before, strict=True):
            setattr(matmul, name, allowed if split_k else (allowed, False))


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype that ``F.linear`` would multiply in: autocast's for 16- and 32-bit inputs, else ``hidden``'s own."""
    kind = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def refuse_second_derivative() -> None:
    """Called in every backward: it runs with gradients enabled under ``create_graph=True`` alone.

    Raises:
        InputError: the caller wants to differentiate the gradient, which would silently miss the loss's own part.
    """
    if torch.is_grad_enabled():
        raise InputError(
            "the fused losses have no second derivative (double backward, create_graph=True); compute the loss from "
            "F.linear and F.cross_entropy where you need one"
        )
