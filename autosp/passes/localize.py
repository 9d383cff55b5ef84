"""The one place that carries layouts out: an interpreter that runs the rules' local operators under a trace.

Sizes in the graph are those of the whole value; local tensors bring their own. Every collective of the local program
is made here, by ``layout.redistribute`` or by a rule's local function, in the order of the graph, so that all ranks
make the same ones in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import disable_fake_tensor_cache
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import InternalError
from ..layout.axis import Axis
from ..layout.call import OpCall, Strategy, Value
from ..layout.infer import CALL, LAYOUT, STRATEGY
from ..layout.outputs import OutputSpec
from ..layout.placement import REPLICATE, IntLike, Partial, Placement, Replicate, Shard, known_equal, same_placement
from ..layout.redistribute import redistribute
from ..layout.stretch import TILED, Stretch, join_parts, part_of
from ..layout.traced_sizes import make_products_known
from ..location import user_location
from ..repeat_keys import Repeated
from ..repeats import Repeats

Local = torch.Tensor | Repeated


class LocalInterpreter(fx.Interpreter):
    """Runs a graph annotated by ``infer_layouts`` on the tensors of one rank.

    Args:
        gm: the annotated graph.
        axis: the mesh axis.
        parameters: names of the placeholders that are parameters.
        outputs: "dtensor" and "local" leave sharded outputs sharded, "full" gathers them.
        repeats: runs each kind of call once.
    """

    def __init__(
        self, gm: fx.GraphModule, *, axis: Axis, parameters: frozenset[str], outputs: str, repeats: Repeats
    ) -> None:
        # Values inside a stretch are asked for after the interpreter has passed their last user.
        super().__init__(gm, garbage_collect_values=False)
        self.axis = axis
        self.parameters = parameters
        self.outputs = outputs
        self.repeats = repeats
        self.specs: list[OutputSpec] = []
        self._moved: dict[tuple[fx.Node, bool, bool], list[tuple[Placement, float | None, Local]]] = {}
        self._current: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self._current = n
        stretch = n.meta.get(TILED)
        if stretch is None:
            return super().run_node(n)
        # A stretch is run when its last node is reached; nobody else asks for the values inside.
        return self._run_tiles(stretch) if n is stretch.last else None

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = self._current
        if STRATEGY in node.meta:
            return self._run_call(node, node.meta[CALL], node.meta[STRATEGY])
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int, float, bool)):
            return value
        if target is operator.getitem and isinstance(args[0], (list, tuple)):
            return args[0][args[1]]
        # A trace rebuilds integers from their symbols; other numbers it must see made.
        return super().call_function(target, self.repeats.tensors(args), self.repeats.tensors(kwargs))

    def _run_call(self, node: fx.Node, call: OpCall, strategy: Strategy) -> Any:
        sharded = strategy.sharded
        if sharded is None:
            sharded = any(not isinstance(p, Replicate) for p in tree_flatten(strategy.output)[0] if p is not None)
        local = {name: self._local_argument(name, arg, strategy, sharded) for name, arg in call.args.items()}
        if call.target._schema.is_mutable:
            self._moved.clear()

        def run(local: dict[str, Any]) -> Any:
            result = call.run(local) if strategy.local is None else strategy.local(call, local)
            self._check(node, result, strategy.output)
            return result

        return self.repeats.call(run, (local,), what=("call", call, strategy.local, strategy.output))

    def _run_tiles(self, stretch: Stretch) -> Local:
        """Run a stretch a part of the local positions at a time, and join what its last node gives."""
        last = stretch.last
        layout = last.meta[LAYOUT]
        rows = self.axis.block(layout.length)
        if not rows >= 2 * stretch.tiles:  # a guard: short sequences are another program, in one piece
            bounds: list[tuple[IntLike, IntLike]] = [(0, rows)]
        else:
            size = rows // stretch.tiles
            bounds = [(i * size, size) for i in range(stretch.tiles - 1)]
            bounds.append(((stretch.tiles - 1) * size, rows - (stretch.tiles - 1) * size))
        parts = [self._run_tile(stretch, start, size, index) for index, (start, size) in enumerate(bounds)]

        def join(parts: list[torch.Tensor]) -> torch.Tensor:
            result = join_parts(parts, layout)
            self._check(last, result, layout)
            return result

        return self.repeats.call(join, (parts,), what=("join", last.meta["val"], layout))

    def _run_tile(self, stretch: Stretch, start: IntLike, size: IntLike, index: int) -> Local:
        inside: dict[fx.Node, Any] = {}
        for node in stretch.nodes:
            self._current = node
            if stretch.region is not None:
                node.meta["ac_graph_id"] = stretch.region + index
            with fx_traceback.set_current_meta(node):
                inside[node] = self._run_on_tile(node, inside, start, size)
        return inside[stretch.last]

    def _run_on_tile(self, node: fx.Node, inside: dict[fx.Node, Any], start: IntLike, size: IntLike) -> Any:
        if node.target is operator.getitem:
            source, index = node.args
            return inside[cast(fx.Node, source)][cast(int, index)]
        call: OpCall = node.meta[CALL]
        strategy: Strategy = node.meta[STRATEGY]
        local: dict[str, Any] = {}
        for name, arg in call.args.items():
            needed = strategy.inputs.get(name, REPLICATE)
            if isinstance(arg, Value) and arg.node in inside:
                local[name] = inside[arg.node]
                continue
            local[name] = self._local_argument(name, arg, strategy, True)
            if isinstance(needed, Shard):
                local[name] = self.repeats.call(part_of, (local[name], needed, start, size))
        function = strategy.local
        if function is None:
            return self.repeats.call(call.run, (local,), what=("tile", call))
        on_part = replace(call, axis=call.axis.part(node.meta[LAYOUT].length, size))
        return self.repeats.call(lambda local: function(on_part, local), (local,), what=("tile", call, function, size))

    def _local_argument(self, name: str, arg: Any, strategy: Strategy, sharded: bool) -> Any:
        needed = strategy.inputs.get(name, REPLICATE)
        fill = strategy.fills.get(name)
        if isinstance(arg, (list, tuple)):
            many = needed if isinstance(needed, (list, tuple)) else [needed] * len(arg)
            return [self._local_value(item, want, fill, sharded) for item, want in zip(arg, many, strict=True)]
        return self._local_value(arg, needed, fill, sharded)

    def _local_value(self, arg: Any, needed: Placement | None, fill: float | None, sharded: bool) -> Any:
        if isinstance(arg, fx.Node):
            return self.env[arg]
        node = getattr(arg, "node", None)
        if not isinstance(node, fx.Node):
            return arg
        return self._moved_to(node, needed or REPLICATE, fill, sharded)

    def _moved_to(self, node: fx.Node, needed: Placement, fill: float | None, sharded: bool) -> Local:
        """The value of ``node`` in layout ``needed``; each move is made once."""
        # A move made inside a no_grad region carries no gradient and must not serve outside it.
        cache = self._moved.setdefault((node, sharded, torch.is_grad_enabled()), [])
        for placement, old_fill, moved in cache:
            if same_placement(placement, needed) and old_fill == fill:
                return moved
        x, current, dtype = self.env[node], node.meta[LAYOUT], node.meta["val"].dtype
        is_parameter = node.name in self.parameters and x.requires_grad
        enters = isinstance(needed, Replicate) and sharded and x.requires_grad
        if is_parameter or enters or not same_placement(current, needed):
            how = (current, needed, dtype, fill, sharded, is_parameter)
            moved = self.repeats.call(self._move, (x, *how), what="move")
        else:
            moved = x
        cache.append((needed, fill, moved))
        return moved

    def _move(
        self,
        x: torch.Tensor,
        current: Placement,
        needed: Placement,
        dtype: torch.dtype,
        fill: float | None,
        sharded: bool,
        is_parameter: bool,
    ) -> torch.Tensor:
        partial_grad = sharded
        if is_parameter:
            whole_use = not (sharded and isinstance(needed, Replicate))
            x, partial_grad = self._parameter_edge(x, whole_use), False
        return redistribute(x, current, needed, self.axis, dtype=dtype, fill=fill, partial_grad=partial_grad)

    def _parameter_edge(self, x: torch.Tensor, whole_use: bool) -> torch.Tensor:
        """A parameter's gradient is summed over the axis by us, or left to an engine, as ``gradient_reduction``
        says.
        """
        mode = self.axis.gradient_reduction
        if whole_use:
            reduction = "over_size" if mode == "engine_sum" else None
        else:
            reduction = {"graph": "sum", "engine_mean": "times_size", "engine_sum": None}[mode]
        return x if reduction is None else torch.ops.autosp.enter_sharded(x, reduction, self.axis.group)

    def _check(self, node: fx.Node, result: Any, layout: Any) -> None:
        """Local sizes are those that the layout promises, and the dtype is the whole value's."""
        values = node.meta["val"]
        if not isinstance(values, (list, tuple)):
            result, values, layout = [result], [values], [layout]
        for local, whole, placement in zip(result, values, layout, strict=True):
            if not isinstance(whole, torch.Tensor) or placement is None:
                continue
            shape: Sequence[IntLike] = whole.shape
            if isinstance(placement, Shard):
                shape = self.axis.local_shape(shape, placement)
            wrong_dtype = local.dtype != whole.dtype and not isinstance(placement, Partial)
            if len(shape) != local.dim() or not all(map(_agree, shape, local.shape)) or wrong_dtype:
                raise InternalError(
                    f"{node.target}: local result {tuple(local.shape)} {local.dtype} where the layout {placement} of "
                    f"{tuple(whole.shape)} {whole.dtype} promises {tuple(shape)}; at {user_location(node)}"
                )

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Flat local outputs, followed by the lengths of the sharded ones."""
        (nodes,) = self._current.args
        results, lengths = [], []
        flat, _ = tree_flatten(nodes)
        for node in flat:
            result, shard = self._output_value(node)
            index = None
            if shard is not None:
                index = len(flat) + len(lengths)
                lengths.append(shard.size)
            results.append(self.repeats.tensors(result))
            self.specs.append(OutputSpec(shard, index))
        return [*results, *lengths]

    def _output_value(self, node: Any) -> tuple[Any, Shard | None]:
        if not isinstance(node, fx.Node):
            return node, None
        layout, value = node.meta.get(LAYOUT), self.env[node]
        if not isinstance(value, (torch.Tensor, Repeated)) or layout is None:
            return value, None
        if not isinstance(layout, Shard):
            return self._moved_to(node, REPLICATE, None, False), None
        if self.outputs == "full" or not layout.is_unfactored:
            return self._moved_to(node, REPLICATE, None, False), None
        plain = layout if layout.is_full else replace(layout, length=layout.size, start=0)
        return self._moved_to(node, plain, None, True), plain


def _agree(a: IntLike, b: IntLike) -> bool:
    """Equal for certain, or equal for the sizes at hand: ``P * (S // P)`` is ``S`` under the guard that ``P``
    divides it.
    """
    if known_equal(a, b):
        return True
    return bool(a == b)


def _values(gm: fx.GraphModule) -> Iterator[Any]:
    """Every tensor and size of an annotated graph, the sizes of its cuts among them."""
    for node in gm.graph.nodes:
        yield from tree_leaves(node.meta.get("val"))
        strategy = node.meta.get(STRATEGY)
        needed = strategy.inputs if strategy is not None else {}
        for cut in tree_leaves([node.meta.get(LAYOUT), dict(needed)]):
            if isinstance(cut, Shard):
                yield from (cut.length, cut.size, cut.start, cut.outer, cut.inner)


def localize_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    axis: Axis,
    parameters: frozenset[str],
    outputs: str,
    fake_mode: Any,
    share: bool = True,
) -> tuple[fx.GraphModule, list[OutputSpec]]:
    """Rewrites: the annotated whole program -> the program of one rank.

    Requires: ``infer_layouts`` has annotated ``gm``; ``inputs`` are its inputs as fakes of ``fake_mode`` (whole
    tensors, local ones for sharded sources).
    Ensures: placeholders in the same order; every local size is what its layout promises; outputs are flat, followed
    by the lengths of the sharded ones.
    Refuses: nothing; whatever cannot be carried out was refused before.

    With ``share`` equal calls are run once and copied (``autosp.repeats``); without, the same program takes longer.
    """
    specs: list[OutputSpec] = []

    def run(*args: Any) -> Any:
        make_products_known(args, _values(gm))
        interpreter = LocalInterpreter(gm, axis=axis, parameters=parameters, outputs=outputs, repeats=Repeats(share))
        results = interpreter.run(*args)
        specs[:] = interpreter.specs
        return results

    with disable_fake_tensor_cache(fake_mode), fake_mode, fx_traceback.preserve_node_meta():
        local = make_fx(run, pre_dispatch=True)(*inputs)
    for node in local.graph.nodes:
        if node.target is torch.ops.aten.randint.low:
            # The seed of a dropout mask. A checkpointed region would draw it again, and so would a memory budget of
            # AOTAutograd's partitioner, which takes few operators for random: the backward had another mask.
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    local.graph.eliminate_dead_code()
    local.recompile()
    return local, specs
