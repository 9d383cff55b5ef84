"""Which strategy an attention call gets, and why."""

from __future__ import annotations

import logging
from dataclasses import replace

from ..call import Refusal, Strategy
from .estimate import Estimate
from .forms import Form
from .strategies import STRATEGIES

log = logging.getLogger("autosp")


def attention_strategy(form: Form) -> Strategy:
    """The strategy that the setting names, or the cheapest one under "auto"; its note says why.

    Raises:
        Refusal: the strategy that was asked for cannot serve this call.
    """
    wanted = form.call.axis.attention
    if wanted != "auto":
        why_not = STRATEGIES[wanted].refusal(form)
        if why_not:
            raise Refusal(
                f'attention: "{wanted}" cannot serve this call: {why_not}',
                f'set attention: "auto" or {_alternatives(form)}',
            )
        return STRATEGIES[wanted].build(form)
    costs = possible(form)
    best = min(costs, key=lambda name: _order(costs[name]))
    strategy = STRATEGIES[best].build(form)
    reason = f"auto: {costs[best]}"
    others = [f"{name} {cost.share:.1%}, {cost.moved:.0f}, {cost.held:.0f}" for name, cost in costs.items()]
    log.debug("%s: %s (%s)", form.call.node.name, strategy.note, "; ".join(others))
    return replace(strategy, note=f"{strategy.note} ({reason})")


def possible(form: Form) -> dict[str, Estimate]:
    """The strategies that can serve the call, with what each costs its busiest rank."""
    return {name: module.estimate(form) for name, module in STRATEGIES.items() if not module.refusal(form)}


def _order(cost: Estimate) -> tuple[float, float, float]:
    """Attention is quadratic and traffic linear in the length, so work counts first; then traffic, then memory."""
    return round(cost.share, 6), cost.moved, cost.held


def _alternatives(form: Form) -> str:
    return ", ".join(f'"{name}"' for name in possible(form))
