"""``autosp::autograd_function``: a ``torch.autograd.Function`` of the model as one operator, with its own backward.

Dynamo traces the two methods of such a function to a forward and a backward body. Traced again before dispatch, the
forward would be inlined and the backward lost; as an operator both stay, until autograd is traced and the bodies run.
A body is found by a name made from its code, so that the same program has the same name in every process.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback as fx_traceback

from ._library import define


@dataclass(frozen=True)
class Bodies:
    """What Dynamo traced of a function.

    Args:
        forward: takes the arguments, gives ``(results, values for the backward)``.
        backward: takes gradients of the results and those values, gives a gradient or None for each argument.
        settings: further keywords of torch's own operator, which differ from version to version.
        is_tensor: for each argument whether it is a tensor (a number otherwise).
        single: the function returns a tensor, not a tuple.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    settings: dict[str, Any]
    is_tensor: tuple[bool, ...]
    single: bool

    def arguments(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Any]:
        """Tensors and numbers in the order of the bodies."""
        rest, others = iter(tensors), iter(numbers)
        return [next(rest) if is_tensor else next(others) for is_tensor in self.is_tensor]


_BODIES: dict[str, Bodies] = {}


def remember(bodies: Bodies) -> str:
    """The name under which the operator finds these bodies."""
    text = "\n".join(
        [*(_text(body) for body in (bodies.forward, bodies.backward)), repr(sorted(bodies.settings.items())),
         repr(bodies.is_tensor)]
    )  # fmt: skip
    name = hashlib.sha256(text.encode()).hexdigest()
    _BODIES.setdefault(name, bodies)
    return name


def _text(body: fx.GraphModule) -> str:
    parts = [body.code]
    for node in body.graph.find_nodes(op="get_attr"):
        value = body.get_submodule(node.target) if hasattr(body, "_modules") and node.target in body._modules else None
        # A constant is the process's own: its address keeps two functions apart.
        parts.append(_text(value) if isinstance(value, fx.GraphModule) else f"{node.target} at {id(body)}")
    return "\n".join(parts)


def _plain(tensors: Sequence[Tensor], numbers: Sequence[Any], name: str, use: str) -> list[Tensor]:
    bodies = _BODIES[name]
    results, _ = fx.Interpreter(bodies.forward).run(*bodies.arguments(tensors, numbers))
    known = {x.untyped_storage()._cdata for x in tensors}
    listed = [results] if bodies.single else list(results)
    return [x.clone() if x.untyped_storage()._cdata in known else x for x in listed]


def _marked(body: fx.GraphModule) -> fx.GraphModule:
    """The body with what the node that runs it says of recomputation: torch runs a body node by node, each with its own
    annotations, so that what a node of the body does not say is not said.
    """
    meta = fx_traceback.get_current_meta()
    marks = {key: meta[key] for key in ("recompute", "ac_graph_id") if key in meta}
    if not marks:
        return body
    marked = fx.GraphModule(body, copy.deepcopy(body.graph))
    for node in marked.graph.nodes:
        node.meta.update(marks)
    return marked


def _with_autograd(tensors: Sequence[Tensor], numbers: Sequence[Any], name: str, use: str) -> list[Tensor]:
    bodies = _BODIES[name]
    results = torch.ops.higher_order.autograd_function_apply(
        _marked(bodies.forward), bodies.backward, *bodies.arguments(tensors, numbers), **bodies.settings
    )
    return [results] if bodies.single else list(results)


define(
    "autograd_function(Tensor[] tensors, SymInt[] numbers, str name, str use) -> Tensor[]",
    forward=_plain,
    fake=_plain,
    autograd=_with_autograd,
)
