"""The Dynamo backend ``autosp``: the one place that wires the road of a graph.

Dynamo graph -> pre-dispatch ATen graph (``capture``) -> passes (``passes.pipeline``) -> the program of one rank ->
AOTAutograd and Inductor, or another inner backend. Found by name through the entry point group
``torch_dynamo_backends``.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dynamo import lookup_backend
from torch._guards import detect_fake_mode

from . import mesh
from .agreement import agree, largest
from .alone import compile_alone
from .capture import capture_graph, fake_inputs
from .config import AutoSPConfig
from .custom_ops import (  # noqa: F401
    autograd_function,
    block_attention,
    collectives,
    convolution,
    fused_loss,
    loss,
    ring_attention,
    vocab_linear,
    vocab_parallel,
    vocab_softmax,
)
from .errors import ConfigError, RankMismatchError, UnsupportedGraphError
from .inner import compile_local, is_attention
from .layout.axis import SEQUENCE, VOCABULARY, Axis
from .layout.registry import find_rule
from .layout.rules.attention import register_block_rule
from .layout.rules.autograd_function import register_function_rule
from .layout.rules.convolution import register_convolution_rule
from .layout.rules.loss import register_fused_rules
from .layout.rules.vocabulary import register_head_rules
from .layout.rules.vocabulary_loss import register_vocabulary_rules
from .layout.stretch import TILED
from .memory_ways import compile_fitting, room_for_step
from .mesh import AutoSPState
from .passes.pipeline import Work, run_pipeline
from .report.hook import observe_pass, observe_program, observe_refusal
from .runtime import Checked, LocalProgram, check_rows
from .sequence_tensor import SequenceTensor, is_cut
from .sources import InputSources, find_sources, parameter_name

log = logging.getLogger("autosp")
register_fused_rules()
register_head_rules()
register_vocabulary_rules()
register_block_rule()
register_function_rule()
register_convolution_rule()

_times: dict[str, float] = {}


def compile_times() -> dict[str, float]:
    """Seconds of the latest compilation: "autosp_s" in autosp's own capture, passes and checks (a pass by itself as
    "pass.NAME"), "waiting_s" until the other ranks had come as far, "total_s" in the whole backend.
    """
    return dict(_times)


def autosp_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile one graph for this rank of its sequence group.

    Args:
        gm: graph from Dynamo.
        example_inputs: its inputs.
        options: settings of the JSON's "autosp" section and "mesh", laid over those of ``autosp.initialize``.
        mode: None or "default"; torch passes it on when a user gives one.

    Raises:
        ConfigError: a wrong option or mode.
        UnsupportedGraphError: the graph holds what cannot be partitioned exactly.
        RankMismatchError: ranks of the group compiled different programs.
    """
    if mode not in (None, "default"):
        raise ConfigError(f"mode={mode!r} has no effect under autosp; allowed: None and 'default' (see options=)")
    return compile_for_rank(gm, example_inputs, mesh.select(options), options=options)


