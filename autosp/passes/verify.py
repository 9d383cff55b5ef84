"""Last checks on the program of one rank."""

from __future__ import annotations

from torch import fx

from ..errors import InternalError
from ..layout.axis import Axis

COLLECTIVES = (
    "autosp::all_gather_sequence",
    "autosp::reduce_scatter_sequence",
    "autosp::all_to_all",
    "autosp::all_reduce_sum",
    "autosp::ring_attention",
    "autosp::aggregate_loss",
)


def collective_list(gm: fx.GraphModule) -> list[str]:
    """Names of the collectives of a local program, in their order (those of its backward follow from them)."""
    names = [getattr(getattr(n.target, "_schema", None), "name", "") for n in gm.graph.nodes if n.op == "call_function"]
    edges = ("autosp::enter_sharded", "autosp::shard_sequence")
    return [name for name in names if name in COLLECTIVES + edges or name.startswith("autosp::vocab_")]


def verify_local_graph_pass(gm: fx.GraphModule, *, axis: Axis, vocabulary: Axis | None = None) -> fx.GraphModule:
    """Rewrites: nothing.

    Requires: a local program.
    Ensures: every collective names the group of one of the axes, every node has a value, every collective is used.
    Refuses: a program that breaks one of these (an error of autosp).
    """
    axes = [axis] if vocabulary is None else [axis, vocabulary]
    for node in gm.graph.nodes:
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        if name not in COLLECTIVES:
            continue
        if not any(axis.group in node.args or axis.group in node.kwargs.values() for axis in axes):
            names = ", ".join(axis.name for axis in axes)
            raise InternalError(f"{node.format_node()} does not run over the group of axis {names}")
        if not node.users:
            raise InternalError(f"{node.format_node()} is a collective whose result nobody uses")
    return gm
