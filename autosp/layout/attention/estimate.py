"""What a strategy costs one rank, by the sizes of the heads alone: lengths are symbols when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from .forms import Form


@dataclass(frozen=True)
class Estimate:
    """Costs of the busiest rank.

    Args:
        share: part of all scores that it computes; the ideal is one over the number of ranks.
        moved: bytes that it receives in forward and backward, per token of the whole sequence and row of the batch.
        held: bytes of q, k, v and the result that it holds during attention, per token and row of the batch.
    """

    share: float
    moved: float
    held: float

    def __str__(self) -> str:
        return (
            f"{self.share:.1%} of the scores on the busiest rank, {self.moved:.0f} bytes moved and {self.held:.0f} "
            "held a token"
        )


def token_bytes(form: Form, q_heads: float, key_heads: float) -> float:
    """Bytes of one token's q and result of ``q_heads`` heads and k and v of ``key_heads`` heads."""
    size, value_size = int(form.q.shape[-1]), int(form.v.shape[-1])
    return (q_heads + key_heads) * (size + value_size) * form.q.val.element_size()


def row_share(form: Form, parts: int) -> float:
    """Part of the scores in the busiest of ``parts`` contiguous blocks of queries: the last, if causal."""
    return (2 * parts - 1) / parts**2 if form.may_be_causal else 1 / parts
