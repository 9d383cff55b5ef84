"""Queries stay where they are; keys and values are gathered, their gradients reduce-scattered."""

from __future__ import annotations

from typing import Any

from ...call import OpCall, Strategy
from ...placement import REPLICATE, IntLike
from ..estimate import Estimate, row_share, token_bytes
from ..forms import Form


def refusal(form: Form) -> str:
    return form.why_not_blocks()


def estimate(form: Form) -> Estimate:
    ranks = form.call.axis.size
    keys = token_bytes(form, 0, form.key_heads)
    held = token_bytes(form, form.heads / ranks, form.key_heads)
    return Estimate(row_share(form, ranks), 2 * keys * (ranks - 1) / ranks, held)


def first_row(c: OpCall, form: Form) -> IntLike:
    """Position of the first query that this rank holds; negative where its first rows lie before the window."""
    return c.axis.rank * c.axis.block(form.q_cut.length) - form.q_cut.start


def build(form: Form) -> Strategy:
    def attend(c: OpCall, local: dict[str, Any]) -> Any:
        q, k, v = form.tokens_of(local)
        if form.is_plain:
            return c.run(local)
        return form.result(*form.settings(c, local).run(q, k, v, [0, 0, first_row(c, form), 0]))

    q_name, k_name, v_name = form.names
    inputs = {q_name: form.q_cut, k_name: REPLICATE, v_name: REPLICATE}
    return Strategy(inputs=inputs, output=form.output, local=attend, note="keys and values gathered")
