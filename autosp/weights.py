"""Ranks of a group compare their weights: other weights on one of them would give a plausible and wrong loss.

Values are compared once, when a weight is first used. Later, rounding may set ranks apart, so one weight is watched:
how far it has moved must be the same on all ranks. Where nothing, or the wrong group, reduces gradients, it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from autosp.agreement import agree
from autosp.errors import RankMismatchError

if TYPE_CHECKING:
    from autosp.mesh import AutoSPState

_WATCHED_VALUES = 256
# Ranks that take part in one reduction move alike but for rounding; those that do not differ by as much as they move.
_SAME_MOVE = 0.05
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


@dataclass
class Watched:
    """A weight as it was at its first use, some values in fp64 on the host, and how often it was used since."""

    values: torch.Tensor
    uses: int = 0


def choose_watched(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the weight to watch: the smallest that is trained and has enough values, or else the largest."""
    sizes = {name: t.numel() for name, t in tensors if t.requires_grad and t.is_floating_point() and _is_plain(t)}
    enough = {name: size for name, size in sizes.items() if size >= _WATCHED_VALUES}
    if enough:
        return min(enough, key=lambda name: enough[name])
    return max(sizes, key=lambda name: sizes[name], default=None)


def check_drift(state: AutoSPState, name: str, tensor: torch.Tensor) -> None:
    """Compare over ``state.check_ranks`` how far a weight has moved since its first use: at use 1, 2, 4, 8, ...

    Collective: the ranks of the group must call it alike.

    Raises:
        RankMismatchError: on every rank, if the ranks' weights have moved differently by more than rounding.
    """
    if state.check_group is None:
        return
    start = state.compared.get(tensor)
    if start is None:
        state.compared[tensor] = Watched(_some_values(tensor))
        return
    start.uses += 1
    if start.uses & (start.uses - 1):
        return
    agree(state, "drift", name.encode())  # another rank may be elsewhere: what follows needs all of them here
    moved = _some_values(tensor) - start.values
    everyone = [torch.empty_like(moved) for _ in state.check_ranks]
    dist.all_gather(everyone, moved, group=state.check_group)
    far = max(one.abs().max().item() for one in everyone)
    apart = max((one - everyone[0]).abs().max().item() for one in everyone)
    rounding = 4 * torch.finfo(tensor.dtype).eps * start.values.abs().max().item()
    if apart > _SAME_MOVE * far + rounding:
        raise RankMismatchError(
            f"the weights of the sequence group {list(state.check_ranks)} drift apart: since the first step {name} has "
            f"moved by up to {far:.2g}, and differently on its ranks by up to {apart:.2g}. Gradients are not reduced "
            f"over the group, with gradient_reduction {state.config.gradient_reduction!r}. That is right with no "
            "engine for 'graph'; 'engine_mean' needs an engine that averages over all ranks, data and sequence "
            "parallel together: use autosp.integrations, which set it"
        )


def _some_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:_WATCHED_VALUES].to("cpu", torch.float64)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether this rank holds the values of the whole tensor."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return is_plain and tensor.device.type != "meta"


def _checksum(tensor: torch.Tensor) -> int | None:
    """Sum of a plain tensor's bit patterns; None where there are no values here or they are one rank's part of them.

    Integer sums do not depend on the order, hence not on a rank's number of threads, as floating-point ones would.
    """
    if not _is_plain(tensor):
        return None
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.dtype == torch.bool or not values.is_floating_point():
        return int(values.sum(dtype=torch.int64))
    return int(values.contiguous().view(_FLOATS_AS_INTEGERS[values.element_size()]).sum(dtype=torch.int64))
