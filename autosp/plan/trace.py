"""One training step compiled for one rank under fake tensors, up to the graphs that Inductor would compile.

Uses ``torch._inductor.compile_fx.compile_fx`` with an ``inner_compile`` of its own (looked at in torch 2.11 to 2.13):
decompositions, the partition into forward and backward and the memory budget are then exactly Inductor's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from .. import mesh
from ..backend import compile_for_rank
from ..errors import InputError, own_error
from ..layers import shard_lm_head
from ..report.fake_run import fake_ranks, fake_tensors, run_step
from .program import Program, Size, tensor_bytes
from .schedule import scheduled_program


@dataclass
class Trace:
    """The step of one rank: its programs, what it holds all the time, and the symbol of its length."""

    forward: list[Program] = field(default_factory=list)
    backward: list[Program] = field(default_factory=list)
    weights: int = 0
    """Bytes of parameters and buffers."""
    parameters: int = 0
    """Bytes of parameters that get a gradient."""
    elements: int = 0
    """Numbers in those parameters."""
    length: int = 0
    symbol: sympy.Symbol | None = None
    """The length in the programs' sizes; None where the model fixes it."""


def trace_step(
    make: Callable[[], tuple[torch.nn.Module, Callable[[int], Mapping[str, Any]]]],
    *,
    length: int,
    ranks: int = 1,
    tp: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    autocast: bool = False,
    budget: float = 1.0,
    settings: Mapping[str, Any] | None = None,
) -> Trace:
    """Compile one step; nothing is allocated or computed.

    Args:
        make: gives the model and a function from a length to the keyword arguments of its forward; called under fake
            tensors.
        length: tokens of the whole sequence that the step is compiled with.
        ranks: size of the sequence group. The last rank is traced.
        tp: size of the group that shares the vocabulary of the LM head (and of an embedding tied to it).
        dtype: of the weights.
        autocast: compute in bf16 whatever the weights are.
        budget: the setting ``activation_memory_budget``, 0 (recompute all that can be) to 1.
        settings: the JSON's "autosp" section.

    Raises:
        UnsupportedGraphError: the model is refused.
        InputError: the model gave no backward graph.
    """
    config: dict[str, Any] = {"sequence_parallel_size": ranks}
    if tp > 1:
        config["tensor_parallel"] = {"autotp_size": tp, "vocab_parallel_lm_head": True}
    config["autosp"] = {**(settings or {}), "activation_memory_budget": budget}
    if ranks * tp > 1:
        config["autosp"]["verify"] = "compile"
    trace = Trace(length=length)
    with _quiet_head(), fake_ranks(ranks * tp, config, rank=ranks * tp - 1) as state, fake_tensors(dtype):
        model, batch = make()
        if tp > 1:
            assert state.mesh is not None
            shard_lm_head(model, state.mesh["tp"], embedding=is_tied(model))
        _count_weights(trace, model)
        compiled = torch.compile(model, backend=_recorder(trace))
        try:
            run_step(model, compiled, batch(length), autocast=torch.bfloat16 if autocast else None)
        except Exception as error:
            if (refusal := own_error(error)) is None:
                raise
            raise refusal from error
    if not trace.backward:
        raise InputError("the model gave no backward graph: its output needs a loss that depends on its parameters")
    trace.symbol = _length_symbol(trace)
    return trace


@contextmanager
def _quiet_head() -> Iterator[None]:
    """Without the hint that the head is not sharded yet: the model is made after the group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*initialize got no model")
        yield


def is_tied(model: Any) -> bool:
    """Whether a transformers model has one weight for its LM head and its embedding."""
    parts = [getattr(model, f"get_{name}_embeddings", lambda: None)() for name in ("input", "output")]
    weights = [getattr(part, "weight", None) for part in parts]
    return weights[0] is not None and weights[0] is weights[1]


def _count_weights(trace: Trace, model: torch.nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        trace.weights += int(tensor_bytes(tensor))
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
            trace.parameters += int(tensor_bytes(tensor))
            trace.elements += tensor.numel()


def _recorder(trace: Trace) -> Callable[..., Any]:
    """A Dynamo backend that partitions for the current mesh, keeps Inductor's graphs and runs them as they are."""
    from torch._inductor.compile_fx import compile_fx

    def record(gm: fx.GraphModule, example_inputs: Sequence[Any], **about: Any) -> Any:
        backward = bool(about.get("is_backward"))
        state = mesh.current()
        program = scheduled_program(gm, state.config if state is not None else None)
        (trace.backward if backward else trace.forward).append(program)

        def run(arguments: list[Any]) -> Any:
            taken = list(arguments)
            arguments.clear()
            return gm(*taken)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], config_patches: Any = None) -> Any:
        return compile_fx(gm, list(example_inputs), inner_compile=record, config_patches=config_patches)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_for_rank(gm, example_inputs, mesh.current(), compiler=inner)

    return backend


def _length_symbol(trace: Trace) -> sympy.Symbol | None:
    symbols: set[sympy.Symbol] = set()
    for program in [*trace.forward, *trace.backward]:
        for buffer in program.buffers.values():
            if isinstance(buffer.size, sympy.Expr):
                symbols |= buffer.size.free_symbols
    if len(symbols) > 1:
        names = ", ".join(sorted(str(symbol) for symbol in symbols))
        raise InputError(
            f"sizes of the compiled step depend on more than the length ({names}): give the model batches whose other "
            "sizes are fixed"
        )
    return next(iter(symbols), None)


def evaluate(size: Size, symbol: sympy.Symbol | None, length: int, known: dict[Any, float]) -> float:
    """A size at a length; ``known`` caches expressions for this length."""
    if not isinstance(size, sympy.Expr):
        return float(size)
    if size not in known:
        known[size] = float(size.subs({symbol: length}) if symbol is not None else size)
    return known[size]
