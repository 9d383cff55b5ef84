"""Blocks by the Triton kernels, whose tiles run the program and leave out what its mask hides.

Chosen by capability (``dispatch.triton_usable``); ``refusal`` says why a call is left to the plain blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from . import tile_map
from .blocks import Problem, positions, recorded
from .program import Block
from .tile_map import Extent, TileLists, lists_of_keys, lists_of_queries, merged, tile_classes
from .tile_program import TileProgram, Unsupported, compute_inputs, leaf_kinds, tile_program

LARGEST_HEAD = 256
# Blocks of keys a multiprocessor below which a group's query heads go to programs of their own.
_WANTED_PROGRAMS = 4
_FAR = 2**31 - 1
# Tiles of the largest map from which those of the two backward kernels are both made.
_SHARED_MAP = 2**24


def refusal(problem: Problem, q: Tensor, k: Tensor, v: Tensor, wanted: Sequence[bool] | None = None) -> str:
    """Why the kernels cannot compute this; empty when they can.

    Args:
        problem, q, k, v: the call.
        wanted: which leaves want a gradient; None asks for the forward alone.
    """
    if not dispatch.triton_usable(q, k, v):
        return "no kernels for this device and dtype, or AUTOSP_TRITON=0"
    if q.is_cuda and torch.version.hip is not None:
        return "no tile sizes for this device"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}"
    if q.dtype == torch.bfloat16 and dispatch.triton_interpreted():
        return "Triton's interpreter does not multiply bfloat16"
    if max(q.shape[-1], v.shape[-1]) > LARGEST_HEAD:
        return f"heads of more than {LARGEST_HEAD} elements"
    if max(q.shape[2], k.shape[2], *problem.sizes) >= _FAR:
        return "positions beyond 32 bits"
    if any(wanted or ()) and torch.are_deterministic_algorithms_enabled():
        return "gradients of a program's tensors are summed by atomics, and deterministic algorithms are asked for"
    kinds = leaf_kinds(problem.leaves)
    found = _functions(problem.text, kinds, _wanted_inputs(problem, wanted or ()), wanted is not None)
    if isinstance(found, str):
        return found
    tables = [x.source[1] for x in tile_program(problem.text, kinds).inputs if x.kind == "table"]
    return (
        "a table of more elements than 32 bits count" if any(problem.leaves[at].numel() > _FAR for at in tables) else ""
    )


@functools.lru_cache(maxsize=512)
def _functions(text: str, kinds: tuple[Any, ...], wanted: tuple[int, ...] | str, pull: bool) -> Any:
    """``kernels.generate.tile_functions``, or the reason why there are none."""
    from .kernels.generate import tile_functions

    if isinstance(wanted, str):
        return wanted
    try:
        return tile_functions(text, kinds, wanted, pull)
    except Unsupported as reason:
        return str(reason)


def _wanted_inputs(problem: Problem, wanted: Sequence[bool]) -> tuple[int, ...] | str:
    """Inputs of the tiles that a wanted leaf is behind, or why that is not known."""
    if not any(wanted):
        return ()
    try:
        tiles = tile_program(problem.text, leaf_kinds(problem.leaves))
    except Unsupported as reason:
        return str(reason)
    return tuple(
        index
        for index, item in enumerate(tiles.inputs)
        if item.dtype.is_floating_point and any(wanted[leaf] for leaf in _leaves_behind(problem.program, item.source))
    )


def _leaves_behind(program: dict[str, Any], source: Any) -> set[int]:
    """The leaves that a reference is made of."""
    found: set[int] = set()
    waiting: list[Any] = [{source[0]: source[1]}]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, (list, tuple)):
            waiting.extend(item)
        elif isinstance(item, dict):
            ((kind, at),) = item.items()
            if kind in ("leaf", "whole"):
                found.add(at)
            elif kind == "step" and at not in seen:
                seen.add(at)
                _, args, kwargs = program["steps"][at]
                waiting += [*args, *kwargs.values()]
    return found


@dataclass
class Prepared:
    """A call made ready: what tiles load, and where the tiles lie."""

    problem: Problem
    tiles: TileProgram
    inputs: list[Tensor]
    block: Block
    extent: Extent

    @classmethod
    def of(cls, problem: Problem, q: Tensor, k: Tensor, leaves: Sequence[Tensor]) -> Prepared:
        q0, k0 = problem.origin[2], problem.origin[3]
        queries = positions(q0, 0, q.shape[2], problem.sizes[0], q.device)
        keys = positions(k0, 0, k.shape[2], problem.sizes[1], q.device)
        block = Block((problem.origin[0], q.shape[0]), (problem.origin[1], q.shape[1]), queries, keys)
        tiles = tile_program(problem.text, leaf_kinds(problem.leaves))
        inputs = compute_inputs(tiles, problem.program, block, leaves, problem.numbers)
        low, high = (max(-_FAR, min(_FAR, bound)) for bound in problem.bounds)
        first_key, last_key = max(0, -k0), min(k.shape[2], problem.sizes[1] - k0)
        return cls(problem, tiles, inputs, block, Extent(queries, keys, first_key, last_key, (low, high)))

    def classes(self, block_q: int, block_k: int) -> Tensor:
        """What becomes of each tile (``tile_map.tile_classes``)."""
        first, counts = zip(self.block.batch, self.block.heads, strict=True)
        inputs = [x.detach() for x in self.inputs]
        return tile_classes(self.tiles, inputs, first, counts, self.extent, block_q, block_k)

    def maps(self, *sizes: tuple[int, int]) -> list[Tensor]:
        """The classes of tiles of several sizes; one map of small tiles serves all, where it is no burden itself."""
        q_step, k_step = (math.gcd(*(size[dim] for size in sizes)) for dim in range(2))
        if self.extent.queries.shape[0] * self.extent.keys.shape[0] > _SHARED_MAP * q_step * k_step:
            return [self.classes(*size) for size in sizes]
        small = self.classes(q_step, k_step)
        return [merged(small, size[0] // q_step, size[1] // k_step) for size in sizes]

    def place(self, q: Tensor, k: Tensor) -> tuple[int, ...]:
        """As ``kernels.common`` lists it."""
        origin, sizes, extent = self.problem.origin, self.problem.sizes, self.extent
        return (
            q.shape[1], q.shape[2], k.shape[2], origin[2], origin[3], origin[0], origin[1], extent.first_key,
            extent.last_key, *extent.bounds, max(sizes[0] - 1, 0), max(sizes[1] - 1, 0), q.shape[1] // k.shape[1],
        )  # fmt: skip

    def call(self, q: Tensor, k: Tensor, v: Tensor, wanted: tuple[int, ...] | None = None) -> Any:
        """What the kernels are given; ``wanted``: inputs that get gradients, None for the forward."""
        from .kernels.launch import Call

        functions = _functions(self.problem.text, leaf_kinds(self.problem.leaves), wanted or (), wanted is not None)
        loaded: list[Any] = []
        for item, x in zip(self.tiles.inputs, self.inputs, strict=True):
            x = x.detach()
            loaded.append(x.view(torch.uint8) if x.dtype == torch.bool else x)
            if item.kind == "dense":
                loaded += [0] * (4 - x.dim()) + [x.stride(i) for i in range(x.dim())]
            elif item.kind == "table":
                loaded += list(x.shape)
        return Call(q, k, v, functions, self.tiles.score is not None, self.tiles.mask is not None,
                    tuple(loaded) or (q,), self.place(q, k), self.problem.scale,
                    any(item.kind != "vector" for item in self.tiles.inputs))  # fmt: skip


def _addressable(*tensors: Tensor) -> tuple[Tensor, ...]:
    from .kernels.common import fits_tiles

    return tuple(x if fits_tiles(x) else x.contiguous() for x in tensors)


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` as ``blocks.forward`` gives them."""
    from .kernels import launch

    batch, heads, rows, _ = q.shape
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        out = q.new_zeros(batch, heads, rows, v.shape[-1])
        return out, torch.full((batch, heads, rows), float("-inf"), dtype=torch.float32, device=q.device)
    out = q.new_empty(batch, heads, rows, v.shape[-1])
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
    q, k, v = _addressable(q, k, v)
    prepared = Prepared.of(problem, q, k, problem.leaves)
    call = prepared.call(q, k, v)
    lists = lists_of_queries(prepared.classes(*launch.tile_sizes(call)[0]))
    launch.forward(call, lists, out, lse).run(q.device)
    return out, lse


