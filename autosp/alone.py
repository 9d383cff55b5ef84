"""The program of a rank that shares its sequence with nobody.

Its tokens are whole and nothing is sent, so no layout is needed. What remains of autosp: no queries x keys mask, an LM
head fused into its loss, and the settings of memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .capture import capture_graph, fake_inputs
from .config import AutoSPConfig
from .errors import AutoSPError, UnsupportedGraphError
from .inner import compile_local
from .layout.axis import SEQUENCE, Axis
from .layout.registry import find_rule
from .memory_ways import compile_fitting, room_for_step
from .passes.pipeline import ALONE, Work, run_pipeline

log = logging.getLogger("autosp")


def compile_alone(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: AutoSPConfig,
    compiler: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs for a rank without a sequence group.

    Ranks that run the same model, data-parallel ones, choose by themselves: no collective is theirs in common here.

    Args:
        gm: graph from Dynamo.
        example_inputs: its inputs.
        config: what is said of communication and layouts is left out.
        compiler: takes Inductor's place, see `autosp.inner.compile_local`.

    Raises:
        ConfigError: the memory budget is "auto", a gradient is asked for, and there is no CUDA device to ask.
    """
    config = config.model_copy(update={"token_tiles": 1, "overlap_communication": False})
    examples = list(example_inputs)
    is_trained = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in examples)
    if config.activation_memory_budget != "auto" or not is_trained:
        return compile_local(alone_program(gm, examples, config), examples, config, compiler)
    parameters = [x for x in examples if isinstance(x, torch.nn.Parameter)]
    room = room_for_step(examples, config, parameters, _itself)
    program = lambda way, again: (alone_program(gm, examples, way), examples)  # noqa: E731
    return compile_fitting(program, config, room, _itself, compiler)


def _itself(value: float) -> float:
    return value


def alone_program(gm: fx.GraphModule, example_inputs: Sequence[Any], config: AutoSPConfig) -> fx.GraphModule:
    """The whole program with its masks and losses rewritten; ``gm`` itself where there is nothing to rewrite or mark.

    A graph that is refused is compiled as Dynamo made it, which is right; a warning says what that leaves undone.
    """
    marks = config.activation_memory_budget != 1 or config.checkpointing_keeps != "nothing"
    if not _has_work(gm, config, marks):
        return gm
    try:
        work = _captured(gm, example_inputs, config)
        before = _written(work.graph)
        graph = run_pipeline(work, ALONE).graph
    except UnsupportedGraphError as error:
        undone = "attention masks stay and the LM head is not fused into its loss in this graph"
        if config.checkpointing_keeps != "nothing":
            undone += ", and checkpointing_keeps has no effect there"
        log.warning("%s: %s", undone, error)
        return gm
    return graph if marks or _written(graph) != before else gm


def _has_work(gm: fx.GraphModule, config: AutoSPConfig, marks: bool) -> bool:
    """Whether a pass may find something; told by Dynamo's names, since capturing takes as long as compiling begins.

    Args:
        marks: attention is marked for the partitioner, with a mask or without.
    """
    fuses = config.fuse_linear_cross_entropy != "never"
    for name, node in _calls(gm):
        if "attention" in name and (marks or _may_be_masked(name, node)):
            return True
        if fuses and "cross_entropy" in name:
            return True
    return False


def _calls(gm: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    """Names of the functions that are called, also in the bodies of checkpointing and the like."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function":
                    yield getattr(node.target, "__name__", str(node.target)), node


def _may_be_masked(name: str, node: fx.Node) -> bool:
    if not name.startswith("scaled_dot_product_attention"):
        # flex_attention and kernels of others have no mask to take away; nn.MultiheadAttention has one inside.
        return "multi_head" in name
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return isinstance(mask, fx.Node)


def _captured(gm: fx.GraphModule, example_inputs: Sequence[Any], config: AutoSPConfig) -> Work:
    """The graph as passes take it.

    Raises:
        UnsupportedGraphError: it cannot be traced.
    """
    for value in example_inputs:
        if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
            raise UnsupportedGraphError(f"an input is a {type(value).__name__}", operator="autosp")
    fake_mode: Any = detect_fake_mode(example_inputs) or detect_fake_mode()
    fakes = fake_inputs(example_inputs, fake_mode)
    try:
        graph = capture_graph(gm, fakes, fake_mode, lambda target: find_rule(target) is not None)
    except AutoSPError:
        raise
    except Exception as error:
        # Over a group this ends the compilation; here the inner compiler may know what our trace does not.
        raise UnsupportedGraphError(
            f"it cannot be traced: {type(error).__name__}: {error}", operator="autosp"
        ) from error
    return Work(
        graph=graph,
        inputs=fakes,
        axis=Axis(name=SEQUENCE, size=1, rank=0, group=""),
        sources={},
        parameters=frozenset(),
        outputs=config.outputs,
        unsupported=config.unsupported,
        fake_mode=fake_mode,
        fuse_linear_cross_entropy=config.fuse_linear_cross_entropy,
        linear_cross_entropy_memory=config.linear_cross_entropy_memory,
    )


def _written(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """What stands in a graph, to tell whether passes have changed it."""
    return [(node.target, node.args, node.kwargs) for node in gm.graph.nodes]
