"""Ranks of a group compare their weights: other weights on one of them would give a plausible and wrong loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from autosp.agreement import agree

if TYPE_CHECKING:
    from autosp.mesh import AutoSPState

_FLOATS_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_weights(state: AutoSPState, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare names, shapes, dtypes and a checksum of the values over ``state.check_ranks``, each tensor once.

    A tensor that was compared before is left out: rounding may set the weights of ranks apart in the course of a run.
    Collective where there are others: the ranks of the group must then call it alike.

    Args:
        state: as `autosp.initialize` returns it.
        tensors: by name. Of a tensor of which this rank holds a part, such as a DTensor, shape and dtype are compared.

    Raises:
        RankMismatchError: on every rank, with the names of the tensors that differ.
    """
    if state.check_group is None:
        return
    new = {name: tensor for name, tensor in tensors.items() if tensor not in state.compared}
    if not new:
        return
    texts = {name: f"{tuple(tensor.shape)} {tensor.dtype} {_checksum(tensor)}" for name, tensor in new.items()}
    agree(state, "model", {name: text.encode() for name, text in texts.items()})
    for tensor in new.values():
        state.compared[tensor] = None


def _checksum(tensor: torch.Tensor) -> int | None:
    """Sum of a plain tensor's bit patterns; None where there are no values here or they are one rank's part of them.

    Integer sums do not depend on the order, hence not on a rank's number of threads, as floating-point ones would.
    """
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.device.type == "meta":
        return None
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.dtype == torch.bool or not values.is_floating_point():
        return int(values.sum(dtype=torch.int64))
    return int(values.contiguous().view(_FLOATS_AS_INTEGERS[values.element_size()]).sum(dtype=torch.int64))
