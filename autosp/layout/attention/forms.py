"""One view of every attention operator, so that a strategy is written once for all of them.

A form knows its operands and two ways to run: over the whole sequence with a block of heads (the operator itself, so
that fused kernels stay fused), and, where the operator allows it, over any block of queries and keys
(``autosp::block_attention``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..call import OpCall, Value
from ..placement import IntLike, Shard
from .written_out import head_mask, written_out

_UNBOUNDED = 2**40
OPEN_BOUNDS = (-_UNBOUNDED, _UNBOUNDED)
CAUSAL_BOUNDS = (0, _UNBOUNDED)
# Programs (custom_ops/block_attention/program.py): the one leaf is a boolean mask, or is added to the scores.
VISIBLE = json.dumps({"steps": [], "mask": {"leaf": 0}})
BIAS = json.dumps({"steps": [["aten::add.Tensor", [{"score": 0}, {"leaf": 0}], {}]], "score": {"step": 0}})


@dataclass(frozen=True)
class BlockSettings:
    """What ``autosp::block_attention`` needs besides q, k, v and where they lie."""

    leaves: Sequence[torch.Tensor]
    numbers: Sequence[IntLike]
    program: str
    scale: float
    sizes: Sequence[IntLike]
    bounds: Sequence[IntLike]

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, origin: Sequence[IntLike]) -> Any:
        """``(out, lse)`` of the block of queries and keys at ``origin`` (batch row, head, query, key)."""
        return torch.ops.autosp.block_attention(
            q, k, v, list(self.leaves), list(self.numbers), self.program, self.scale, list(origin), list(self.sizes),
            list(self.bounds),
        )  # fmt: skip


@dataclass(frozen=True)
class Form:
    """An attention call whose queries, keys and values are cut over tokens, as ``[batch, heads, tokens, size]``.

    Args:
        call: the operator call.
        q, k, v: its operands.
        names: their argument names.
        q_cut, k_cut: their cuts over tokens.
    """

    call: OpCall
    q: Value
    k: Value
    v: Value
    names: tuple[str, str, str] = ("query", "key", "value")

    @property
    def q_cut(self) -> Shard:
        assert self.q.shard is not None
        return self.q.shard

    @property
    def k_cut(self) -> Shard:
        assert self.k.shard is not None
        return self.k.shard

    @property
    def heads(self) -> int:
        return int(self.q.shape[1])

    @property
    def key_heads(self) -> int:
        return int(self.k.shape[1])

    @property
    def dropout(self) -> float:
        return 0.0

    @property
    def may_be_causal(self) -> bool:
        """Later queries may see more keys than earlier ones."""
        return True

    @property
    def is_causal(self) -> bool:
        """For certain a query sees no later key, and how far back it sees is not bounded."""
        return False

    @property
    def is_plain(self) -> bool:
        """Every query sees every key, and nothing changes the scores."""
        return False

    def tokens_of(self, local: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.names
        return local[q], local[k], local[v]

    def why_not_blocks(self) -> str:
        """Why the operator cannot be computed for a part of the queries or keys; empty when it can."""
        return "its operator works on whole sequences only"

    def settings(self, c: OpCall, local: dict[str, Any]) -> BlockSettings:
        raise NotImplementedError

    def run_heads(self, c: OpCall, local: dict[str, Any], q, k, v, block: tuple[int, int], grouped: bool) -> Any:
        """``(out, lse or None)`` of heads ``block`` over the whole sequence; ``grouped``: fewer key heads."""
        raise NotImplementedError

    @property
    def wants_lse(self) -> bool:
        """Somebody uses the log-sum-exp, the second result."""
        return False

    def result(self, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
        """What the operator returns, from its two possible results."""
        return out

    @property
    def output(self) -> Any:
        """The layout of the result."""
        return self.q_cut


class SdpaForm(Form):
    """``scaled_dot_product_attention``."""

    @property
    def dropout(self) -> float:
        return float(self.call["dropout_p"])

    @property
    def may_be_causal(self) -> bool:
        return bool(self.call["is_causal"]) or self.call.get("attn_mask") is not None

    @property
    def is_causal(self) -> bool:
        return bool(self.call["is_causal"])

    @property
    def is_plain(self) -> bool:
        return not self.may_be_causal and self.dropout == 0

    def tokens_of(self, local: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the dtype of the result: autocast has the operator cast its operands, which blocks do not."""
        q, k, v = (x if x.dtype == self.call.out.dtype else x.to(self.call.out.dtype) for x in super().tokens_of(local))
        return q, k, v

    def why_not_blocks(self) -> str:
        return "its dropout needs the probabilities of whole rows" if self.dropout > 0 else ""

    def settings(self, c: OpCall, local: dict[str, Any]) -> BlockSettings:
        mask = local.get("attn_mask")
        scale = c["scale"] if c["scale"] is not None else self.q.shape[-1] ** -0.5
        program = "" if mask is None else VISIBLE if mask.dtype == torch.bool else BIAS
        bounds = CAUSAL_BOUNDS if c["is_causal"] else OPEN_BOUNDS
        sizes = [self.q.shape[-2], self.k.shape[-2]]
        return BlockSettings([] if mask is None else [mask], [], program, scale, sizes, bounds)

    def run_heads(self, c: OpCall, local: dict[str, Any], q, k, v, block: tuple[int, int], grouped: bool) -> Any:
        mask = head_mask(local.get("attn_mask"), block, self.heads)
        q_name, k_name, v_name = self.names
        changed = {q_name: q, k_name: k, v_name: v, "attn_mask": mask, "enable_gqa": grouped}
        if self.dropout > 0:
            return written_out(c, {**local, **changed}, mask), None
        return c.run(local, **changed), None


class BlockForm(Form):
    """``autosp::block_attention``: attention whose mask or bias is a program."""

    @property
    def is_causal(self) -> bool:
        low, high = self.call["bounds"]
        return isinstance(low, int) and low >= 0 and isinstance(high, int) and high >= _UNBOUNDED

    def why_not_blocks(self) -> str:
        return ""

    def settings(self, c: OpCall, local: dict[str, Any]) -> BlockSettings:
        return BlockSettings(local["leaves"], c["numbers"], c["program"], c["scale"], c["sizes"], c["bounds"])

    def run_heads(self, c: OpCall, local: dict[str, Any], q, k, v, block: tuple[int, int], grouped: bool) -> Any:
        return self.settings(c, local).run(q, k, v, [0, block[0], 0, 0])

    @property
    def wants_lse(self) -> bool:
        return any(user.args[1] == 1 for user in self.call.node.users)

    def result(self, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
        return [out, lse if self.wants_lse else None]

    @property
    def output(self) -> Any:
        return [self.q_cut, self.q_cut if self.wants_lse else None]
