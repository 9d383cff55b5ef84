"""Where in the user's model a graph node comes from: its line, its layer, its checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep


# What says where a node comes from; an operator that a pass puts in another's place keeps it.
ORIGIN = ("stack_trace", "nn_module_stack", "recompute", "ac_graph_id")


def kept_meta(node: fx.Node) -> dict[str, Any]:
    """The entries of a node's ``meta`` that an operator in its place keeps: line, layer and checkpoint."""
    return {key: node.meta[key] for key in ORIGIN if key in node.meta}


def user_location(node: fx.Node | Mapping[str, Any]) -> str:
    """``file:line, in function: code`` of the innermost frame outside torch that made the node (inside torch when there
    is no other); empty when the graph carries none.
    """
    meta = node.meta if isinstance(node, fx.Node) else node
    lines = (meta.get("stack_trace") or "").strip().splitlines()
    frames = [(index, match) for index, line in enumerate(lines) if (match := _FRAME.search(line))]
    users = [frame for frame in frames if not frame[1].group(1).startswith(_TORCH)]
    if not frames:
        return ""
    index, match = (users or frames)[-1]
    code = lines[index + 1].strip() if index + 1 < len(lines) and not _FRAME.search(lines[index + 1]) else ""
    where = f"{match.group(1)}:{match.group(2)}, in {match.group(3).strip()}"
    return f"{where}: {code}" if code else where


_NUMBERED = re.compile(
    r"(?:^|\.)(?:layers?|h|blocks?|block)\.(\d+)(?:\.|$|')|(?:layers?|h|blocks?)\._modules\['(\d+)'\]"
)


def module_stack(node: fx.Node) -> str:
    """The path of the module that made a node, or for a backward's node made the one that it differentiates."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def layer_number(node: fx.Node, current: int | None) -> int | None:
    """The number of the node's layer; a node that says nothing belongs where the last one did."""
    match = _NUMBERED.search(module_stack(node))
    return int(match.group(1) or match.group(2)) if match else current


def layer_path(node: fx.Node) -> str | None:
    """The path of the node's layer, which tells an encoder's from a decoder's of the same number."""
    stack = module_stack(node)
    match = _NUMBERED.search(stack)
    return stack[: match.end()].rstrip(".") if match else None
