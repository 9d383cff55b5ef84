"""Graphs as text: one line a node with its sizes and its layout; and sizes as numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..layout.infer import LAYOUT
from ..layout.placement import Partial, Replicate, Shard


def size_of(value: Any) -> int:
    """A size as a number: of a symbol, the one that the graph was compiled with. Installs no guard."""
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        return int(hint) if hint is not None else 0
    return int(value)


def nbytes(value: Any) -> int:
    """Bytes of a tensor at the sizes of the compilation; of several, their sum."""
    if isinstance(value, (list, tuple)):
        return sum(map(nbytes, value))
    if not isinstance(value, torch.Tensor):
        return 0
    count = value.element_size()
    for size in value.shape:
        count *= size_of(size)
    return count


def shape_text(value: Any) -> list[str]:
    """Sizes of a tensor as text; of several, those of the first."""
    if isinstance(value, (list, tuple)):
        value = next((item for item in value if isinstance(item, torch.Tensor)), None)
    return [str(size) for size in value.shape] if isinstance(value, torch.Tensor) else []


def dtype_text(value: Any) -> str:
    """Dtype of a tensor without the module's name; of several, that of the first."""
    if isinstance(value, (list, tuple)):
        value = next((item for item in value if isinstance(item, torch.Tensor)), None)
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""


def layout_of(node: fx.Node) -> Any:
    """The layout of a node; of several results, that of the first which has one."""
    layout = node.meta.get(LAYOUT)
    if isinstance(layout, (list, tuple)):
        return next((item for item in layout if item is not None), None)
    return layout


def kind_of(node: fx.Node) -> str:
    """ "sharded", "replicated", "partial", or "number" for what is no tensor."""
    layout = layout_of(node)
    if not shape_text(node.meta.get("val")) and not isinstance(node.meta.get("val"), torch.Tensor):
        return "number"
    if isinstance(layout, Shard):
        return "sharded"
    if isinstance(layout, Partial):
        return "partial"
    return "replicated" if layout is None or isinstance(layout, Replicate) else "number"


def operator_name(target: Any) -> str:
    """ "aten.linear.default", "mul", ..."""
    return str(target) if isinstance(target, torch._ops.OpOverload) else str(getattr(target, "__name__", target))


def graph_text(gm: fx.GraphModule) -> str:
    """One line a call: ``name = operator(arguments)    # [sizes] layout``; numbers are left out."""
    lines = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or kind_of(node) == "number":
            continue
        arguments = [_argument(arg) for arg in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
        call = f"{node.name} = {operator_name(node.target)}({', '.join(arguments)})"
        sizes = f"[{', '.join(shape_text(node.meta.get('val')))}]"
        layout = layout_of(node)
        lines.append(f"{call.ljust(67)} # {sizes}{f' {layout}' if layout is not None else ''}")
    return "\n".join(lines)


def _argument(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        value = arg.meta.get("val")
        return str(value) if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool) else arg.name
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_argument, arg))}]"
    return repr(arg) if isinstance(arg, str) else str(arg)
