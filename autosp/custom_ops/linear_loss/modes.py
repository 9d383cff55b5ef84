"""Modes around the operators: autocast is decided once, by the public functions, and a second derivative is refused."""

from __future__ import annotations

import torch

from autosp.errors import InputError


def without_autocast(tensor: torch.Tensor) -> torch.autocast:
    """A context in which autocast is off for ``tensor``'s device."""
    return torch.autocast(tensor.device.type, enabled=False)


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
