"""Collectives over a sequence group, each with the adjoint that keeps every gradient exact on every rank.

Cuts are described as in ``autosp.layout.placement``: dimension ``dim`` is the row-major product ``outer x size x
inner``, its middle factor covers positions ``[start, start + size)`` of a grid of ``length`` positions, and each rank
holds the ``ceil(length / P)`` positions of its block, padding rows included. ``group`` is a process-group name.

========================  ==========================================  ==========================================
operator                  forward                                     backward
========================  ==========================================  ==========================================
shard_sequence            this rank's rows of a whole tensor          all-gather of the rows
all_gather_sequence       the whole tensor from every rank's rows     this rank's rows, or reduce-scatter
reduce_scatter_sequence   this rank's rows of the sum over the group  all-gather
all_to_all                exchange of uneven pieces                   the opposite exchange
all_reduce_sum            sum over the group                          identity
enter_sharded             identity                                    sum over the group, or a factor
========================  ==========================================  ==========================================
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from ._library import define, group_rank, group_size

_c10d = torch.ops._c10d_functional


def _wait(tensor: Tensor) -> Tensor:
    return _c10d.wait_tensor(tensor)


def _block(length, group: str):
    size = group_size(group)
    return (length + size - 1) // size if length % size else length // size


def _is_whole(length, size, start, ranks: int) -> bool:
    """The window is the whole grid and the group divides it: no padding rows."""
    return bool(length % ranks == 0) and statically_known_true(size == length) and statically_known_true(start == 0)


def _split_dim(x: Tensor, dim: int, outer, middle, inner) -> Tensor:
    """View ``dim`` as its three factors, the middle one moved to the front: ``[middle, before, outer, inner,
    after]``.
    """
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    return x.reshape(*before, outer, middle, inner, *after).movedim(dim + 1, 0)


def _join_dim(x: Tensor, dim: int, outer, inner) -> Tensor:
    """Undo ``_split_dim``."""
    x = x.movedim(0, dim + 1)
    middle = x.shape[dim + 1]
    return x.reshape(*x.shape[:dim], outer * middle * inner, *x.shape[dim + 3 :]).contiguous()


def _cut(x: Tensor, dim, length, size, start, outer, inner, fill, group: str) -> Tensor:
    """This rank's block of a whole tensor; padding rows are ``fill``, or copies of the nearest row when it is None.

    A copy of a real row stays finite wherever real rows do: a padding row of zeros under ``1 / x`` would be infinite,
    and its gradient, zero times infinity, would not be zero.
    """
    ranks = group_size(group)
    block = _block(length, group)
    rows = _split_dim(x, dim, outer, size, inner)
    first = group_rank(group) * block
    if _is_whole(length, size, start, ranks):
        rows = rows.narrow(0, first, block)
    elif fill is None:
        nearest = (torch.arange(block, device=x.device) + (first - start)).clamp(0, size - 1)
        rows = rows.index_select(0, nearest)
    else:
        rows = F.pad(rows, [0, 0] * (rows.dim() - 1) + [start, block * ranks - start - size], value=fill)
        rows = rows.narrow(0, first, block)
    return _join_dim(rows, dim, outer, inner).clone(memory_format=torch.contiguous_format)


def _gather(x: Tensor, dim, length, size, start, outer, inner, group: str) -> Tensor:
    """The whole window from every rank's block."""
    ranks = group_size(group)
    rows = _split_dim(x, dim, outer, _block(length, group), inner).contiguous()
    rows = _wait(_c10d.all_gather_into_tensor(rows, ranks, group)).narrow(0, start, size)
    return _join_dim(rows, dim, outer, inner)


def _reduce_scatter(x: Tensor, dim, length, size, start, outer, inner, group: str) -> Tensor:
    """This rank's block of the sum over the group of whole tensors."""
    ranks = group_size(group)
    block = _block(length, group)
    rows = _split_dim(x, dim, outer, size, inner)
    if not _is_whole(length, size, start, ranks):
        rows = F.pad(rows, [0, 0] * (rows.dim() - 1) + [start, block * ranks - start - size])
    rows = rows.contiguous()
    rows = _wait(_c10d.reduce_scatter_tensor(rows, "sum", ranks, group))
    return _join_dim(rows, dim, outer, inner)


def _resized(x: Tensor, dim: int, size) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


class _ShardSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, length, size, start, outer, inner, fill, group):
        ctx.cut = (dim, length, size, start, outer, inner, group)
        return _cut(x, dim, length, size, start, outer, inner, fill, group)

    @staticmethod
    def backward(ctx, grad):
        return (_gather(grad, *ctx.cut),) + (None,) * 8


