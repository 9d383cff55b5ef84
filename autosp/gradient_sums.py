"""A pass on Inductor's backward graph: sums of parameter gradients are joined and run under other work.

A gradient that is summed over the group leaves the backward as ``all_reduce`` and ``wait_tensor``, one pair a
parameter, each awaited at once. Inductor keeps collectives in their order and starts none before the one ahead of it
was awaited, so moving waits alone gains nothing. Here the sums whose gradients are ready between two exchanges of
attention become one ``all_reduce_coalesced``, started right after the second exchange has arrived and awaited at the
end of the graph: it runs while attention, or the layer before, is differentiated.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_c10d = torch.ops._c10d_functional


def _is_wait(node: fx.Node) -> bool:
    return node.target is _c10d.wait_tensor.default


def _is_gradient_sum(node: fx.Node) -> bool:
    """The wait of a sum that is needed by nothing but the caller of the graph."""
    source = node.args[0] if _is_wait(node) else None
    if not isinstance(source, fx.Node) or source.target is not _c10d.all_reduce.default:
        return False
    return len(source.users) == 1 and all(user.op == "output" for user in node.users)


def join_gradient_sums(graph: fx.Graph) -> int:
    """Join the sums of gradients of ``graph`` in place.

    Sums of one group, reduction, dtype and device that are ready before the same awaited collective are joined; the
    order of all other nodes stays. Graphs of all ranks of a group change alike, since their nodes are alike.

    Returns:
        The number of joined collectives; 0 leaves the graph as it was.
    """
    nodes = list(graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    waits = [node for node in nodes if _is_gradient_sum(node)]
    barriers = [node for node in nodes if _is_wait(node) and not _is_gradient_sum(node)]
    buckets: dict[Any, list[fx.Node]] = {}
    for wait in waits:
        gradient, *how = wait.args[0].args
        value = gradient.meta["val"]
        after = next((node for node in barriers if place[node] > place[gradient]), None)
        buckets.setdefault((after, *how, value.dtype, value.device), []).append(wait)
    (output,) = graph.find_nodes(op="output")
    for (after, *_), members in buckets.items():
        gradients = [wait.args[0].args[0] for wait in members]
        with graph.inserting_before(output) if after is None else graph.inserting_after(after):
            joined = graph.call_function(_c10d.all_reduce_coalesced.default, (gradients, *members[0].args[0].args[1:]))
        joined.meta["val"] = [wait.args[0].meta["val"] for wait in members]
        with graph.inserting_before(output):
            for index, wait in enumerate(members):
                item = graph.call_function(operator.getitem, (joined, index))
                done = graph.call_function(_c10d.wait_tensor.default, (item,))
                item.meta["val"], done.meta["val"] = wait.args[0].meta["val"], wait.meta["val"]
                wait.replace_all_uses_with(done)
    for wait in waits:
        start = wait.args[0]
        graph.erase_node(wait)
        graph.erase_node(start)
    return len(buckets)


class PassWithOthers(CustomGraphPass):
    """A pass of ours beside what a user has set: no pass, one, or (torch 2.13) several.

    Args:
        others: the user's; cached only where they say how they can be told apart.
    """

    file: str
    """The source of the pass, by whose text it is told apart."""

    def __init__(self, others: Any = None) -> None:
        several = isinstance(others, (list, tuple))
        self.others: tuple[Any, ...] = tuple(others) if several else () if others is None else (others,)

    def uuid(self) -> Any:
        others = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.others]
        return None if None in others else (get_hash_for_files((self.file,)), *others)


class JoinGradientSums(PassWithOthers):
    """``join_gradient_sums`` as Inductor takes passes, followed by the others."""

    file = __file__

    def __call__(self, graph: fx.Graph) -> None:
        join_gradient_sums(graph)
        for each in self.others:
            each(graph)