def compile_for_rank(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    state: AutoSPState | None,
    *,
    options: dict[str, Any] | None = None,
    compiler: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """`autosp_backend` for a state that is known; ``compiler`` takes Inductor's place, to look at what it is given."""
    if state is None or not _is_partitioned(gm, state):
        if state is not None:
            return compile_alone(gm, example_inputs, state.config, compiler)
        return (compiler or lookup_backend(_inner_option(options)))(gm, example_inputs)
    start = time.perf_counter()
    try:
        _refuse_split_by_ddp(gm)
        work, found = _partition(gm, example_inputs, state)
        payload = {
            "graph": _graph_text(gm, example_inputs, bool(found.sharded)),
            "collectives": repr(work.collectives).encode(),
        }
    except Exception:
        # The others must not wait for a rank that refuses what they accept; this rank's own error tells more.
        with contextlib.suppress(RankMismatchError):
            agree(state, "refused", b"")
        raise
    own = time.perf_counter() - start
    agree(state, "compile", payload, detail=_shapes(example_inputs, found))
    waiting = time.perf_counter() - start - own
    compiled, work, found = _compile_partitioned(gm, example_inputs, state, (work, found), compiler)
    total = time.perf_counter() - start
    _times.clear()
    _times.update(autosp_s=own, waiting_s=waiting, total_s=total)
    _times.update((f"pass.{name}", seconds) for name, seconds in work.seconds.items())
    _report(work, state.config.tiles)
    checked = [Checked(index, key) for index, key in found.keys.items()] if state.config.verify == "inputs" else []
    weights = [Checked(index, name) for index, name in _shared_weights(gm, found).items()]
    return LocalProgram(
        compiled, work.specs, work.axis, state, checked, state.config.outputs, found.sharded,
        vocabulary=work.vocabulary, vocabulary_specs=work.vocabulary_specs, weights=weights,
    )  # fmt: skip


def _compile_partitioned(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    state: AutoSPState,
    first: tuple[Work, InputSources],
    compiler: Callable[..., Any] | None,
) -> tuple[Callable[..., Any], Work, InputSources]:
    """Compile the partitioned program; where the memory budget is "auto", the cheapest way that fits the device.

    Collective: the ranks of a group choose alike.
    """
    work, found = first
    if state.config.activation_memory_budget != "auto":
        examples = _local_examples(example_inputs, found, work.axis)
        return compile_local(work.graph, examples, state.config, compiler), work, found

    def program(config: AutoSPConfig, again: bool) -> tuple[fx.GraphModule, list[Any]]:
        nonlocal work, found
        if again:
            work, found = _partition(gm, example_inputs, replace(state, config=config))
        return work.graph, _local_examples(example_inputs, found, work.axis)

    def largest_of_group(value: float) -> float:
        return largest(state, "memory", value)

    room = room_for_step(example_inputs, state.config, [example_inputs[i] for i in found.parameters], largest_of_group)
    return compile_fitting(program, state.config, room, largest_of_group, compiler), work, found


def _is_partitioned(gm: fx.GraphModule, state: AutoSPState) -> bool:
    return state.sp_size > 1 or (state.has_vocabulary_axis and _has_head(gm))


def _has_head(gm: fx.GraphModule) -> bool:
    """Whether the graph, or a body in it, computes the logits of a vocabulary-parallel head."""
    return any("vocab_linear" in str(n.target) for m in gm.modules() if hasattr(m, "graph") for n in m.graph.nodes)


def _refuse_split_by_ddp(gm: fx.GraphModule) -> None:
    reason = getattr(getattr(gm, "compile_subgraph_reason", None), "reason", "")
    if "DDPOptimizer" in reason:
        raise UnsupportedGraphError(
            "torch._dynamo.config.optimize_ddp cut the graph at the gradient buckets of DistributedDataParallel, and "
            "what flows between the parts has lost how it is sharded",
            operator="autosp",
            remedy="set torch._dynamo.config.optimize_ddp = False before the first step (autosp.initialize does so; "
            "something has turned it on again)",
        )


def _inner_option(options: dict[str, Any] | None) -> str:
    return (options or {}).get("inner_backend", "inductor")


def _partition(gm: fx.GraphModule, example_inputs: Sequence[Any], state: AutoSPState) -> tuple[Work, InputSources]:
    for value in example_inputs:
        if isinstance(value, SequenceTensor) and is_cut(value):
            check_rows(value, state.sp_size)
    fake_mode = detect_fake_mode(example_inputs) or detect_fake_mode()
    axis = Axis(
        name=SEQUENCE,
        size=state.sp_size,
        rank=state.sp_rank,
        group=state.sp_group,
        gradient_reduction=state.config.gradient_reduction,
        attention=state.config.attention,
    )
    vocabulary = None
    if state.has_vocabulary_axis:
        tp = state.sizes["tp"], state.coordinates["tp"], state.group_names["tp"]
        vocabulary = Axis(VOCABULARY, *tp)
    fakes = fake_inputs(example_inputs, fake_mode)
    found = find_sources(gm, fakes, axis)
    captured = capture_graph(gm, found.whole, fake_mode, lambda target: find_rule(target) is not None)
    names = [node.name for node in captured.graph.find_nodes(op="placeholder")]
    work = Work(
        graph=captured,
        inputs=found.whole,
        local_inputs=found.local,
        axis=axis,
        sources={names[index]: source for index, source in found.sources.items()},
        parameters=frozenset(names[index] for index in found.parameters),
        outputs=state.config.outputs,
        unsupported=state.config.unsupported,
        fake_mode=fake_mode,
        fuse_linear_cross_entropy=state.config.fuse_linear_cross_entropy,
        token_tiles=state.config.tiles,
        linear_cross_entropy_memory=state.config.linear_cross_entropy_memory,
        vocabulary=vocabulary,
        fuse_vocabulary_head=state.config.vocab_parallel_ce_backend == "fused_linear",
        observe=observe_pass,
    )
    try:
        run_pipeline(work)
    except UnsupportedGraphError as error:
        observe_refusal(error, work)
        raise
    observe_program(work)
    return work, found


def _local_examples(example_inputs: Sequence[Any], found: InputSources, axis: Axis) -> list[Any]:
    return [found.local[i] if i in found.sharded else value for i, value in enumerate(example_inputs)]


def _graph_text(gm: fx.GraphModule, example_inputs: Sequence[Any], has_shards: bool) -> bytes:
    """What ranks of a group must have in common; a device's number is a rank's own.

    With a sharded input sizes are a rank's own too (a rank that holds one row has it as a constant): then the
    operators in their order are compared.
    """
    if has_shards:
        return repr(
            [str(getattr(node.target, "__name__", node.target)) for node in gm.graph.nodes if node.op[:4] == "call"]
        ).encode()
    rows = _vocabulary_rows(gm)
    shapes = [
        (tuple(map(str, value.shape[node in rows :])), str(value.dtype))
        if isinstance(value, torch.Tensor)
        else str(value)
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    ]
    # The last argument of a vocabulary layer is the name of its group, which a rank shares with some only.
    lines = [
        f"{node.name} = {node.target}{node.args[:-1]}" if _is_vocabulary_layer(node) else node.format_node()
        for node in gm.graph.nodes
    ]
    text = re.sub(r"index=\d+|cuda:\d+", "", "\n".join(map(str, lines)))
    return f"{text}\n{shapes}".encode()


def _is_vocabulary_layer(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith(("autosp.vocab_linear", "autosp.vocab_embedding"))


def _vocabulary_rows(gm: fx.GraphModule) -> set[fx.Node]:
    """Inputs that hold some rows of a vocabulary, weights and biases of its layers: shards may differ by some rows."""
    found: set[fx.Node] = set()
    for node in filter(_is_vocabulary_layer, gm.graph.nodes):
        for source in node.args[1:3]:
            while isinstance(source, fx.Node) and source.op != "placeholder" and source.args:
                source = source.args[0]  # a cast of it
            if isinstance(source, fx.Node):
                found.add(source)
    return found


def _shared_weights(gm: fx.GraphModule, found: InputSources) -> dict[int, str]:
    """Place and name of each parameter that all ranks of the group hold whole."""
    rows = _vocabulary_rows(gm)
    nodes = list(gm.graph.find_nodes(op="placeholder"))
    names: dict[int, str] = {}
    for index in found.parameters:
        if nodes[index] not in rows:
            name = parameter_name(nodes[index])
            names[index] = f"{name} (input {index})" if name in names.values() else name
    return names


def _shapes(example_inputs: Sequence[Any], found: InputSources) -> str:
    return ", ".join(f"{key} {tuple(example_inputs[index].shape)}" for index, key in found.keys.items())


def _report(work: Work, tiles: int) -> None:
    nodes = [] if work.annotated is None or tiles == 1 else list(work.annotated.graph.nodes)
    if any(map(is_attention, nodes)) and not any(TILED in node.meta for node in nodes):
        log.warning(
            "token_tiles has no effect in this graph: nothing in it treats each token alone, widens it by half or more "
            "and narrows it again, without dropout between (docs/long_sequences.md)"
        )
    if work.gathered:
        names = sorted({f"{item.operator} at {item.location}" for item in work.gathered})
        log.warning(
            '%d operators ran on the whole %s (unsupported: "gather"), which gathers %d tensors a step: %s',
            len(work.gathered),
            " or ".join(axis.what for axis in (work.axis, work.vocabulary) if axis is not None and axis.size > 1),
            sum(len(item.sizes) for item in work.gathered),
            "; ".join(names),
        )
