"""Keys and values go round the group; partial results are merged by their log-sum-exp (arXiv:2310.01889).

No rank ever holds more than two blocks of keys and values. Blocks are contiguous, so under a causal mask the last rank
has the most to do: every rank passes on what it does not see.
"""

from __future__ import annotations

from typing import Any

import torch

from ...call import OpCall, Strategy
from ..estimate import Estimate, row_share, token_bytes
from ..forms import Form


def refusal(form: Form) -> str:
    return form.why_not_blocks()


def estimate(form: Form) -> Estimate:
    ranks = form.call.axis.size
    keys = token_bytes(form, 0, form.key_heads)
    held = token_bytes(form, form.heads / ranks, 2 * form.key_heads / ranks)
    # In the backward keys and values go round once more, and their gradients with them.
    return Estimate(row_share(form, ranks), 3 * keys * (ranks - 1) / ranks, held)


def build(form: Form) -> Strategy:
    q_cut, k_cut = form.q_cut, form.k_cut

    def attend(c: OpCall, local: dict[str, Any]) -> Any:
        q, k, v = form.tokens_of(local)
        s = form.settings(c, local)
        blocks = [c.axis.block(cut.length) for cut in (q_cut, k_cut)]
        starts = [q_cut.start, k_cut.start]
        return form.result(
            *torch.ops.autosp.ring_attention(
                q, k, v, list(s.leaves), list(s.numbers), s.program, s.scale, blocks, starts, list(s.sizes),
                list(s.bounds), c.axis.group,
            )
        )  # fmt: skip

    q_name, k_name, v_name = form.names
    inputs = {q_name: q_cut, k_name: k_cut, v_name: k_cut.at(form.v.shard.dim)}
    return Strategy(inputs=inputs, output=form.output, local=attend, note=f"ring of {form.call.axis.size} blocks")
