"""Clipping by the norm of all gradients, those of sharded rows included."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ..custom_ops._library import process_group
from .sharded import vocab_sharded_parameters


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip the gradients of a model with vocabulary-parallel layers by their norm, as
    ``torch.nn.utils.clip_grad_norm_`` clips those of the dense model.

    Collective over the tensor-parallel group. Every row of a sharded parameter counts once, every other gradient (the
    same on all ranks of the group) once; all ranks scale by the same number. For gradients that are plain tensors.

    Args:
        model: the model.
        max_norm: the largest norm; larger ones are scaled down to it.
        norm_type: p of the p-norm, ``inf`` for the maximum.

    Returns:
        The norm before clipping, an fp32 number, the same on every rank.
    """
    sharded = {name: module for name, module in vocab_sharded_parameters(model).items() if module.tp_group}
    own: dict[str, list[torch.Tensor]] = {}
    whole: list[torch.Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            module = sharded.get(name)
            (own.setdefault(module.tp_group, []) if module is not None and module.tp_group else whole).append(
                parameter.grad
            )
    power = norm_type if norm_type != float("inf") else 1.0
    total = _powers(whole, norm_type, power)
    for module in sharded.values():
        own.setdefault(module.tp_group or "", [])  # a rank without rows takes part too
    is_max = norm_type == float("inf")
    for group in sorted(own):
        part = _powers(own[group], norm_type, power).to(next(model.parameters()).device)
        dist.all_reduce(part, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=process_group(group))
        total = total.to(part.device)
        total = torch.maximum(total, part) if is_max else total + part
    norm = total ** (1.0 / power)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def _powers(grads: list[torch.Tensor], norm_type: float, power: float) -> torch.Tensor:
    """The sum of p-th powers, or the maximum, of all elements."""
    if not grads:
        return torch.zeros(())
    return torch.nn.utils.get_total_norm([grad.float() for grad in grads], norm_type) ** power
