"""Keys and values go round the group; partial results are merged by their log-sum-exp (arXiv:2310.01889).

No rank ever holds more than two blocks of keys and values. Under a causal mask the last of the contiguous blocks would
have the most to do: before, queries, keys and values are exchanged for an early and a late half block a rank
(``layout.zigzag``), and after, the result is exchanged back, so that every rank has the same share in every step.
"""

from __future__ import annotations

from typing import Any

import torch

from ...call import OpCall, Strategy
from ...zigzag import from_zigzag, to_zigzag
from ..estimate import Estimate, row_share, token_bytes
from ..forms import Form


def refusal(form: Form) -> str:
    return form.why_not_blocks()


def takes_zigzag(form: Form) -> bool:
    """Causal without a window, queries and keys the same rows: contiguous blocks would be unequal work."""
    return form.is_causal and form.q_cut.same_rows(form.k_cut) and form.call.axis.size > 1


def estimate(form: Form) -> Estimate:
    ranks = form.call.axis.size
    keys = token_bytes(form, 0, form.key_heads)
    held = token_bytes(form, form.heads / ranks, 2 * form.key_heads / ranks)
    # In the backward keys and values go round once more, and their gradients with them.
    moved = 3 * keys * (ranks - 1) / ranks
    if takes_zigzag(form):
        return Estimate(1 / ranks, moved + 2 * token_bytes(form, form.heads, form.key_heads) / ranks, held)
    return Estimate(row_share(form, ranks), moved, held)


def build(form: Form) -> Strategy:
    q_cut, k_cut, zigzag = form.q_cut, form.k_cut, takes_zigzag(form)

    def attend(c: OpCall, local: dict[str, Any]) -> Any:
        q, k, v = form.tokens_of(local)
        s = form.settings(c, local)
        blocks = [c.axis.block(cut.length) for cut in (q_cut, k_cut)]
        starts = [q_cut.start, k_cut.start]
        if zigzag:
            together = [[q, k, v]] if q.dtype == k.dtype == v.dtype else [[q], [k], [v]]
            q, k, v = (x for some in together for x in to_zigzag(c.axis, some, blocks[0]))
        out, lse = torch.ops.autosp.ring_attention(
            q, k, v, list(s.leaves), list(s.numbers), s.program, s.scale, blocks, starts, list(s.sizes),
            list(s.bounds), c.axis.group, zigzag,
        )  # fmt: skip
        if zigzag:
            (out,) = from_zigzag(c.axis, [out], blocks[0])
            if form.wants_lse:
                lse = from_zigzag(c.axis, [lse.unsqueeze(-1)], blocks[0])[0].squeeze(-1)
        return form.result(out, lse)

    q_name, k_name, v_name = form.names
    inputs = {q_name: q_cut, k_name: k_cut, v_name: k_cut.at(form.v.shard.dim)}
    note = f"ring of {form.call.axis.size} blocks" + (", zigzag" if zigzag else "")
    return Strategy(inputs=inputs, output=form.output, local=attend, note=note)
