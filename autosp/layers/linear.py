"""`VocabParallelLinear`: an LM head of which each rank of a tensor-parallel group holds some vocabulary rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from ..custom_ops.vocab_linear import enter_vocabulary, vocab_linear
from ..errors import InputError
from .deferred import DeferredLogits
from .partition import VocabGroup
from .sharded import VocabShardedModule

OUTPUTS = ("dtensor", "full", "local")


class VocabParallelLinear(VocabShardedModule):
    """A linear layer whose output dimension, the vocabulary, is sharded over a group as ``torch.chunk`` cuts it.

    ``weight`` is ``[rows, in_features]`` and ``bias`` ``[rows]``, this rank's rows; a shard may be empty. The input
    must be the same on every rank of the group; its gradient is summed over the group in fp32, so that what comes
    before the head has whole and equal gradients on all ranks. The gradients of ``weight`` and ``bias`` are this
    rank's own.

    Under ``torch.compile`` the result is whole in the graph (``autosp::vocab_linear``), and the backend "autosp" keeps
    it sharded wherever what follows allows it.

    Args:
        in_features: width of the hidden states.
        out_features: ids in the whole vocabulary.
        bias: whether there is one.
        tp_group: a ProcessGroup, its name, a DeviceMesh of one dimension, or None: the whole vocabulary on this rank
            (never the world).
        output: what the layer gives without the compiler. "dtensor": logits that know how they are sharded, and
            compute right or raise whatever is done with them; "full": gathered; "local": this rank's columns, for the
            functional losses with ``vocab_start_index`` and ``vocab_end_index``.
        device, dtype: of the parameters.

    Raises:
        InputError: a size that is not positive, an unknown ``output``, or no group.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        tp_group: Any = None,
        *,
        output: str = "dtensor",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_output(output)
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}; a positive integer is expected")
        super().__init__(out_features, tp_group)
        self.in_features, self.out_features, self.output = in_features, out_features, output
        self.deferred = False
        shape = (self.partition.rows, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw this rank's rows of what ``nn.Linear`` would draw: with equal seeds the head does not depend on tp."""
        if self.weight.is_meta:
            return
        whole = nn.Linear(
            self.in_features,
            self.out_features,
            self.bias is not None,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        self._copy_rows(whole)

    @classmethod
    def from_linear(cls, linear: nn.Linear, tp_group: Any, *, output: str = "dtensor") -> VocabParallelLinear:
        """The layer that holds this rank's rows of ``linear``, which is left as it is. Not collective.

        Dtype, device, ``requires_grad`` and the training flag are those of ``linear``.

        Raises:
            InputError: ``linear`` is not exactly a ``torch.nn.Linear``, or the group is none.
        """
        if type(linear) is not nn.Linear:
            raise InputError(f"a torch.nn.Linear is expected, got {type(linear).__name__}, which may compute otherwise")
        has_bias = linear.bias is not None
        layer = cls(linear.in_features, linear.out_features, has_bias, tp_group, output=output, device="meta")
        layer.take_rows_of(linear)
        return layer.train(linear.training)

    def _copy_rows(self, whole: nn.Linear) -> None:
        with torch.no_grad():
            for name in self.sharded_names():
                getattr(self, name).copy_(self.rows_of(getattr(whole, name), name))

    def forward(self, x: torch.Tensor) -> Any:
        """Logits ``[..., out_features]`` of ``x`` ``[..., in_features]``, in the form that ``output`` says."""
        group = self._group.name
        if not group:
            return F.linear(x, self.weight, self.bias)
        x, weight, bias = _autocast(x, self.weight, self.bias)
        if torch.compiler.is_compiling() or self.output == "full":
            return vocab_linear(x, weight, bias, self.out_features, group)
        if self.deferred:
            return DeferredLogits(self, x)
        local = F.linear(enter_vocabulary(x, group), weight, bias)
        return local if self.output == "local" else self.as_logits(local)

    def as_logits(self, local: torch.Tensor) -> DTensor:
        """This rank's columns ``[..., rows]`` as a DTensor of all logits, ``Shard(-1)``; gradients flow back."""
        shape = torch.Size([*local.shape[:-1], self.out_features])
        stride = torch.empty(shape, device="meta").stride()
        mesh = self._group.mesh(local.device.type)
        return DTensor.from_local(local, mesh, [Shard(local.dim() - 1)], run_check=False, shape=shape, stride=stride)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.partition}"
        )


def is_vocab_sharded(value: Any) -> bool:
    """Whether ``value`` is a DTensor whose last dimension is sharded over one group and nothing else is."""
    return isinstance(value, DTensor) and len(value.placements) == 1 and value.placements[0] in _last_dimension(value)


def _last_dimension(value: DTensor) -> tuple[Shard, Shard]:
    return Shard(value.dim() - 1), Shard(-1)


def local_part(value: DTensor) -> tuple[torch.Tensor, VocabGroup, int, int]:
    """``(local columns, group, first id, one past the last id)`` of vocabulary-sharded logits."""
    group = VocabGroup(value.device_mesh)
    size = value.shape[-1]
    block = -(-size // group.ranks)
    start = min(size, group.rank * block)
    return value.to_local(), group, start, min(size, start + block)


def _check_output(output: str) -> None:
    if output not in OUTPUTS:
        raise InputError(f"output is {output!r}; allowed: {', '.join(map(repr, OUTPUTS))}")


def _autocast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """What autocast makes of the operands of a linear layer: done here, since our operators are not in its list."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)
