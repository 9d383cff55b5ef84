"""A linear head, and an embedding, whose rows are sharded over a group, as single operators with whole results.

Rank ``r`` of ``P`` holds the rows of ``torch.chunk``: those of ids ``[r * L, (r + 1) * L)`` with ``L = ceil(V / P)``,
the last shards shorter or empty. Run as they are these operators give every rank the whole result, so that a graph
which holds one is right whoever compiles it; the compiler keeps the logits of ``vocab_linear`` sharded wherever what
follows allows it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._library import define, group_rank, group_size
from .collectives import all_gather_sequence, all_reduce_sum

_c10d = torch.ops._c10d_functional


def chunk_bounds(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """First id and one past the last id of a rank's shard of ``size`` ids, as ``torch.chunk`` cuts them."""
    block = -(-size // ranks)
    start = min(size, rank * block)
    return start, min(size, start + block)


def _sum_wide(grad: Tensor, group: str) -> Tensor:
    """Sum over the group, held in fp32 for narrower dtypes: P rounding steps would not be those of one process."""
    wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
    return _c10d.wait_tensor(_c10d.all_reduce(wide.contiguous(), "sum", group)).to(grad.dtype)


class _EnterVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _sum_wide(grad, ctx.group), None


enter_vocabulary = define(
    "enter_vocabulary(Tensor(a) x, str group) -> Tensor(a)",
    forward=lambda x, group: x.view_as(x),
    fake=lambda x, group: x.view_as(x),
    autograd=lambda *args: _EnterVocabulary.apply(*args),
)
enter_vocabulary.__doc__ = """Identity; its backward sums the gradient over ``group`` in fp32.

For hidden states that are whole on every rank and meet a head of which each rank holds some rows.
"""


def _padded(rows: Tensor, size: int, group: str) -> Tensor:
    """The rows of a shard with copies of the last one behind them, so that every rank has ``ceil(size / P)``."""
    missing = -(-size // group_size(group)) - rows.shape[0]
    if missing == 0:
        return rows
    if rows.shape[0] == 0:
        return rows.sum() + rows.new_zeros(missing, *rows.shape[1:])
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])


def _local_logits(x: Tensor, weight: Tensor, bias: Tensor | None, size: int, group: str) -> Tensor:
    bias = None if bias is None else _padded(bias, size, group)
    return F.linear(enter_vocabulary(x, group), _padded(weight, size, group), bias)


def _whole_logits(x: Tensor, weight: Tensor, bias: Tensor | None, size: int, group: str) -> Tensor:
    local = _local_logits(x, weight, bias, size, group)
    return all_gather_sequence(local, local.dim() - 1, size, size, 0, 1, 1, False, group)


vocab_logits = define(
    "vocab_logits(Tensor x, Tensor weight, Tensor? bias, int size, str group) -> Tensor",
    forward=_local_logits,
    fake=lambda x, weight, bias, size, group: x.new_empty([*x.shape[:-1], -(-size // group_size(group))]),
    autograd=_local_logits,
)
vocab_logits.__doc__ = """This rank's columns ``[..., ceil(size / P)]`` of what ``vocab_linear`` gives.

Columns past its rows are copies of the last one. The gradient of ``x`` is summed over the group in fp32; those of
``weight`` and ``bias`` are this rank's own.
"""
vocab_linear = define(
    "vocab_linear(Tensor x, Tensor weight, Tensor? bias, int size, str group) -> Tensor",
    forward=_whole_logits,
    fake=lambda x, weight, bias, size, group: x.new_empty([*x.shape[:-1], size]),
    autograd=_whole_logits,
)
vocab_linear.__doc__ = """``x @ W.T + b`` where each rank of ``group`` holds some rows of W and b; the whole result.

``x`` is ``[..., width]`` and the same on every rank, ``weight`` ``[rows, width]``, ``bias`` ``[rows]`` or None, the
result ``[..., size]``.
"""


def _embedding(ids: Tensor, weight: Tensor, size: int, padding_idx: int, group: str) -> Tensor:
    start, end = chunk_bounds(size, group_size(group), group_rank(group))
    mine = ((ids >= start) & (ids < end)).unsqueeze(-1)
    if weight.shape[0] == 0:
        rows = weight.sum() + weight.new_zeros(*ids.shape, weight.shape[1])
    else:
        local_padding = padding_idx - start if start <= padding_idx < end else None
        rows = F.embedding((ids - start).clamp(0, weight.shape[0] - 1), weight, padding_idx=local_padding)
    rows = torch.where(mine, rows, torch.zeros_like(rows))
    exists = ((ids >= 0) & (ids < size)).unsqueeze(-1)
    # Nobody's id would be a sum of zeros: NaN, never a plausible number.
    return all_reduce_sum(torch.where(exists, rows, torch.full_like(rows, float("nan"))), group)


vocab_embedding = define(
    "vocab_embedding(Tensor ids, Tensor weight, int size, int padding_idx, str group) -> Tensor",
    forward=_embedding,
    fake=lambda ids, weight, size, padding_idx, group: weight.new_empty([*ids.shape, weight.shape[1]]),
    autograd=_embedding,
)
vocab_embedding.__doc__ = """Rows of a table by id where each rank of ``group`` holds some rows; the whole result.

``ids`` is an integer tensor, the same on every rank, ``weight`` ``[rows, width]``, the result ``[*ids.shape, width]``:
each rank gives its own rows and zeros for others, summed over the group (exact: one term is not zero). An id outside
``[0, size)`` gives NaN. ``padding_idx`` (-1: none) gets no gradient.
"""
