"""``activation_offloading``: what the forward saves for the backward waits in the host's memory.

After torch's partitioner has chosen what to save, each large saved value gets a copy to the host in the forward, and
its way back in the backward (`autosp.custom_ops.host_copy`). Copies run on a stream of their own. In the forward a
value's memory is given back when the copies behind it are done, in the backward copies start ahead of their use, two
values each time, so that transfers lie under computation and no more than that is on the device twice.

torch has such a pass (``torch._functorch.config.enable_activation_offloading``). By itself it moves nothing, since
nodes must be marked by somebody, it leaves out what attention gives, and in torch 2.11 its copies are awaited at once
or at the end of the forward, when nothing was given back. Its contract with AOTAutograd is used here: a saved value
leaves the forward as a tensor of the host, and the backward's input of that name is one.
"""

from __future__ import annotations

import logging
import math
import operator
from typing import Any, cast

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from .custom_ops.host_copy import FROM_HOST, FROM_HOST_DONE, TO_HOST, TO_HOST_DONE
from .host_copy_order import AHEAD
from .location import layer_path

log = logging.getLogger("autosp")

SMALLEST = 1 / 64
"""Of the largest saved value: smaller ones stay. Both grow with the length, so that the choice does not."""


class OffloadSaved(CustomPartitionerFn):
    """torch's partitioner, and then what it saved moved to the host."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        parts = partition(gm, joint_inputs, offload=False, **settings)
        if not offload_saved(*parts, num_fwd_outputs=settings["num_fwd_outputs"]):
            log.warning(
                "activation_offloading has no effect in this graph: nothing of size that its forward makes is saved "
                "before the last layer"
            )
        return parts

    def uuid(self) -> bytes:
        """Tells programs apart in torch's caches; `autosp.inner` keeps whole joint graphs out of theirs."""
        from torch._inductor.custom_graph_pass import get_hash_for_files

        return get_hash_for_files((__file__,))


