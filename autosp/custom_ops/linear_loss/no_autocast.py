"""Autocast is decided once, by the public functions; inside the operators every dtype is chosen on purpose."""

from __future__ import annotations

import torch


def without_autocast(tensor: torch.Tensor) -> torch.autocast:
    """A context in which autocast is off for ``tensor``'s device."""
    return torch.autocast(tensor.device.type, enabled=False)


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype that ``F.linear`` would multiply in: autocast's for 16- and 32-bit inputs, else ``hidden``'s own."""
    kind = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
