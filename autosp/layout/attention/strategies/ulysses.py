"""Tokens are exchanged for heads; each rank attends with its heads over the whole sequence (arXiv:2309.14509)."""

from __future__ import annotations

from typing import Any

from ...call import OpCall, Strategy
from ...ulysses import HeadBlocks, empty_attention, exchange_all, gather_heads, local_keys
from ..estimate import Estimate, token_bytes
from ..forms import Form


def refusal(form: Form) -> str:
    return ""


def estimate(form: Form) -> Estimate:
    ranks = form.call.axis.size
    blocks = HeadBlocks.of(ranks, form.heads, form.key_heads)
    q_heads = max(hi - lo for lo, hi in blocks.query)
    key_heads = max(hi - lo for lo, hi in blocks.key)
    held = token_bytes(form, q_heads, key_heads)
    return Estimate(q_heads / form.heads, 2 * held * (ranks - 1) / ranks, held)


def build(form: Form) -> Strategy:
    q_cut, k_cut = form.q_cut, form.k_cut
    blocks = HeadBlocks.of(form.call.axis.size, form.heads, form.key_heads)

    def attend(c: OpCall, local: dict[str, Any]) -> Any:
        axis = c.axis
        q, k, v = exchange_all(axis, *form.tokens_of(local), blocks, q_cut, k_cut)
        if q.shape[1] == 0:
            out = empty_attention(q, k, v)
            lse = out.sum(-1).to(_lse_dtype(c)) if form.wants_lse else None
        else:
            k, grouped = local_keys(k, blocks, axis.rank)
            v, _ = local_keys(v, blocks, axis.rank)
            out, lse = form.run_heads(c, local, q, k, v, blocks.query[axis.rank], grouped)
        out = gather_heads(axis, out, blocks.query, q_cut)
        if form.wants_lse:
            lse = gather_heads(axis, lse.unsqueeze(-1), blocks.query, q_cut).squeeze(-1)
        return form.result(out, lse)

    q_name, k_name, v_name = form.names
    inputs = {q_name: q_cut, k_name: k_cut, v_name: k_cut.at(form.v.shard.dim)}
    return Strategy(
        inputs=inputs, output=form.output, local=attend, note=f"ulysses: {form.heads}/{form.key_heads} heads"
    )


def _lse_dtype(c: OpCall) -> Any:
    return c.out[1].dtype
