"""``linear`` and ``cross_entropy`` as one operator of the graph, before it is known on which rank its tokens are.

The operator stands for a whole computation, ``cross_entropy(softcap(linear(hidden, weight, bias)), target)``, and is
made by a pass. Its rule runs ``linear_cross_entropy_sum`` on each rank's tokens; run as it is, on whole tensors, it
gives the same loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import define, group_rank, group_size
from .vocab_linear import chunk_bounds

MEAN, SUM = 1, 2


def local_sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    softcap: float,
    *,
    memory: str = "auto",
    size: int = 0,
    group: str = "",
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of these tokens and their number, as ``linear_cross_entropy_sum`` gives them; softcap 0 is
    none. With a group, ``weight`` and ``bias`` are this rank's rows of a vocabulary of ``size``.
    """
    from .linear_loss import linear_cross_entropy_sum

    start, end = chunk_bounds(size, group_size(group), group_rank(group)) if group else (None, None)

    return linear_cross_entropy_sum(
        hidden,
        weight,
        target,
        bias=bias,
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        softcap=None if softcap == 0 else softcap,
        memory=memory,
        tp_group=group or None,
        vocab_start_index=start,
        vocab_end_index=end,
    )


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _run(hidden, weight, bias, target, reduction, ignore_index, smoothing, softcap, dtype, **options):
    total, count = local_sums(hidden, weight, bias, target, ignore_index, smoothing, softcap, **options)
    from .linear_loss.cross_entropy import mean_of

    return (mean_of(total, count) if reduction == MEAN else total).to(dtype)


linear_cross_entropy_loss = define(
    "linear_cross_entropy_loss(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, int reduction, "
    "int ignore_index, float label_smoothing, float softcap, ScalarType dtype, *, "
    'str memory="auto", int size=0, str group="") -> Tensor',
    forward=_run,
    fake=lambda hidden, *args, **_: hidden.new_empty((), dtype=args[-1]),
    autograd=_run,
)
linear_cross_entropy_sums = define(
    "linear_cross_entropy_sums(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, int ignore_index, "
    'float label_smoothing, float softcap, *, str memory="auto", int size=0, str group="") -> (Tensor, Tensor)',
    forward=local_sums,
    fake=lambda hidden, *args, **_: (
        hidden.new_empty((), dtype=_wide(hidden)),
        hidden.new_empty((), dtype=torch.float32),
    ),
    autograd=local_sums,
)
linear_cross_entropy_loss.__doc__ = """Cross entropy of a linear head, without its logits.

``hidden`` is ``[tokens, width]``, ``weight`` ``[vocabulary, width]``, ``bias`` ``[vocabulary]`` or None, ``target`` int
``[tokens]``. ``reduction`` is 1 (mean over the targets that are not ``ignore_index``) or 2 (sum); ``softcap`` c > 0
bounds the logits as ``c * tanh(x / c)``. The result is a scalar of ``dtype``. ``memory``
is that of ``vocab_parallel_linear_cross_entropy``. With a ``group``, ``weight`` and ``bias`` are this rank's rows of a
vocabulary of ``size`` ids, as ``vocab_linear`` has them.
"""
