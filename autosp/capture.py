"""From a Dynamo graph to a pre-dispatch ATen graph in which every operator has one name and one meaning.

``linear``, ``scaled_dot_product_attention`` and ``cross_entropy_loss`` stay single nodes, autograd is not traced yet,
and autocast and no_grad regions stay regions. Bodies of activation checkpointing are inlined, their nodes tagged for
the partitioner of AOTAutograd, so that whatever follows sees one flat graph. Composite operators without a rule are
replaced by what they are made of.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from .errors import UnsupportedGraphError
from .flex_capture import emit_flex_attention
from .function_capture import emit_autograd_function
from .function_results import results_used
from .location import user_location
from .repeats import RepeatInterpreter, Repeats
from .vmap_capture import vmap_regions

log = logging.getLogger("autosp")

_checkpoint_ids = itertools.count(1)


@dataclass(frozen=True)
class Captured:
    """A pre-dispatch ATen graph and the fake inputs that it was traced with (DTensors replaced by whole tensors)."""

    module: fx.GraphModule
    inputs: list[Any]


def fake_inputs(example_inputs: Sequence[Any], fake_mode: FakeTensorMode) -> list[Any]:
    """Fakes of the example inputs that carry Dynamo's own symbols, so that guards reach Dynamo by themselves.

    Without the source and the symbolic context of Dynamo new symbols would appear, unknown to any guard.
    """
    context = TracingContext.try_get()
    fakes: list[Any] = []
    for value in example_inputs:
        if not isinstance(value, torch.Tensor) or (isinstance(value, FakeTensor) and value.fake_mode is fake_mode):
            fakes.append(value)
            continue
        symbolic = context.tensor_to_context.get(value) if context is not None else None
        source = symbolic.tensor_source if symbolic is not None else None
        if symbolic is None:
            fakes.append(fake_mode.from_tensor(value, static_shapes=True))
        else:
            fakes.append(fake_mode.from_tensor(value, static_shapes=False, symbolic_context=symbolic, source=source))
    return fakes


class _CaptureInterpreter(RepeatInterpreter):
    """Runs a Dynamo graph under a pre-dispatch trace; enters the bodies of higher-order operators and of vmap."""

    def __init__(self, module: fx.GraphModule, repeats: Repeats) -> None:
        super().__init__(module, repeats)
        self._regions = vmap_regions(module)
        self._made: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self._running = n
        region = self._regions.get(n)
        if region is None:
            return super().run_node(n)
        if n is region.nodes[0]:
            self._made.update(region.run(self.repeats.tensors([self.env[node] for node in region.inputs])))
        return self._made.pop(n, None)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return self._inline_checkpoint(args[0], args[1:], kwargs)
        if target is torch.ops.higher_order.flex_attention:
            return emit_flex_attention(self.repeats.tensors(args), user_location(self._current()))
        if target is torch.ops.higher_order.autograd_function_apply:
            given, location = self.repeats.tensors(args), user_location(self._current())
            return emit_autograd_function(given, kwargs, results_used(self._running), location)
        if isinstance(target, torch._ops.HigherOrderOperator):
            self._refuse_higher_order(target)
        return super().call_function(target, args, kwargs)

    def _inline_checkpoint(self, body: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the body inline, each node tagged so that AOTAutograd's partitioner recomputes it in the backward."""
        _, body_kwargs = TagActivationCheckpoint.divide_kwargs(kwargs)
        if body_kwargs:
            raise UnsupportedGraphError(
                f"a checkpointed region is called with the keyword arguments {sorted(body_kwargs)}",
                operator="tag_activation_checkpoint",
                location=user_location(self._current()),
                remedy="pass them by position",
            )
        graph_id = next(_checkpoint_ids)
        for node in body.graph.nodes:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = graph_id
        return _CaptureInterpreter(body, self.repeats).run(*args)

    def _current(self) -> Any:
        return fx_traceback.get_current_meta()

    def _refuse_higher_order(self, target: Any) -> None:
        raise UnsupportedGraphError(
            "this higher-order operator has no rule",
            operator=str(target),
            location=user_location(self._current()),
            remedy="keep this region out of the compiled model, or report it with the model",
        )


