"""A compile report from what the pipeline holds: the annotated whole program and the program of one rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from ..layout.infer import STRATEGY
from ..layout.nodes import FUSION
from ..layout.placement import Replicate
from ..layout.stretch import TILED
from ..location import user_location
from .graph_text import dtype_text, graph_text, kind_of, layout_of, nbytes, operator_name, shape_text, size_of
from .records import CollectiveRecord, Gathering, GraphReport, MaskRecord, NodeRecord, PassRecord
from .traffic import is_collective, reason_of, traffic_of

_VALUES = ("placeholder", "get_attr", "call_function")
_ATTENTION = ("aten.scaled_dot_product_attention.default", "autosp.block_attention.default")
_OPEN = 2**40  # a bound that is none
_ROOT = re.compile(r"^L\['(?:self|fn|args)'\](?:\[\d+\])?|^L(?=\[)")


def pass_record(name: str, work: Any) -> PassRecord:
    """The graph after a pass, as text and as counts of operators."""
    operators = Counter(
        operator_name(node.target)
        for node in work.graph.graph.nodes
        if node.op == "call_function" and kind_of(node) != "number"
    )
    return PassRecord(name, graph_text(work.graph), dict(sorted(operators.items())), work.seconds.get(name, 0.0))


def _attentions(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and operator_name(n.target) in _ATTENTION]


def masks_of(gm: fx.GraphModule) -> dict[str, str]:
    """For each attention of a captured graph with a mask tensor, the sizes of the mask."""
    found = {}
    for node in _attentions(gm):
        mask = _mask(node)
        if isinstance(mask, fx.Node):
            found[node.name] = f"[{', '.join(shape_text(mask.meta.get('val')))}]"
    return found


def build_report(work: Any, passes: Sequence[PassRecord], masks: Mapping[str, str]) -> GraphReport:
    """The report of a program that is complete."""
    whole = work.annotated
    report = _start(work, whole, passes)
    origins = {node.name: node for node in whole.graph.nodes}
    report.collectives = _collectives(work, origins)
    report.masks = [_mask_record(node, masks) for node in _attentions(whole)]
    report.fused = _fused(passes)
    report.gathered = [
        Gathering(item.operator, item.location, item.reason, sum(_bytes(*size) for size in item.sizes))
        for item in work.gathered
    ]
    return report


def build_refused(error: Any, work: Any, passes: Sequence[PassRecord]) -> GraphReport:
    """The report of a graph that a pass refused: what is known until there, and why it ended."""
    report = _start(work, work.graph, passes)
    report.refused = {
        "operator": error.operator,
        "location": error.location,
        "reason": error.reason,
        "remedy": error.remedy,
    }
    return report


def _start(work: Any, gm: fx.GraphModule, passes: Sequence[PassRecord]) -> GraphReport:
    nodes = [_node_record(node, work) for node in gm.graph.nodes if node.op in _VALUES]
    # what no other node reads is there for the sizes only
    shown = [node for node in nodes if node.kind != "number"]
    return GraphReport(work.axis.size, work.axis.rank, _sizes(gm), shown, passes=list(passes))


def _node_record(node: fx.Node, work: Any) -> NodeRecord:
    value, layout = node.meta.get("val"), layout_of(node)
    operator = operator_name(node.target)
    if node.op == "placeholder":
        operator = "parameter" if node.name in work.parameters else "input"
    elif node.op == "get_attr":
        operator = "constant"
    return NodeRecord(
        name=node.name,
        label=label_of(node),
        operator=operator,
        layer=layer_of(node),
        location=user_location(node),
        shape=shape_text(value),
        dtype=dtype_text(value),
        bytes=nbytes(value),
        layout="" if layout is None else str(layout),
        kind=kind_of(node),
        note=_note(node),
        inputs=[source.name for source in node.all_input_nodes if kind_of(source) != "number"],
    )


def _note(node: fx.Node) -> str:
    """What the rule says about how the operator runs, whether it runs a part of the tokens at a time, and for a loss
    whether its LM head was fused into it."""
    notes = [node.meta[STRATEGY].note] if STRATEGY in node.meta else []
    if TILED in node.meta:
        notes.append(f"in {node.meta[TILED].tiles} parts of the tokens")
    notes.append(node.meta.get(FUSION, ""))
    return ", ".join(note for note in notes if note)


def layer_of(node: fx.Node) -> str:
    """Path of the innermost module whose forward made the node, as the model names it."""
    stack = node.meta.get("nn_module_stack")
    return module_path(str(list(stack.values())[-1][0])) if stack else ""


def label_of(node: fx.Node) -> str:
    """The name that the model knows a value by, where it knows it."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    text = module_path(str(name() if callable(name) else name))
    return text.removeprefix("kwargs.") or node.name


def module_path(source: str) -> str:
    """ "model.layers.0.mlp" of Dynamo's ``L['self'].model.layers._modules['0']._modules['mlp']``."""
    text = re.sub(r"\._(?:modules|parameters|buffers)(?=\[)", "", _ROOT.sub("", source))
    return re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", text).strip(".")


def _sizes(gm: fx.GraphModule) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, torch.SymInt) and len(free_symbols(size)) == 1:
                sizes.setdefault(str(size), size_of(size))
    return sizes


