"""Padding rows that stay finite wherever real rows do."""

from __future__ import annotations

import torch

from .placement import IntLike


def pad_rows(x: torch.Tensor, before: IntLike, after: IntLike) -> torch.Tensor:
    """``x`` with copies of its first row in front and of its last row behind, along dimension 0.

    Zeros would do for the values, which nobody reads, but not for the gradients: an operator that is infinite at zero
    gives a padding row the gradient zero times infinity. The gradient of the copies is zero and adds nothing to the
    row copied.
    """
    rows = x.shape[0]
    index = (torch.arange(before + rows + after, device=x.device) - before).clamp(0, rows - 1)
    return x.index_select(0, index)