def _warn_of_context_fn(gm: fx.GraphModule) -> None:
    """Selective checkpointing names torch's operators below autograd, which a captured graph does not have yet."""
    if any("_checkpoint_context_fn" in getattr(module, "meta", {}) for module in gm.modules()):
        log.warning(
            "checkpointing with a context_fn: what it would keep is computed again with the rest of the region, which "
            'gives the same values and takes longer; "checkpointing_keeps": "attention" keeps what attention gives'
        )


def capture_graph(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    fake_mode: FakeTensorMode,
    has_rule: Callable[[Any], bool],
    *,
    share: bool = True,
) -> fx.GraphModule:
    """Trace a Dynamo graph to a pre-dispatch ATen graph.

    Args:
        gm: the graph that Dynamo hands to a backend.
        fakes: its inputs as fake tensors and symbols, see ``fake_inputs``.
        fake_mode: the fake mode of ``fakes``.
        has_rule: tells which operators the partitioner knows; composite ones that it does not are decomposed.
        share: equal calls are run once and copied (``autosp.repeats``); False gives the same graph and takes longer.

    Returns:
        A graph module whose placeholders are those of ``gm`` in order, ``meta["val"]`` on every node.

    Raises:
        UnsupportedGraphError: a higher-order operator without a rule, or a value that tracing would bake into the
            graph.
    """
    _warn_of_context_fn(gm)
    traced = _trace(lambda repeats: _CaptureInterpreter(gm, repeats), fakes, fake_mode, {}, share)
    tried: set[Any] = set()
    while True:
        missing = {
            node.target
            for node in traced.graph.nodes
            if isinstance(node.target, torch._ops.OpOverload)
            and not has_rule(node.target)
            and node.target._can_decompose()
        } - tried
        if not missing:
            break
        # Some decompose into themselves (a size that depends on the values): once is enough.
        tried |= missing
        table = {op: op.decompose for op in missing}
        traced = _trace(functools.partial(RepeatInterpreter, traced), fakes, fake_mode, table, share)
    _refuse_baked_constants(traced)
    for old, new in zip(gm.graph.find_nodes(op="placeholder"), traced.graph.find_nodes(op="placeholder"), strict=True):
        _copy_placeholder_meta(old, new)
    return traced


def _trace(
    interpreter: Callable[[Repeats], RepeatInterpreter],
    fakes: Sequence[Any],
    fake_mode: FakeTensorMode,
    table: dict[Any, Any],
    share: bool,
) -> fx.GraphModule:
    def run(*args: Any) -> Any:
        repeats = Repeats(share)
        return repeats.tensors(interpreter(repeats).run(*args))

    with disable_fake_tensor_cache(fake_mode), fake_mode, fx_traceback.preserve_node_meta():
        traced = make_fx(run, decomposition_table=table, pre_dispatch=True)(*fakes)
    # make_fx's own dead-code pass keeps no promise for pre-dispatch regions; unused symbols alone are noise.
    traced.graph.eliminate_dead_code(_is_impure)
    traced.recompile()
    return traced


def _is_impure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable or not node.target._schema.returns
    pure_modules = ("_operator", "operator", "math", "torch")
    is_arithmetic = getattr(node.target, "__module__", "") in pure_modules and "sym" in getattr(
        node.target, "__name__", ""
    )
    return not (node.op == "get_attr" or is_arithmetic or getattr(node.target, "__module__", "") in pure_modules[:3])


def _copy_placeholder_meta(old: fx.Node, new: fx.Node) -> None:
    for key in ("tensor_dict", "grapharg", "stack_trace"):
        if key in old.meta:
            new.meta[key] = old.meta[key]
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source


def _refuse_baked_constants(traced: fx.GraphModule) -> None:
    """A value computed under a transform that tracing cannot see turns into a constant of one example:
    refuse.
    """
    for node in traced.graph.nodes:
        if node.op != "get_attr" or not isinstance(node.target, str):
            continue
        value = getattr(traced, node.target, None)
        if isinstance(value, FakeTensor) or (
            isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)
        ):
            raise UnsupportedGraphError(
                f"a value of shape {tuple(value.shape)} was baked into the graph as a constant",
                operator=str(node.target),
                location=user_location(next(iter(node.users), node)),
                remedy="compute it outside the transform (vmap, torch.func), or pass it to the model as an input",
            )