def _bytes(shape: Iterable[Any], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size_of(size)
    return count


def origin_of(node: fx.Node) -> str:
    """Name of the node of the whole program that a node of the local one comes from; empty for none."""
    sources = node.meta.get("from_node")
    return sources[-1].name if sources else ""


def _collectives(work: Any, origins: Mapping[str, fx.Node]) -> list[CollectiveRecord]:
    """Communication of the sequence group, then that of the vocabulary's group where there is one."""
    local = work.localized
    records = _collectives_of(local, work.axis, origins, _differentiable(local, work.local_inputs))
    if work.vocabulary is not None and work.graph is not local:
        # a second trace: its nodes come from those of the first
        within = {node.name: node for node in local.graph.nodes}
        records += _collectives_of(work.graph, work.vocabulary, within, _differentiable(work.graph, work.local_inputs))
    return records


def _collectives_of(
    gm: fx.GraphModule, axis: Any, origins: Mapping[str, fx.Node], differentiable: set[str]
) -> list[CollectiveRecord]:
    records = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or not is_collective(node, axis.group):
            continue
        origin = origin_of(node)
        whole = origins.get(origin)
        sources, after = _sources(node, origin)
        if after and whole is not None:
            edges = [[origin, user.name] for user in whole.users if user.op == "call_function"]
        else:
            edges = [[source, origin] for source in sources if source in origins]
        forward, backward = traffic_of(node, axis.size, axis.rank, node.name in differentiable)
        named = [label_of(origins[name]) for name in sources if name in origins]
        records.append(
            CollectiveRecord(
                name=node.name,
                operator=operator_name(node.target),
                origin=origin,
                layer=layer_of(whole) if whole is not None else "",
                location=user_location(whole) if whole is not None else "",
                reason=reason_of(node, whole, after, named),
                shape=shape_text(node.meta.get("val")),
                dtype=dtype_text(node.meta.get("val")),
                forward_bytes=forward,
                backward_bytes=backward,
                edges=edges,
            )
        )
    return records


def _sources(node: fx.Node, origin: str) -> tuple[list[str], bool]:
    """Nodes of the whole program whose values a collective moves; and whether it moves the result of its own
    operator (the way back of an exchange) instead.
    """
    found: list[str] = []
    after = False
    queue, seen = list(node.all_input_nodes), set()
    while queue:
        source = queue.pop()
        if source in seen or kind_of(source) == "number":
            continue
        seen.add(source)
        if source.op == "placeholder":
            found.append(source.name)
        elif origin_of(source) != origin:
            found.append(origin_of(source))
        elif operator_name(source.target) == "autosp.all_to_all.default":
            after = True
        else:
            queue.extend(source.all_input_nodes)
    return sorted(set(found)), after


def _differentiable(gm: fx.GraphModule, inputs: Sequence[Any]) -> set[str]:
    """Names of the nodes of a local program through which a gradient flows."""
    found: set[str] = set()
    enabled = True
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, inputs, strict=False):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            found.add(node.name)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
            continue
        value = node.meta.get("val")
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        floating = isinstance(first, torch.Tensor) and (first.is_floating_point() or first.is_complex())
        detached = node.target is torch.ops.aten.detach.default
        if enabled and floating and not detached and any(n.name in found for n in node.all_input_nodes):
            found.add(node.name)
    return found


def _mask(node: fx.Node) -> Any:
    return node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")


def _mask_record(node: fx.Node, captured: Mapping[str, str]) -> MaskRecord:
    if operator_name(node.target) == _ATTENTION[1]:
        return _program_record(node)
    mask = _mask(node)
    causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    size = 0
    if isinstance(mask, fx.Node):
        value = mask.meta.get("val")
        kind = "whole on every rank" if isinstance(layout_of(mask), Replicate) else str(layout_of(mask))
        became, size = f"kept as a tensor [{', '.join(shape_text(value))}] {dtype_text(value)}, {kind}", nbytes(value)
    elif node.name in captured:
        shown = captured[node.name]
        became = (
            f"proven causal: the {shown} tensor is gone" if causal else f"hides nothing: the {shown} tensor is gone"
        )
    else:
        became = "causal, no tensor in the model" if causal else "none"
    return MaskRecord(node.name, layer_of(node), became, size)


def _program_record(node: fx.Node) -> MaskRecord:
    """A mask that is computed block by block: what it reads, and the distances that it leaves."""
    arguments: tuple[Any, ...] = node.args
    leaves, program, (low, high) = arguments[3], arguments[5], arguments[9]
    size = sum(nbytes(leaf.meta.get("val")) for leaf in leaves)
    parts = []
    if program:
        what = "bias" if '"score"' in program else "mask"
        parts.append(f"a {what} computed block by block from {len(leaves)} tensors")
    if low > -_OPEN or high < _OPEN:
        ends = [f"at least {low}" if low > -_OPEN else "", f"at most {high}" if high < _OPEN else ""]
        parts.append("query - key " + " and ".join(end for end in ends if end))
    return MaskRecord(node.name, layer_of(node), ", ".join(parts) or "none", size)


def _fused(passes: Sequence[PassRecord]) -> list[str]:
    """What the passes before inference took away and put in, by their counts of operators."""
    sentences = []
    for before, after in zip(passes, passes[1:], strict=False):
        if after.name in ("localize", "verify"):
            break
        gone, new = (
            (Counter(before.operators) - Counter(after.operators)),
            Counter(after.operators) - Counter(before.operators),
        )
        if gone or new:
            listing = [f"-{count} {name}" for name, count in sorted(gone.items())]
            listing += [f"+{count} {name}" for name, count in sorted(new.items())]
            sentences.append(f"{after.name}: {', '.join(listing)}")
    return sentences