def backward(
    problem: Problem, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """As ``blocks.backward`` gives it."""
    from .kernels import launch

    wanted_inputs = _wanted_inputs(problem, wanted)
    assert not isinstance(wanted_inputs, str)
    empty = [x.new_zeros(x.shape if want else 0) for x, want in zip(problem.leaves, wanted, strict=True)]
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), empty
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    q, k, v, grad, out = _addressable(q, k, v, grad.to(q.dtype), out)
    leaves = [x.detach().requires_grad_() if want else x for x, want in zip(problem.leaves, wanted, strict=True)]
    with recorded():
        prepared = Prepared.of(problem, q, k, leaves)
    call = prepared.call(q, k, v, ())
    delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
    share = None if grad_lse is None else grad_lse.to(torch.float32).contiguous()
    launch.delta(grad, out, share, delta).run(q.device)
    upstream = launch.Upstream(grad, lse.contiguous(), delta)
    _, *sizes = launch.tile_sizes(call)
    for_keys, for_queries = prepared.maps(*sizes)
    _keys(call, lists_of_keys(for_keys), sizes[0][1], upstream, dk, dv)
    sums = [torch.zeros(prepared.inputs[i].shape, dtype=torch.float32, device=q.device) for i in wanted_inputs]
    pulling = prepared.call(q, k, v, wanted_inputs)
    launch.queries(call, lists_of_queries(for_queries), upstream, dq, pulling.functions.pull, sums).run(q.device)
    return dq, dk, dv, _leaf_gradients(prepared, leaves, wanted, wanted_inputs, sums, empty)


