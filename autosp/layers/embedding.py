"""`VocabParallelEmbedding`: a table of which each rank of a tensor-parallel group holds some vocabulary rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
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

        Raises:
            InputError: not exactly a ``torch.nn.Embedding``, or one with ``max_norm``, ``scale_grad_by_freq`` or
                ``sparse``, which look at the whole table or batch at once.
        """
        check_embedding(embedding)
        weight = embedding.weight
        layer = cls(weight.shape[0], weight.shape[1], embedding.padding_idx, tp_group, device="meta")
        layer.take_rows_of(embedding)
        return layer.train(embedding.training)

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
    if type(embedding) is not nn.Embedding:
        raise InputError(
            f"a torch.nn.Embedding is expected, got {type(embedding).__name__}, which may compute otherwise"
        )
    given = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(embedding, name)]
    if given:
        raise InputError(f"an embedding with {', '.join(given)} cannot be sharded over its rows; set it off")