class _AllGatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, length, size, start, outer, inner, partial_grad, group):
        ctx.cut = (dim, length, size, start, outer, inner)
        ctx.partial_grad, ctx.group = partial_grad, group
        return _gather(x, dim, length, size, start, outer, inner, group)

    @staticmethod
    def backward(ctx, grad):
        grad = _reduce_scatter(grad, *ctx.cut, ctx.group) if ctx.partial_grad else _cut(grad, *ctx.cut, 0, ctx.group)
        return (grad,) + (None,) * 8


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, length, size, start, outer, inner, group):
        ctx.cut = (dim, length, size, start, outer, inner, group)
        return _reduce_scatter(x, *ctx.cut)

    @staticmethod
    def backward(ctx, grad):
        return (_gather(grad, *ctx.cut),) + (None,) * 7


def _exchange(x: Tensor, send, receive, group: str) -> Tensor:
    return _wait(_c10d.all_to_all_single(x.contiguous(), receive, send, group))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.exchange = (receive, send, group)
        return _exchange(x, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, *ctx.exchange), None, None, None


def _sum(x: Tensor, group: str) -> Tensor:
    return _wait(_c10d.all_reduce(x.contiguous(), "sum", group))


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _sum(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# Up to here a gradient in low precision is summed in fp32: biases, norms and adapters, whose traffic is nothing beside
# that of the matrices, and which lose most by a rounding at every addition.
_SMALL = 2**16


def _sum_gradient(grad: Tensor, group: str) -> Tensor:
    """Sum over the group, rounded once where the gradient is small and in low precision."""
    low = grad.dtype in (torch.bfloat16, torch.float16)
    if low and statically_known_true(grad.numel() <= _SMALL):
        return _sum(grad.float(), group).to(grad.dtype)
    return _sum(grad, group)


class _EnterSharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, reduction, group):
        ctx.reduction, ctx.group = reduction, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.reduction == "sum":
            grad = _sum_gradient(grad, ctx.group)
        elif ctx.reduction == "times_size":
            grad = grad * group_size(ctx.group)
        elif ctx.reduction == "over_size":
            grad = grad / group_size(ctx.group)
        return grad, None, None


_CUT = "int dim, SymInt length, SymInt size, SymInt start, SymInt outer, SymInt inner"

shard_sequence = define(
    f"shard_sequence(Tensor x, {_CUT}, Scalar? fill, str group) -> Tensor",
    forward=_cut,
    fake=lambda x, dim, length, size, start, outer, inner, fill, group: _resized(
        x, dim, outer * _block(length, group) * inner
    ),
    autograd=lambda *args: _ShardSequence.apply(*args),
)

all_gather_sequence = define(
    f"all_gather_sequence(Tensor x, {_CUT}, bool partial_grad, str group) -> Tensor",
    forward=lambda x, dim, length, size, start, outer, inner, partial_grad, group: _gather(
        x, dim, length, size, start, outer, inner, group
    ),
    fake=lambda x, dim, length, size, start, outer, inner, partial_grad, group: _resized(x, dim, outer * size * inner),
    autograd=lambda *args: _AllGatherSequence.apply(*args),
)

reduce_scatter_sequence = define(
    f"reduce_scatter_sequence(Tensor x, {_CUT}, str group) -> Tensor",
    forward=_reduce_scatter,
    fake=lambda x, dim, length, size, start, outer, inner, group: _resized(
        x, dim, outer * _block(length, group) * inner
    ),
    autograd=lambda *args: _ReduceScatterSequence.apply(*args),
)

all_to_all = define(
    "all_to_all(Tensor x, SymInt[] send, SymInt[] receive, str group) -> Tensor",
    forward=_exchange,
    fake=lambda x, send, receive, group: _resized(x, 0, sum(receive)),
    autograd=lambda *args: _AllToAll.apply(*args),
)

all_reduce_sum = define(
    "all_reduce_sum(Tensor x, str group) -> Tensor",
    forward=_sum,
    fake=lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format),
    autograd=lambda *args: _AllReduceSum.apply(*args),
)

enter_sharded = define(
    "enter_sharded(Tensor(a) x, str reduction, str group) -> Tensor(a)",
    forward=lambda x, reduction, group: x.view_as(x),
    fake=lambda x, reduction, group: x.view_as(x),
    autograd=lambda *args: _EnterSharded.apply(*args),
)