def partition(
    gm: fx.GraphModule, joint_inputs: Any, *, offload: bool, budget: float | None = None, **settings: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Run torch's partitioner on a joint graph.

    Args:
        offload: move what is saved to the host.
        budget: the activation memory budget; None for the one that is set.
        settings: what AOTAutograd gives a partitioner, ``num_fwd_outputs`` among them.

    Returns:
        The forward and the backward.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    # At exactly 0 the partitioner saves inputs alone, whatever is marked to be kept.
    patches = {} if budget is None else {"activation_memory_budget": max(budget, 1e-6)}
    with functorch_config.patch(patches):
        parts = min_cut_rematerialization_partition(gm, joint_inputs, **{"compiler": "inductor", **settings})
    if offload:
        offload_saved(*parts, num_fwd_outputs=settings["num_fwd_outputs"])
    return parts


def offload_saved(forward: fx.GraphModule, backward: fx.GraphModule, *, num_fwd_outputs: int) -> list[str]:
    """Move large values that ``forward`` saves for ``backward`` to the host in between, in place.

    Views of inputs and of outputs of the model stay, since their memory does, several views of one value, what a
    collective still writes, states of random generators, which are no result of the device, and what the last layer
    and what follows it save, which the backward needs at once.

    Args:
        num_fwd_outputs: how many outputs of the forward are results; the rest is saved.

    Returns:
        The names of the values that are moved, in the order of the forward.
    """
    chosen = _chosen(forward, num_fwd_outputs)
    if not chosen:
        return []
    hosts = _copy_to_host(forward.graph, chosen)
    _copy_back(backward.graph, {node.name: host for node, host in zip(chosen, hosts, strict=True)})
    for gm in (forward, backward):
        gm.graph.lint()
        gm.recompile()
    return [node.name for node in chosen]


def _chosen(forward: fx.GraphModule, num_fwd_outputs: int) -> list[fx.Node]:
    outputs = cast(tuple[Any, ...], forward.graph.output_node().args[0])
    results = {_base(node) for node in outputs[:num_fwd_outputs] if isinstance(node, fx.Node)}
    saved = [node for node in outputs[num_fwd_outputs:] if _is_tensor(node)]
    bases = [_base(node) for node in saved]
    candidates = [
        node
        for node, base in zip(saved, bases, strict=True)
        if base.op == "call_function" and base not in results and bases.count(base) == 1
        and _has_hints(node) and _has_hints(base) and _is_whole(node.meta["val"], base.meta["val"])
        and not _is_under_way(node) and not _is_random_state(base)
    ]  # fmt: skip
    # Beside a GPU what the host computes is where it would go. A program of the host alone shows what is moved.
    if any(node.meta["val"].device.type != "cpu" for node in saved):
        candidates = [node for node in candidates if node.meta["val"].device.type != "cpu"]
    if not candidates:
        return []
    sizes = {node: _count(node.meta["val"]) * node.meta["val"].element_size() for node in candidates}
    large = max(sizes.values()) * SMALLEST
    place = {node: number for number, node in enumerate(forward.graph.nodes)}
    end = _last_layer(forward.graph, place)
    chosen = [node for node in candidates if sizes[node] >= large and place[_attached(node)] < end]
    return sorted(chosen, key=lambda node: (place[_last_item(_attached(node))], place[node]))


def _last_layer(graph: fx.Graph, place: dict[fx.Node, int]) -> int:
    """Where the last layer begins: what is saved from there on the backward needs at once.

    Layers of an encoder and a decoder have the same numbers.
    """
    begins: dict[str, int] = {}
    for node in graph.nodes:
        if (layer := layer_path(node)) is not None:
            begins.setdefault(layer, place[node])
    return max(begins.values()) if len(begins) > 1 else len(place)


def _copy_to_host(graph: fx.Graph, chosen: list[fx.Node]) -> list[fx.Node]:
    """Start each copy where its value is made, and end it before the one after the next starts."""
    output = graph.output_node()
    starts: list[fx.Node] = []
    latest: dict[fx.Node, fx.Node] = {}
    for node in chosen:
        anchor = _last_item(_attached(node))
        with graph.inserting_after(latest.get(anchor, anchor)):
            start = _call(graph, TO_HOST, (_attached(node),), f"{node.name}_to_host", node.meta["val"], "cpu")
        start.meta.update({key: value for key, value in node.meta.items() if key in _ORIGIN})
        latest[anchor] = start
        starts.append(start)
    hosts = []
    for number, (node, start) in enumerate(zip(chosen, starts, strict=True)):
        with graph.inserting_before(starts[number + AHEAD] if number + AHEAD < len(starts) else output):
            host = _call(graph, TO_HOST_DONE, (start, start.args[0]), f"{node.name}_on_host", node.meta["val"], "cpu")
        host.meta["val"] = start.meta["val"]  # one tensor
        if _UNCHECKED in node.meta:
            host.meta[_UNCHECKED] = node.meta[_UNCHECKED]
        hosts.append(host)
    moved = dict(zip(chosen, hosts, strict=True))
    (outputs,) = output.args
    output.args = (tuple(moved.get(node, node) for node in cast(Any, outputs)),)
    return hosts


def _copy_back(graph: fx.Graph, hosts: dict[str, fx.Node]) -> None:
    """Copy each value back ahead of its first use: two start the backward, and each use starts one more."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if node.name in hosts]
    place = {node: number for number, node in enumerate(graph.nodes)}
    first = {node: min(node.users, key=lambda user: place[user]) for node in inputs if node.users}
    order = sorted(first, key=lambda node: place[first[node]])
    here: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in inputs:
        host = hosts[node.name]
        with graph.inserting_after(node):
            given = graph.placeholder(host.name)
        given.meta.update(val=host.meta["val"])
        if node in first:
            with graph.inserting_before(first[node]):
                value, device = node.meta["val"], node.meta["val"].device
                start = _call(graph, FROM_HOST, (given, device), f"{node.name}_from_host", value, device)
                done = _call(graph, FROM_HOST_DONE, (start,), f"{node.name}_here", value, device)
            done.meta["val"] = start.meta["val"]
            for made in (start, done):
                made.meta.update({key: item for key, item in first[node].meta.items() if key in _ORIGIN})
            here[node] = start, done
            node.replace_all_uses_with(done)
        graph.erase_node(node)
    last_input = list(graph.find_nodes(op="placeholder"))[-1]
    for number, node in enumerate(order):
        start = here[node][0]
        after = here[order[number - AHEAD]][1] if number >= AHEAD else last_input
        after.append(start)
        if number < AHEAD:
            last_input = start


_UNCHECKED = "saved_tensor_with_no_vc_check"
"""AOTAutograd counts those that an ``autograd.Function`` keeps by itself, which come last of what is saved."""
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_ORIGIN = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr")


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], name: str, like: torch.Tensor, device: Any) -> fx.Node:
    node = graph.create_node("call_function", target, args, name=name)
    with like.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return node


def _attached(node: fx.Node) -> fx.Node:
    """The same value where it is made: attention's results are saved as detached ones, at the end of the forward."""
    while node.target is torch.ops.aten.detach.default:
        node = cast(fx.Node, node.args[0])
    return node


def _last_item(node: fx.Node) -> fx.Node:
    """The last of the items that are taken out of the same result: torch has them side by side, right behind it."""
    if _name(node) != "getitem":
        return node
    last = node
    while last.next.args and last.next.target is node.target and last.next.args[0] is node.args[0]:
        last = last.next
    return last


def _name(node: Any) -> str:
    return getattr(node.target, "__name__", "")


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _base(node: fx.Node) -> fx.Node:
    """What a view is a view of."""
    while (source := _source(node)) is not None:
        node = source
    return node


def _source(node: fx.Node) -> fx.Node | None:
    """What a node's result lies in the memory of, one step back; a part of a tensor is taken out of a list of views."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return node.args[0] if _gives_views(node.args[0].target) else None
    return node.args[0] if _gives_views(node.target) else None


def _gives_views(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    returns = target._schema.returns
    is_view = len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    return is_view or target is _WAIT or "_unsafe_view" in str(target)


def _is_under_way(node: fx.Node) -> bool:
    """Whether a collective may still write it: torch's partitioner may save that rather than what waits for it."""
    current: fx.Node | None = node
    while current is not None and current.target is not _WAIT:
        if "_c10d_functional" in str(current.target):
            return True
        current = _source(current)
    return False


def _is_random_state(node: fx.Node) -> bool:
    """Saved where checkpointing runs an operator again that draws, or that may: attention, with dropout or not."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    return _name(node.args[0]) == "run_and_save_rng_state"


def _is_whole(value: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a value has all of the memory that it lies in, element for element."""
    expected = 1
    for stride, size in sorted(zip(map(_number, value.stride()), map(_number, value.shape), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return expected == _count(source) and expected > 0


def _has_hints(node: fx.Node) -> bool:
    """Whether all sizes were known when the program was compiled: not those that depend on data."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(
        size.node.hint is not None for size in (*value.shape, *value.stride()) if isinstance(size, torch.SymInt)
    )


def _count(value: torch.Tensor) -> int:
    return math.prod(map(_number, value.shape))


def _number(size: Any) -> int:
    """A size, or what it was when the program was compiled: asking a symbol itself would fix it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
