"""A DTensor that a compiled graph may take in as the whole value that it stands for.

What a graph returns sharded is a DTensor for everybody. When Dynamo traces the next graph (after a graph break, or in
the next layer compiled by itself), operators of that graph mix it with plain parameters, which DTensor's own
operators refuse. There only the whole value's shape and dtype matter: the layout inference that follows knows how it
is sharded. So under a trace every operator on a ``SequenceTensor`` computes with whole fakes; outside a trace it is
an ordinary DTensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .errors import InputError

# What reads one number out of a tensor. DTensor would give this rank's part of it, a plausible and wrong number.
_READING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
# What torch itself calls while it makes a fake of an input; it must stay the input that it is.
_KEEPING = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class SequenceTensor(DTensor):
    """A DTensor cut over the sequence axis, the vocabulary axis or both, or what an operator outside a graph made of
    one, where ranks hold it in parts; see the module's docstring.
    """

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> SequenceTensor:
        plain = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        return SequenceTensor(plain._local_tensor, plain._spec, requires_grad=plain.requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        flat, spec = tree_flatten((tuple(args), dict(kwargs or {})))
        if not any(isinstance(x, SequenceTensor) and isinstance(x._local_tensor, FakeTensor) for x in flat):
            if func in _READING:
                raise InputError(_read(args[0]))
            try:
                result = super().__torch_dispatch__(func, types, args, kwargs)
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" in str(error):
                    raise InputError(_mixed(func, flat)) from error
                raise
            return tree_map(_still_parted, result)
        if func in _KEEPING:
            local = func(args[0]._local_tensor, *args[1:], **(kwargs or {}))
            return SequenceTensor(local, args[0]._spec, requires_grad=False)
        if func is torch.ops.aten.view.default and _is_own_shape(args[0], args[1]):
            # An engine's autograd hook hands its input on as a view of itself, which a fake is made of once more.
            local = args[0]._local_tensor
            return SequenceTensor(local.view(local.shape), args[0]._spec, requires_grad=False)
        whole_args, whole_kwargs = tree_unflatten([_whole(x) for x in flat], spec)
        return func(*whole_args, **whole_kwargs)


def _mixed(func: Any, operands: Sequence[Any]) -> str:
    """What to say of an operator outside any graph that mixes a sharded value with whole ones."""
    shapes = [tuple(x.shape) for x in operands if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]
    return (
        f"{func} outside the compiled model takes a value that is sharded over the sequence and whole tensors of shape "
        f"{', '.join(map(str, shapes))}. Compile that part of the model with backend='autosp' too (compile the whole "
        "model, or its outermost module as well as its layers), or gather the value with .full_tensor()"
    )


def _is_own_shape(x: torch.Tensor, sizes: Sequence[Any]) -> bool:
    """Whether a view of these sizes, of which one may be -1, is ``x`` itself."""
    same = (type(a) is int and a == -1 or statically_known_true(a == b) for a, b in zip(sizes, x.shape, strict=False))
    return len(sizes) == x.dim() and all(same)


def _read(x: DTensor) -> str:
    return (
        f"a number is read out of a tensor of which this rank holds a part only ({x.placements} over the sequence "
        "group); gather it first, on every rank: .full_tensor().item(), or compute it inside the compiled model"
    )


def _still_parted(x: Any) -> Any:
    """A result that ranks hold in parts: cut over the sequence it may enter the next graph (an engine's hook may cast
    or alias it), and a number is never read out of one part.
    """
    if not isinstance(x, DTensor) or isinstance(x, SequenceTensor) or all(p.is_replicate() for p in x.placements):
        return x
    return SequenceTensor(x._local_tensor, x._spec, requires_grad=x.requires_grad)


def is_cut(x: DTensor) -> bool:
    """Whether one dimension is cut over one mesh dimension, as ``torch.chunk`` cuts: not a partial sum, not strided."""
    return len(x.placements) == 1 and type(x.placements[0]) is ShardPlacement


def _whole(x: Any) -> Any:
    """A fake of the whole value of a traced ``SequenceTensor``; anything else as it is."""
    if not isinstance(x, SequenceTensor):
        return x
    local = x._local_tensor
    return local.new_empty(x.shape)


def shard(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> SequenceTensor:
    """Cut a tensor that every rank of the group holds whole; its gradient comes back whole on every rank.

    Args:
        whole: the same on every rank.
        mesh: one-dimensional mesh of the sequence group.
        dim: the dimension to cut, as ``torch.chunk`` does.
    """
    from .custom_ops.collectives import shard_sequence

    length = whole.shape[dim]
    block = -(-length // mesh.size())
    rows = shard_sequence(whole, dim, length, length, 0, 1, 1, None, mesh.get_group().group_name)
    held = max(0, min(block, length - mesh.get_local_rank() * block))
    return from_local(rows.narrow(dim, 0, held), mesh, [dim], list(whole.shape))


def from_local(local: torch.Tensor, mesh: DeviceMesh, dims: Sequence[int], shape: Sequence[int]) -> SequenceTensor:
    """The sharded tensor of whole ``shape`` whose part on this rank is ``local``; gradients flow back to ``local``.

    Args:
        local: this rank's rows, as ``torch.chunk`` cuts them.
        mesh: mesh of the groups that share the tensor, the sequence group for one.
        dims: for each dimension of the mesh, the tensor dimension that it cuts.
        shape: sizes of the whole tensor.
    """
    result = _FromLocal.apply(local, mesh, tuple(dims), tuple(shape))
    for dim in dims:
        if local.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(result, dim)
    return result


def _wrap(local: torch.Tensor, mesh: DeviceMesh, dims: Sequence[int], shape: Sequence[int]) -> SequenceTensor:
    stride = torch.empty(shape, device="meta").stride()
    placements = [ShardPlacement(dim) for dim in dims]
    plain = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return SequenceTensor(plain._local_tensor, plain._spec, requires_grad=local.requires_grad)


def _rows_of_this_rank(whole: torch.Tensor, ranks: int, rank: int, dim: int) -> torch.Tensor:
    length = whole.shape[dim]
    block = -(-length // ranks)
    first = min(length, rank * block)
    return whole.narrow(dim, first, min(block, length - first))


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, mesh: DeviceMesh, dims: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        ctx.mesh, ctx.dims = mesh, dims
        return _wrap(local.detach().contiguous(), mesh, dims, shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if isinstance(grad, DTensor):
            grad = grad.redistribute(ctx.mesh, [ShardPlacement(dim) for dim in ctx.dims]).to_local()
        else:
            # Zeros that autograd fills in where an output has no gradient are whole and plain.
            for axis, dim in enumerate(ctx.dims):
                grad = _rows_of_this_rank(grad, ctx.mesh.size(axis), ctx.mesh.get_local_rank(axis), dim)
        return grad, None, None, None


def _cut_dim(x: DTensor) -> int:
    (placement,) = x.placements
    assert isinstance(placement, ShardPlacement)
    return placement.dim


class ToLocal(torch.autograd.Function):
    """Local rows of a ``SequenceTensor``; the gradient goes back as one."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.mesh, ctx.dim, ctx.shape = x.device_mesh, _cut_dim(x), tuple(x.shape)
        return x._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _wrap(grad.contiguous(), ctx.mesh, [ctx.dim], ctx.shape)
