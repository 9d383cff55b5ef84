"""First derivatives only: what keeps a second backward through a gradient operator from passing as zero."""

from __future__ import annotations

import torch

from ...errors import UnsupportedGraphError


class _FirstDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient, *_sources):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise UnsupportedGraphError(
            "the gradient of a vocabulary-parallel loss cannot be differentiated again",
            operator="autosp vocabulary-parallel backward",
            remedy="use the plain PyTorch formula for second derivatives, or detach the first gradient.",
        )


def first_derivative(gradient: torch.Tensor | None, *sources: torch.Tensor | None) -> torch.Tensor | None:
    """``gradient``, made from ``sources``, as it is; under ``create_graph=True`` differentiating it is an error.

    Raises:
        UnsupportedGraphError: later, when a backward reaches the gradient.
    """
    if gradient is None or not torch.is_grad_enabled():
        return gradient
    return _FirstDerivative.apply(gradient, *sources)
