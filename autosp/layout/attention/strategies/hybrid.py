"""Ulysses inside, gather outside (a 2-D group, arXiv:2405.07719): more ranks than heads, each with work.

The ranks ``[a * u, (a + 1) * u)`` exchange the tokens of their queries for heads; every rank receives the keys and
values of its heads from the whole group. One all-to-all each, with nothing sent where nothing is needed, so that no
further process groups are made. With one inner rank this is ``allgather_kv``, with all of them ``ulysses``.
"""

from __future__ import annotations

from typing import Any

from ...call import OpCall, Strategy
from ...ulysses import HeadBlocks, empty_attention, gather_heads, local_keys, scatter_heads
from ..estimate import Estimate, row_share, token_bytes
from ..forms import Form


def inner_size(form: Form) -> int:
    """Ranks that exchange heads: the proper divisor of the group that leaves the busiest rank the least work."""
    ranks = form.call.axis.size
    sizes = [u for u in range(2, ranks) if ranks % u == 0]
    return min(sizes, key=lambda u: (_share(form, u), -u), default=1)


def _share(form: Form, inner: int) -> float:
    return -(-form.heads // inner) / form.heads * row_share(form, form.call.axis.size // inner)


def refusal(form: Form) -> str:
    if inner_size(form) == 1:
        return f"a group of {form.call.axis.size} ranks has no inner and outer part"
    return form.why_not_blocks()


def head_blocks(form: Form, inner: int) -> HeadBlocks:
    """The heads of every rank of the group: those of its place in its inner group."""
    blocks = HeadBlocks.of(inner, form.heads, form.key_heads)
    outer = form.call.axis.size // inner
    return HeadBlocks(blocks.query * outer, blocks.key * outer, blocks.repeats)


def estimate(form: Form) -> Estimate:
    ranks, inner = form.call.axis.size, inner_size(form)
    blocks = head_blocks(form, inner)
    q_heads = max(hi - lo for lo, hi in blocks.query) * inner / ranks
    key_heads = max(hi - lo for lo, hi in blocks.key)
    moved = token_bytes(form, q_heads, 0) * (inner - 1) / inner + token_bytes(form, 0, key_heads) * (ranks - 1) / ranks
    return Estimate(_share(form, inner), 2 * moved, token_bytes(form, q_heads, key_heads))


def build(form: Form) -> Strategy:
    q_cut, k_cut, inner = form.q_cut, form.k_cut, inner_size(form)
    blocks = head_blocks(form, inner)

    def attend(c: OpCall, local: dict[str, Any]) -> Any:
        axis = c.axis
        first = axis.rank // inner * inner
        peers = range(first, first + inner)
        q, k, v = form.tokens_of(local)
        (q,) = scatter_heads(axis, [q], [blocks.query], q_cut, peers)
        if k.shape[3] == v.shape[3] and k.dtype == v.dtype:
            k, v = scatter_heads(axis, [k, v], [blocks.key, blocks.key], k_cut)
        else:
            (k,), (v,) = (scatter_heads(axis, [x], [blocks.key], k_cut) for x in (k, v))
        if q.shape[1] == 0:
            out = empty_attention(q, k, v)
            lse = out.sum(-1).to(c.out[1].dtype) if form.wants_lse else None
        else:
            k, _ = local_keys(k, blocks, axis.rank)
            v, _ = local_keys(v, blocks, axis.rank)
            row = first * axis.block(q_cut.length) - q_cut.start
            out, lse = form.settings(c, local).run(q, k, v, [0, blocks.query[axis.rank][0], row, 0])
        out = gather_heads(axis, out, blocks.query, q_cut, peers)
        if form.wants_lse:
            lse = gather_heads(axis, lse.unsqueeze(-1), blocks.query, q_cut, peers).squeeze(-1)
        return form.result(out, lse)

    q_name, k_name, v_name = form.names
    inputs = {q_name: q_cut, k_name: k_cut, v_name: k_cut.at(form.v.shard.dim)}
    note = f"hybrid: {form.heads}/{form.key_heads} heads over {inner} of {form.call.axis.size} ranks"
    return Strategy(inputs=inputs, output=form.output, local=attend, note=note)
