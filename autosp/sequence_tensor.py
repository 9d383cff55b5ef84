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
from torch.utils._pytree import tree_flatten, tree_unflatten

# What torch itself calls while it makes a fake of an input; it must stay the input that it is.
_KEEPING = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class SequenceTensor(DTensor):
    """A DTensor cut over the sequence axis, the vocabulary axis or both; see the module's docstring."""

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
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func in _KEEPING:
            local = func(args[0]._local_tensor, *args[1:], **(kwargs or {}))
            return SequenceTensor(local, args[0]._spec, requires_grad=False)
        whole_args, whole_kwargs = tree_unflatten([_whole(x) for x in flat], spec)
        return func(*whole_args, **whole_kwargs)


def _whole(x: Any) -> Any:
    """A fake of the whole value of a traced ``SequenceTensor``; anything else as it is."""
    if not isinstance(x, SequenceTensor):
        return x
    local = x._local_tensor
    return local.new_empty(x.shape)


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


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, mesh: DeviceMesh, dims: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        ctx.mesh, ctx.dims = mesh, dims
        return _wrap(local.detach().contiguous(), mesh, dims, shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if isinstance(grad, DTensor):
            grad = grad.redistribute(ctx.mesh, [ShardPlacement(dim) for dim in ctx.dims]).to_local()
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
