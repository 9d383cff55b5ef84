"""Arguments of the kernels, and their launches.

Arguments are made apart from launching, so that a test can compile the kernels for a GPU that is not there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from ..tile_map import TileLists
from .backward import delta_kernel, keys_kernel, queries_kernel
from .forward import forward_kernel
from .generate import TileFunctions
from .tiles import LARGE_ROOM, Tiles, forward_tiles, keys_tiles, padded, queries_tiles

DELTA_BLOCK = 64


@dataclass
class Call:
    """What all kernels of one call are given.

    Args:
        q, k, v: ``[batch, heads or key heads, rows, size]``.
        functions: what runs on tiles.
        has_score, has_mask: which of the functions there are.
        inputs: tensors that tiles load, each followed by its strides or sizes.
        place: where the rows lie, as ``common`` lists them, heads to group.
        scale: factor of the scores.
        loads_tiles: whether a tile loads more than vectors. Such loads would be kept in shared memory for every stage
            of the pipeline, which has no room for them: the kernel then has one stage.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    functions: TileFunctions
    has_score: bool
    has_mask: bool
    inputs: tuple[Any, ...]
    place: tuple[int, ...]
    scale: float
    loads_tiles: bool = False

    def options(self, tiles: Tiles) -> dict[str, int]:
        return {"num_warps": tiles.num_warps, "num_stages": 1 if self.loads_tiles else tiles.num_stages}

    @property
    def size(self) -> int:
        return padded(max(self.q.shape[-1], self.v.shape[-1]))

    def constants(self, tiles: Tiles, **more: Any) -> dict[str, Any]:
        d, dv = self.q.shape[-1], self.v.shape[-1]
        return {
            **more, "HAS_SCORE": self.has_score, "HAS_MASK": self.has_mask, "D": d, "DV": dv, "D_PAD": padded(d),
            "DV_PAD": padded(dv), "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k, "PRECISION": "ieee",
            "CHANGE": self.functions.change, "SEE": self.functions.see,
        }  # fmt: skip

    def strides(self) -> dict[str, Any]:
        return {f"{name}_strides": x.stride() for name, x in (("q", self.q), ("k", self.k), ("v", self.v))}


@dataclass
class Launch:
    """A kernel, how many programs of it, what they are given, and how they are compiled."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)

    def run(self, device: torch.device) -> None:
        """Run it, on the device of its tensors."""
        here = contextlib.nullcontext() if device.type == "cpu" else getattr(torch, device.type).device(device)
        with here:
            if self.programs:
                self.kernel[(self.programs,)](**self.arguments, **self.options)


def room_of(x: Tensor) -> int:
    """Bytes of shared memory that a program can have on the device of ``x``."""
    if x.device.type != "cuda":
        return LARGE_ROOM
    return _room(torch.cuda.current_device() if x.device.index is None else x.device.index)


@functools.lru_cache(maxsize=64)
def _room(index: int) -> int:
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


def tile_sizes(call: Call) -> list[tuple[int, int]]:
    """Queries and keys of a tile of ``forward``, ``keys`` and ``queries``."""
    room = room_of(call.q)
    made = [choose(call.size, call.q.element_size(), room) for choose in (forward_tiles, keys_tiles, queries_tiles)]
    return [(tiles.block_q, tiles.block_k) for tiles in made]


def _order(lists: TileLists) -> dict[str, Any]:
    batch, heads, blocks, others = lists.order.shape
    strides = (heads * blocks if batch > 1 else 0, blocks if heads > 1 else 0, others)
    return {"order_ptr": lists.order, "counts_ptr": lists.counts, "order_strides": strides}


def forward(call: Call, lists: TileLists, out: Tensor, lse: Tensor) -> Launch:
    """Writes ``out`` and ``lse``, both contiguous; ``lists`` by block of queries."""
    tiles = forward_tiles(call.size, call.q.element_size(), room_of(call.q))
    arguments = {
        "q_ptr": call.q, "k_ptr": call.k, "v_ptr": call.v, "out_ptr": out, "lse_ptr": lse, "inputs": call.inputs,
        "place": call.place, "scale": call.scale, **call.strides(), **_order(lists), **call.constants(tiles),
    }  # fmt: skip
    programs = triton.cdiv(call.q.shape[2], tiles.block_q) * call.q.shape[0] * call.q.shape[1]
    return Launch(forward_kernel, programs, arguments, call.options(tiles))


def delta(grad: Tensor, out: Tensor, grad_lse: Tensor | None, into: Tensor) -> Launch:
    """Writes ``sum(grad * out) - grad_lse`` of each row, fp32."""
    batch, heads, rows, size = out.shape
    arguments = {
        "grad_ptr": grad, "out_ptr": out, "grad_lse_ptr": into if grad_lse is None else grad_lse, "delta_ptr": into,
        "rows": rows, "heads": heads, "grad_strides": grad.stride(), "out_strides": out.stride(),
        "HAS_LSE": grad_lse is not None, "DV": size, "DV_PAD": padded(size), "BLOCK_Q": DELTA_BLOCK,
    }  # fmt: skip
    return Launch(delta_kernel, triton.cdiv(rows, DELTA_BLOCK) * batch * heads, arguments, {"num_warps": 4})


@dataclass
class Upstream:
    """Gradient of ``out``, and what rows were saved or made of it: ``lse`` and ``delta``, contiguous fp32."""

    grad: Tensor
    lse: Tensor
    delta: Tensor

    def arguments(self) -> dict[str, Any]:
        return {"grad_ptr": self.grad, "lse_ptr": self.lse, "delta_ptr": self.delta, "grad_strides": self.grad.stride()}


def keys(call: Call, lists: TileLists, upstream: Upstream, dk: Tensor, dv: Tensor) -> Launch:
    """Writes ``dk`` and ``dv``, ``[batch, heads / shared, keys, size]``, contiguous; ``lists`` by block of keys."""
    tiles = keys_tiles(call.size, call.q.element_size(), room_of(call.q))
    batch, lines, count, _ = dk.shape
    arguments = {
        "q_ptr": call.q, "k_ptr": call.k, "v_ptr": call.v, "dk_ptr": dk, "dv_ptr": dv, "inputs": call.inputs,
        "place": call.place, "scale": call.scale, "shared": call.q.shape[1] // max(1, lines), **upstream.arguments(),
        **call.strides(), **_order(lists), **call.constants(tiles, PULL=call.functions.pull),
    }  # fmt: skip
    return Launch(keys_kernel, triton.cdiv(count, tiles.block_k) * batch * lines, arguments, call.options(tiles))


def queries(
    call: Call, lists: TileLists, upstream: Upstream, dq: Tensor, pull: Callable[..., Any], gradients: Sequence[Tensor]
) -> Launch:
    """Writes ``dq``, contiguous, and adds to ``gradients`` by ``pull``; ``lists`` by block of queries."""
    tiles = queries_tiles(call.size, call.q.element_size(), room_of(call.q))
    arguments = {
        "q_ptr": call.q, "k_ptr": call.k, "v_ptr": call.v, "dq_ptr": dq, "inputs": call.inputs, "place": call.place,
        "gradients": tuple(gradients) or (upstream.delta,), "scale": call.scale, **upstream.arguments(),
        **call.strides(), **_order(lists), **call.constants(tiles, PULL=pull),
    }  # fmt: skip
    programs = triton.cdiv(call.q.shape[2], tiles.block_q) * call.q.shape[0] * call.q.shape[1]
    return Launch(queries_kernel, programs, arguments, call.options(tiles))
