"""`VocabParallelEmbedding`: a table of which each rank of a tensor-parallel group holds some vocabulary rows."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from ..custom_ops.vocab_linear import vocab_embedding
from ..errors import InputError
from .sharded import VocabShardedModule


class VocabParallelEmbedding(VocabShardedModule):
    """An embedding whose rows are sharded over a group; every rank gets the whole result.

    Ids of other shards contribute zero, and the sum over the group is exact. An id outside the vocabulary gives NaN.

    Args:
        num_embeddings: ids in the whole vocabulary.
        embedding_dim: width of a row.
        padding_idx: id whose row gets no gradient, or None.
        tp_group: as for `VocabParallelLinear`.
        device, dtype: of ``weight`` ``[rows, embedding_dim]``.

    Raises:
        InputError: ``padding_idx`` outside the vocabulary, or no group.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        tp_group: Any = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, tp_group)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise InputError(f"padding_idx is {padding_idx}; allowed: ids of a vocabulary of {num_embeddings}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.weight = nn.Parameter(torch.empty(self.partition.rows, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw this rank's rows of what ``nn.Embedding`` would draw."""
        if self.weight.is_meta:
            return
        whole = nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            self.padding_idx,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )
        with torch.no_grad():
            self.weight.copy_(self.rows_of(whole.weight, "weight"))

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, tp_group: Any) -> VocabParallelEmbedding:
        """The layer that holds this rank's rows of ``embedding``, which is left as it is. Not collective.

        A subclass (one that scales its rows, say) keeps its own ``forward`` around the lookup: the layer is an instance
        of both classes.

        Raises:
            InputError: no ``torch.nn.Embedding``, one with ``max_norm``, ``scale_grad_by_freq`` or ``sparse``, which
                look at the whole table or batch at once, or a subclass that reads its table by itself.
        """
        check_embedding(embedding)
        layer = _sharded_copy(embedding)
        layer._shard(embedding.weight.shape[0], tp_group)
        layer.take_rows_of(embedding)
        return layer

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind: Any = type(self)
        if kind is VocabParallelEmbedding:
            return super().__reduce_ex__(protocol)
        # The class of a layer of a subclass is made at run time, so a pickle names what it is made from.
        return _empty, (kind.__bases__[0],), self.__dict__.copy()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``[*ids.shape, embedding_dim]`` of integer ``ids``, the same on every rank."""
        if not self._group.name:
            return F.embedding(ids, self.weight, self.padding_idx)
        padding = -1 if self.padding_idx is None else self.padding_idx
        return vocab_embedding(ids, self.weight, self.num_embeddings, padding, self._group.name)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}, {self.partition}"


def check_embedding(embedding: nn.Module) -> None:
    """Refuse what `VocabParallelEmbedding` does not compute; see `VocabParallelEmbedding.from_embedding`."""
    if not isinstance(embedding, nn.Embedding) or isinstance(embedding, VocabParallelEmbedding):
        raise InputError(f"a torch.nn.Embedding is expected, got {type(embedding).__name__}")
    given = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(embedding, name)]
    if given:
        raise InputError(f"an embedding with {', '.join(given)} cannot be sharded over its rows; set it off")
    if embedding._forward_hooks or embedding._forward_pre_hooks:
        raise InputError("the embedding has forward hooks, which would be lost; register them afterwards")
    own = [name for name, _ in embedding.named_parameters() if name != "weight"]
    if own:
        raise InputError(f"a {type(embedding).__name__} has parameters beside its table, {own}, and cannot be sharded")
    # A fake table (a plan of a model that is not there) has nothing to be tried with, and computes nothing.
    if type(embedding) is not nn.Embedding and not isinstance(embedding.weight, FakeTensor):
        _check_subclass(embedding)


class _Lookup(nn.Embedding):
    """In place of ``nn.Embedding`` below a subclass: a lookup in a table that the subclass does not see."""

    table: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.embedding(input, self.table, self.padding_idx)


def _check_subclass(embedding: nn.Embedding) -> None:
    """Refuse a subclass that gets its rows otherwise than from ``super().forward``: tried on a small table."""
    kind: Any = type(embedding)
    weight = embedding.weight
    table = torch.linspace(-1, 1, 8 * weight.shape[1], dtype=weight.dtype, device=weight.device).view(8, -1)
    ids = torch.arange(8, device=weight.device).view(2, 4)
    padding = None if embedding.padding_idx is None else embedding.padding_idx % 8
    whole = _copied(embedding, kind)
    blind: Any = _copied(embedding, type(kind.__name__, (kind, _Lookup), {}))
    whole.weight = nn.Parameter(table.clone())
    blind.weight, blind.table = nn.Parameter(table[:1] * float("nan")), table
    whole.padding_idx = blind.padding_idx = padding
    try:
        with torch.no_grad():
            alike = bool((whole.forward(ids) == blind.forward(ids)).all())
    except Exception as error:
        raise InputError(
            f"a {kind.__name__} cannot be sharded over its rows: tried on a small table, its forward raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if not alike:
        raise InputError(
            f"a {kind.__name__} cannot be sharded over its rows: its forward reads the table by itself; let it get its "
            "rows from super().forward(ids)"
        )


@functools.cache
def _sharded_kind(kind: Any) -> Any:
    """A class whose ``forward`` is that of ``kind`` around the lookup of `VocabParallelEmbedding`."""
    if kind is nn.Embedding:
        return VocabParallelEmbedding
    return type(f"VocabParallel{kind.__name__}", (kind, VocabParallelEmbedding, nn.Embedding), {})


def _sharded_copy(embedding: nn.Embedding) -> Any:
    kind: Any = type(embedding)
    return _copied(embedding, _sharded_kind(kind))


def _empty(kind: Any) -> Any:
    made = _sharded_kind(kind)
    return made.__new__(made)


def _copied(module: nn.Module, kind: Any) -> Any:
    """A module of another class with the attributes of ``module`` and dictionaries of its own."""
    made = kind.__new__(kind)
    made.__dict__.update({k: copy.copy(v) if isinstance(v, (dict, set)) else v for k, v in module.__dict__.items()})
    return made
