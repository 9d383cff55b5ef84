"""Forward-mode differentiation, which no operator here has: it is refused where inputs are checked."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ..errors import InputError


def refuse_tangent(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that carries a tangent; costs under 1 us.

    An operator of torch.library without a forward-mode formula drops the tangent of an input that requires no gradient:
    its derivative would be 0, silently.

    Args:
        name: the argument's name, for the message.
        tensor: the argument.

    Raises:
        InputError: under ``torch.func.jvp`` or in a dual level of ``torch.autograd.forward_ad``, for a dual tensor.
    """
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(tensor).tangent is not None:
        raise InputError(
            f"{name} carries a tangent of forward-mode differentiation (torch.func.jvp), which these losses do not"
            " have; use reverse mode (backward, torch.autograd.grad)."
        )
