"""Regions under ``vmap``, ``grad``, ``vjp`` or ``jvp`` in a Dynamo graph, as the plain operators that they come to.

Dynamo writes these as calls that raise and lower a level, with tensors of that level between. A pre-dispatch trace
cannot see such tensors and would bake what is computed from them into the graph as constants of one example. Below
dispatch they are plain tensors (under ``vmap`` of one dimension more), and derivatives are operators: there a region is
traced first, and what it came to is run in its place.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._pytree import tree_map_only

from .errors import UnsupportedGraphError
from .location import user_location

_WRITES = (
    operator.setitem,
    *(getattr(operator, n) for n in dir(operator) if n.startswith("i") and hasattr(operator, n[1:])),
)
_RAISES = ("_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting")
_PULLS = "_autograd_grad"
_LOWERS = ("_vmap_decrement_nesting", "_grad_decrement_nesting", "_jvp_decrement_nesting")


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
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in given):
            self._refuse_writes_without_gradient()
        with disable_proxy_modes_tracing():
            plain = make_fx(_RegionInterpreter(self.body).run)(*given)
        self._refuse_detached_derivative(plain)
        return dict(zip(self.outputs, fx.Interpreter(plain).run(*given), strict=True))

    def _refuse_detached_derivative(self, plain: fx.GraphModule) -> None:
        """Autograd detaches the results that it saves. A trace looks through that, so what is left was detached by the
        model; where it is not certain which of the two it was, a second derivative would be missing.
        """
        at = next((node for node in self.nodes if _name(node) == _PULLS), None)
        left = plain.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)
        if at is not None and any(node.users for node in left):
            raise UnsupportedGraphError(
                "a value is detached where the model differentiates within its forward (torch.func.grad, vjp, jacrev)",
                operator="aten.detach.default",
                location=user_location(at),
                remedy="write the derivative out as operators, or detach the value before",
            )

    def _refuse_writes_without_gradient(self) -> None:
        """Under no_grad what is written keeps the gradient of what was there before, which no operator can say."""
        outside = within = torch.is_grad_enabled()
        for node in self.nodes:
            if node.target is torch._C._set_grad_enabled:
                within = bool(node.args[0])
            elif outside and not within and _writes(node):
                raise UnsupportedGraphError(
                    "a value is written in place under no_grad and vmap",
                    operator=str(node.target),
                    location=user_location(node),
                    remedy="write it out of place",
                )


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.target in _WRITES or (name.endswith("_") and not name.endswith("__"))


class _RegionInterpreter(fx.Interpreter):
    """Below dispatch nothing says whether a gradient is wanted: what a region computes under no_grad is detached."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__(body)
        self._wants_gradients = torch.is_grad_enabled()

    def run_node(self, n: fx.Node) -> Any:
        operands = [self.env[node] for node in n.all_input_nodes]
        result = super().run_node(n)
        if torch.is_grad_enabled() or not self._wants_gradients or not n.op.startswith("call_"):
            return result
        if any(result is x for x in operands):
            return result  # a cast or copy that was none: the operand itself, gradient and all
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def vmap_regions(gm: fx.GraphModule) -> dict[fx.Node, Region]:
    """Each node inside a region with its region; nested ones are one. A region of ``vjp`` reaches to its pullbacks."""
    found: dict[fx.Node, Region] = {}
    inside: list[fx.Node] = []
    level = 0
    pulls = sum(_name(node) == _PULLS for node in gm.graph.nodes)  # a pullback is called after its level is lowered
    differentiates = False
    for node in gm.graph.nodes:
        name = _name(node)
        level += name in _RAISES
        level -= name in _LOWERS
        pulls -= name == _PULLS
        differentiates = differentiates or name == _RAISES[1]
        if level or inside or name in _LOWERS:
            inside.append(node)
        if inside and level == 0 and not (differentiates and pulls):
            found.update(dict.fromkeys(inside, _region(gm, inside)))
            inside, differentiates = [], False
    return found


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


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
