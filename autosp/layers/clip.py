"""The norm of all gradients, those of sharded rows included, in torch's own functions and in `clip_grad_norm_`.

Each rank has its own rows of the gradients of a vocabulary-parallel head. A norm of what a rank has is another number
on each rank; ranks that clip by it scale the weights that all of them hold differently, and nothing raises. So torch's
norm learns of the rows that this process knows to be sharded (`registry`), and of nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..custom_ops._library import process_group
from ..errors import InternalError
from .registry import gradient_groups, key


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip the gradients of a model with vocabulary-parallel layers by their norm, as
    ``torch.nn.utils.clip_grad_norm_`` clips those of the dense model.

    ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` does the same. Collective over the tensor-parallel
    group. Every row of a sharded parameter counts once, every other gradient (the same on all ranks of the group) once;
    all ranks scale by the same number.

    Args:
        model: the model.
        max_norm: the largest norm; larger ones are scaled down to it.
        norm_type: p of the p-norm, ``inf`` for the maximum.

    Returns:
        The norm before clipping, the same on every rank.
    """
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


def install() -> None:
    """Teach ``torch.nn.utils``'s ``get_total_norm`` and ``clip_grad_norm_`` of sharded rows, once a process.

    Both come down to one function, which torch has no hook for; what it calls inside is exchanged, so that names that
    a program imported before are served too. The place was checked on torch 2.11 to 2.14.

    Raises:
        InternalError: torch's function is not made as it was.
    """
    public = torch.nn.utils.get_total_norm
    cells = dict(zip(public.__code__.co_freevars, public.__closure__ or (), strict=True))
    if "func" not in cells or not callable(cells["func"].cell_contents):
        raise InternalError(
            f"torch.nn.utils.get_total_norm of torch {torch.__version__} is not made as autosp knows it, so gradients "
            "of a vocabulary-parallel head would be clipped wrongly; use torch 2.11 to 2.14"
        )
    original = cells["func"].cell_contents
    if not hasattr(original, "_counts_sharded_rows"):
        counting = torch.compiler.disable(_counting_sharded_rows(original), reason="autosp counts sharded rows")
        counting._counts_sharded_rows = True
        cells["func"].cell_contents = counting


def _counting_sharded_rows(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def get_total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        groups = gradient_groups()
        # In the order of the list, which is the same on all ranks: the order of the collectives.
        rows: dict[str, list[torch.Tensor]] = {}
        for tensor in tensors:
            if group := groups.get(key(tensor)):
                rows.setdefault(group, []).append(tensor)
        if not rows:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        others = [tensor for tensor in tensors if key(tensor) not in groups]
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
        device, p = tensors[0].device, float(norm_type)
        parts = [_norm_over_group(part, p, dtype, group).to(device) for group, part in rows.items()]
        if others:
            parts.append(_whole(original(others, p, False, foreach)).to(device, dtype))
        total = _joined(torch.stack(parts), p)
        if error_if_nonfinite:
            original([total], p, True, False)  # raises what torch raises
        return total

    return get_total_norm


def _norm_over_group(grads: list[torch.Tensor], p: float, dtype: torch.dtype, group: str) -> torch.Tensor:
    """The norm of some gradients, all of their rows on all ranks of the group counted: a number of ``dtype``."""
    device = grads[0].device
    empty = 0.0 if p >= 0 else float("inf")  # what a shard without rows adds to a norm
    norms = [
        _whole(torch.linalg.vector_norm(grad, p, dtype=torch.promote_types(grad.dtype, torch.float32)))
        if grad.numel()
        else torch.tensor(empty)
        for grad in grads
    ]
    own = torch.stack([norm.to(device, dtype) for norm in norms])
    members = process_group(group)
    parts = [torch.empty_like(own) for _ in range(members.size())]
    dist.all_gather(parts, own, group=members)
    return torch.linalg.vector_norm(_joined(torch.stack(parts), p), p)


def _joined(norms: torch.Tensor, p: float) -> torch.Tensor:
    """The norm of tensors whose parts have these, along dimension 0."""
    return norms.sum(0) if p == 0 else torch.linalg.vector_norm(norms, p, dim=0)


def _whole(value: Any) -> torch.Tensor:
    """The norm of DTensors (FSDP2 over data parallelism) is one itself; gathered it is a number."""
    return value.full_tensor() if isinstance(value, DTensor) else value
