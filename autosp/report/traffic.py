"""Bytes that a rank sends for each communication, and why it is there.

Counted for the usual ring algorithms over ``P`` ranks, ``n`` bytes being the larger of what goes in and what comes
out: all-gather, reduce-scatter and all-to-all send ``n (P - 1) / P`` a rank, all-reduce ``2 n (P - 1) / P``
(Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005). Pieces of an
all-to-all may differ in size, as they do for heads that the group does not divide; all but a rank's own are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..layout.infer import STRATEGY
from .graph_text import nbytes, operator_name, size_of


def is_collective(node: fx.Node, group: str) -> bool:
    """Whether a node of a local program talks to ``group``, in its forward or in its backward."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "autosp":
        return False
    return group in node.args or group in node.kwargs.values()


def _name(node: fx.Node) -> str:
    return operator_name(node.target).split(".")[1]


def _exchanged(node: fx.Node, rank: int) -> tuple[int, int]:
    """Bytes of the pieces that ``rank`` sends to others and receives from others."""
    number = lambda x: size_of(x.meta["val"] if isinstance(x, fx.Node) else x)  # noqa: E731
    pieces: tuple[Any, ...] = node.args
    sent, received = (sum(number(x) for place, x in enumerate(part) if place != rank) for part in pieces[1:3])
    width = node.meta["val"].element_size()
    return sent * width, received * width


def traffic_of(node: fx.Node, ranks: int, rank: int, has_gradient: bool) -> tuple[int, int]:
    """Bytes that ``rank`` of a group of ``ranks`` sends for ``node`` in the forward and in the backward of a step."""
    name = _name(node)
    if name == "all_to_all":
        sent, received = _exchanged(node, rank)
        return sent, received if has_gradient else 0
    into = max((nbytes(source.meta.get("val")) for source in node.all_input_nodes), default=0)
    out = nbytes(node.meta.get("val"))
    share = (ranks - 1) / ranks
    once, twice = round(max(into, out) * share), round(2 * max(into, out) * share)
    if name == "shard_sequence":
        return 0, once if has_gradient else 0
    if name == "enter_sharded":
        return 0, twice if has_gradient and "sum" in node.args else 0
    if name == "all_gather_sequence":
        scattered = bool(node.args[-2])
        return once, once if has_gradient and scattered else 0
    if name == "all_reduce_sum":
        return twice, 0
    if name == "ring_attention":
        arguments: tuple[Any, ...] = node.args
        keys = [source.meta["val"] for source in arguments[1:3]]
        passed = sum(map(nbytes, keys)) * (ranks - 1)
        # The gradients go round with them, in the width in which they are summed, and once more to their owners.
        wide = sum(nbytes(key) // key.element_size() * max(4, key.element_size()) for key in keys) * ranks
        return passed, passed + wide if has_gradient else 0
    if name == "aggregate_loss":
        return round(2 * share * sum(nbytes(source.meta.get("val")) for source in node.all_input_nodes)), 0
    return once, once if has_gradient else 0


def reason_of(node: fx.Node, whole: fx.Node | None, after: bool, sources: Sequence[str]) -> str:
    """One sentence: what the communication is for."""
    name = _name(node)
    operator = operator_name(whole.target).removesuffix(".default") if whole is not None else "an output"
    what = ", ".join(sources) or (f"the result of {operator}" if whole is not None else "a value")
    if name == "enter_sharded":
        return _edge_reason(node, what)
    if name == "all_to_all":
        if whole is not None and "zigzag" in getattr(whole.meta.get(STRATEGY), "note", ""):
            back = "back" if after else "for an early and a late one"
            return f"{operator} is causal: half blocks of rows are exchanged {back}, so that all ranks have equal work"
        if after:
            return f"{operator} is done: heads are exchanged back for tokens"
        return f"{operator} needs every token: {what} exchange tokens for heads"
    reasons: dict[str, Any] = {
        "shard_sequence": f"{what} is whole and meets sharded computation: this rank's rows are taken, nothing is sent",
        "all_gather_sequence": f"{operator} needs {what} whole",
        "reduce_scatter_sequence": f"ranks hold parts of {what} for all tokens: sums are cut to this rank's",
        "all_reduce_sum": f"each rank holds a part of the sum that {what} is",
        "ring_attention": "keys and values go round, each rank attends with every block of them",
        "aggregate_loss": "the loss of the whole sequence from the sums and counts of all ranks",
    }
    return reasons.get(name, f"{operator} talks to the group about {what}")


def _edge_reason(node: fx.Node, what: str) -> str:
    if "sum" in node.args:
        return f"{what} meets the tokens of one rank: its gradient is summed over the group"
    return f"{what} meets the tokens of one rank: its gradient is scaled for the engine that reduces it"
