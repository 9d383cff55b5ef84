"""Which inputs of a graph run over the sequence, and how each one arrives."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from .errors import UnsupportedGraphError
from .inputs import read_tag, recognise
from .layout.axis import Axis
from .layout.infer import Source
from .layout.placement import shard_of_dim
from .location import user_location

log = logging.getLogger("autosp")


@dataclass
class InputSources:
    """The inputs of one graph, by their place among its placeholders.

    Args:
        whole: fakes of the whole inputs.
        local: fakes of what a rank's program gets (differs where a DTensor comes in).
        sources: layout and home of the inputs that run over the sequence.
        keys: key of each whole input that ranks of a group must get alike.
        parameters: places of the parameters.
        sharded: places of the DTensors that come in cut over the sequence, with the cut dimension.
    """

    whole: list[Any]
    local: list[Any]
    sources: dict[int, Source] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    parameters: list[int] = field(default_factory=list)
    sharded: dict[int, int] = field(default_factory=dict)


def find_sources(gm: fx.GraphModule, fakes: Sequence[Any], axis: Axis) -> InputSources:
    """Recognise the inputs of a graph by their tags, or else by the names of Hugging Face forwards.

    Raises:
        UnsupportedGraphError: no input runs over the sequence; the error lists the inputs.
    """
    found = InputSources(whole=list(fakes), local=list(fakes))
    placeholders = gm.graph.find_nodes(op="placeholder")
    tagged = any(
        isinstance(v, torch.Tensor) and read_tag(n.meta.get("tensor_dict") or {}, v.dim()) is not None
        for n, v in zip(placeholders, fakes, strict=True)
    )
    for index, (node, value) in enumerate(zip(placeholders, fakes, strict=True)):
        if not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, torch.nn.Parameter):
            found.parameters.append(index)
            continue
        if isinstance(value, DTensor):
            _add_dtensor(found, index, value, axis)
            continue
        tag = read_tag(node.meta.get("tensor_dict") or {}, value.dim()) if tagged else _by_name(node, value)
        if tag is not None:
            _add_tagged(found, index, value, *tag)
    if not found.sources and not found.keys and axis.size > 1:
        _nothing_found(gm, placeholders, fakes)
    return found


def source_name(node: fx.Node) -> str:
    """The user's own name of a graph input: the last key or attribute of Dynamo's source, or the placeholder's name."""
    match = re.search(r"(?:\['|\.)(\w+)(?:'\])?$", _source_text(node))
    return match.group(1) if match else node.name


def parameter_name(node: fx.Node) -> str:
    """The name of a parameter in its model ("layers.0.weight"), or of its placeholder where Dynamo does not tell."""
    parts = re.findall(r"_(?:modules|parameters)\['([^']+)'\]", _source_text(node))
    return ".".join(parts) or node.name


def _source_text(node: fx.Node) -> str:
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    text = name() if callable(name) else name
    return text if isinstance(text, str) else ""


def _by_name(node: fx.Node, value: torch.Tensor) -> tuple[str, int] | None:
    text = _source_text(node)
    if "_modules" in text or "_parameters" in text or "_buffers" in text:
        return None
    return recognise(source_name(node), value.dim())


def _add_tagged(found: InputSources, index: int, value: torch.Tensor, key: str, dim: int) -> None:
    found.keys[index] = key
    if key == "attention_mask":
        # A mask is made for the whole sequence and used whole; it never starts sharded computation.
        return
    found.sources[index] = Source(home=shard_of_dim(value.shape, dim))


def _add_dtensor(found: InputSources, index: int, value: DTensor, axis: Axis) -> None:
    """What an earlier graph returned sharded: whole for the inference, local rows for the program of a rank."""
    placement = value.placements[0]
    is_ours = len(value.placements) == 1 and value.device_mesh.get_group().group_name == axis.group
    # A strided shard is a subclass, and another cut.
    if not is_ours or not isinstance(placement, ShardPlacement) or type(placement) is not ShardPlacement:
        raise UnsupportedGraphError(
            f"an input is a DTensor with placements {value.placements} over {value.device_mesh}",
            operator="autosp",
            remedy="keep a loss on vocabulary-sharded logits in the same graph as the model, and otherwise "
            f"pass plain tensors, or DTensors sharded over the {axis.name!r} mesh of {axis.size} ranks",
        )
    shape = list(value.shape)
    cut = shard_of_dim(shape, placement.dim)
    local_shape = axis.local_shape(shape, cut)
    make = value._local_tensor.new_empty
    found.whole[index] = make(shape).requires_grad_(value.requires_grad)
    found.local[index] = make(local_shape).requires_grad_(value.requires_grad)
    found.sources[index] = Source(placement=cut, home=cut)
    found.sharded[index] = placement.dim


def _nothing_found(gm: fx.GraphModule, placeholders: Sequence[fx.Node], fakes: Sequence[Any]) -> None:
    inputs = [
        f"{source_name(node)} {tuple(value.shape)}"
        for node, value in zip(placeholders, fakes, strict=True)
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    ]
    raise UnsupportedGraphError(
        "no input of this graph is known to run over the sequence; its inputs are: " + ", ".join(inputs or ["none"]),
        operator="autosp",
        location=next((user_location(n) for n in gm.graph.nodes if n.op == "call_function"), ""),
        remedy="tag them with autosp.prepare_autosp_inputs(...) or autosp.prepare_batch(...), or call the model with "
        "the argument names of Hugging Face forwards (input_ids, inputs_embeds, labels, position_ids, attention_mask)",
    )
