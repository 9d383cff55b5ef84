"""Regions under ``vmap`` in a Dynamo graph, as the plain operators that they come to.

Dynamo writes ``vmap`` as calls that raise and lower a level, with tensors of that level between. A pre-dispatch trace
cannot see such tensors and would bake what is computed from them into the graph as constants of one example. Below
dispatch they are plain tensors of one dimension more: there a region is traced first, and what it came to is run in
its place.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

_RAISES, _LOWERS = "_vmap_increment_nesting", "_vmap_decrement_nesting"


@dataclass(frozen=True)
class Region:
    """The nodes of a region in order, what they take from before it, and which of them are used after it."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    body: fx.GraphModule

    def run(self, given: list[Any]) -> dict[fx.Node, Any]:
        """Trace the region below dispatch, run what it came to under the trace at hand: from the values of ``inputs``
        to those of ``outputs``.
        """
        with disable_proxy_modes_tracing():
            plain = make_fx(fx.Interpreter(self.body).run)(*given)
        return dict(zip(self.outputs, fx.Interpreter(plain).run(*given), strict=True))


def vmap_regions(gm: fx.GraphModule) -> dict[fx.Node, Region]:
    """Each node inside a region with its region; nested ones are one."""
    found: dict[fx.Node, Region] = {}
    inside: list[fx.Node] = []
    level = 0
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        level += name == _RAISES
        if level:
            inside.append(node)
        if name == _LOWERS:
            level -= 1
            if level == 0:
                found.update(dict.fromkeys(inside, _region(gm, inside)))
                inside = []
    return found


def _region(gm: fx.GraphModule, nodes: list[fx.Node]) -> Region:
    members = set(nodes)
    taken = itertools.chain.from_iterable(node.all_input_nodes for node in nodes)
    inputs = [node for node in dict.fromkeys(taken) if node not in members]
    outputs = [node for node in nodes if any(user not in members for user in node.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Region(nodes, inputs, outputs, fx.GraphModule(gm, graph))