def _keys(call: Any, by_keys: TileLists, block_k: int, upstream: Any, dk: Tensor, dv: Tensor) -> None:
    """Gradients of keys and values; of few blocks of keys each query head is a program of its own, summed after."""
    from .kernels import launch

    q = call.q
    batch, heads, key_heads = q.shape[0], q.shape[1], call.k.shape[1]
    programs = -(-call.k.shape[2] // block_k) * batch * key_heads
    if heads == key_heads or programs >= _WANTED_PROGRAMS * _multiprocessors(q.device):
        launch.keys(call, by_keys, upstream, dk, dv).run(q.device)
        return
    parts = [torch.empty(batch, heads, *x.shape[2:], dtype=torch.float32, device=q.device) for x in (dk, dv)]
    launch.keys(call, by_keys, upstream, *parts).run(q.device)
    for x, part in zip((dk, dv), parts, strict=True):
        x.copy_(part.view(batch, key_heads, heads // key_heads, *x.shape[2:]).sum(2))


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _leaf_gradients(
    prepared: Prepared, leaves: Sequence[Tensor], wanted: Sequence[bool], inputs: Sequence[int],
    sums: Sequence[Tensor], found: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Gradients of leaves from those of what the tiles load."""
    sources = [x for x, want in zip(leaves, wanted, strict=True) if want]
    made = [
        (prepared.inputs[i], part) for i, part in zip(inputs, sums, strict=True) if prepared.inputs[i].requires_grad
    ]
    if not sources or not made:
        return found
    with recorded():
        results = torch.autograd.grad(
            [x for x, _ in made], sources, [part.to(x.dtype) for x, part in made], allow_unused=True
        )
    rest = iter(results)
    for at, want in enumerate(wanted):
        result = next(rest) if want else None
        found[at] = found[at] if result is None else result.detach()
    return found


def count_tiles(problem: Problem, q: Tensor, k: Tensor, block_q: int = 128, block_k: int = 64) -> tuple[int, int, int]:
    """How many tiles of a call, all its batch rows and heads, are empty, partial and full. It waits for the device.

    Raises:
        Unsupported: the program does not run on tiles.
    """
    classes = Prepared.of(problem, q, k, problem.leaves).classes(block_q, block_k)
    empty, partial, full = tile_map.count_tiles(classes.expand(q.shape[0], q.shape[1], -1, -1))
    return empty, partial, full
