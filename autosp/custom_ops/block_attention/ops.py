"""The operators ``autosp::block_attention`` and its backward: schema, fake, autograd.

Neither ever makes a tensor of queries x keys: masks and biases come as programs over small tensors. The backward has no
derivative of its own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import blocks, flash, fused

_log = logging.getLogger(__name__)


def _path(refusal: str, q: Tensor) -> Any:
    """The kernels, or the plain blocks where those refuse; on a GPU the reason is logged, once each."""
    if refusal and q.is_cuda:
        _say(refusal)
    return blocks if refusal else fused


def _band(problem: blocks.Problem, q: Tensor, k: Tensor, v: Tensor) -> flash.Band | None:
    """What FlashAttention is given, or None where it cannot compute this block or the kernels are faster."""
    part = flash.band(problem, q.shape[2], k.shape[2]) if flash.serves(problem, q, k, v) else None
    if part is not None and flash.is_slow(part, q) and not fused.refusal(problem, q, k, v):
        return None
    return part


@functools.lru_cache(maxsize=64)
def _say(refusal: str) -> None:
    _log.info("attention runs as plain blocks, slower than a kernel: %s", refusal)


@torch.library.custom_op("autosp::block_attention", mutates_args=())
def block_attention(
    q: Tensor, k: Tensor, v: Tensor, leaves: Sequence[Tensor], numbers: Sequence[int], program: str, scale: float,
    origin: Sequence[int], sizes: Sequence[int], bounds: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of a block of queries with a block of keys of one whole attention.

    Query ``i`` sees key ``j`` when ``bounds[0] <= i - j <= bounds[1]``, both below ``sizes``, and the program's mask
    says so. A query that sees nothing gets zeros, and -inf as its log-sum-exp.

    Args:
        q: ``[batch, heads, rows, size]``.
        k, v: ``[batch, key heads, keys, size]``, sizes of their own; key heads divide heads (grouped attention).
        leaves, numbers, program: what is done to the scores, see ``program``; ``""`` is nothing.
        scale: factor of the scores.
        origin: batch row, head, query and key that the first rows of q and k are.
        sizes: queries and keys of the whole attention; rows of q beyond are computed like the nearest real one.
        bounds: allowed ``query - key``, both ends included.

    Returns:
        ``out [batch, heads, rows, size of v]`` in the dtype of q, ``lse [batch, heads, rows]`` in fp32 (fp64 for fp64).
    """
    problem = blocks.Problem.of(leaves, numbers, program, scale, origin, sizes, bounds)
    part = _band(problem, q, k, v)
    if part is not None:
        return flash.forward(problem, part, q, k, v)
    path = _path(fused.refusal(problem, q, k, v), q)
    with torch.autocast(q.device.type, enabled=False):
        return path.forward(problem, q, k, v)


@block_attention.register_fake
def _(q, k, v, leaves, numbers, program, scale, origin, sizes, bounds):
    batch, heads, rows, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(batch, heads, rows, v.shape[-1]), q.new_empty(batch, heads, rows, dtype=wide)


@torch.library.custom_op("autosp::block_attention_backward", mutates_args=())
def block_attention_backward(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    leaves: Sequence[Tensor], numbers: Sequence[int], program: str, scale: float, origin: Sequence[int],
    sizes: Sequence[int], bounds: Sequence[int], wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """``[dq, dk, dv, one gradient a leaf]``, empty for leaves that are not ``wanted``.

    ``out`` and ``lse`` may be those of all keys while ``k`` holds a part of them: dq is then that part's share.
    """
    problem = blocks.Problem.of(leaves, numbers, program, scale, origin, sizes, bounds)
    part = _band(problem, q, k, v)
    if part is not None and grad_lse is None:
        unused = [x.new_zeros(x.shape if want else 0) for x, want in zip(leaves, wanted, strict=True)]
        return [*flash.backward(problem, part, grad, q, k, v, out, lse), *unused]
    path = _path(fused.refusal(problem, q, k, v, wanted), q)
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv, leaf_grads = path.backward(problem, grad, grad_lse, q, k, v, out, lse, wanted)
    return [dq, dk, dv, *leaf_grads]


@block_attention_backward.register_fake
def _(grad, grad_lse, q, k, v, out, lse, leaves, numbers, program, scale, origin, sizes, bounds, wanted):
    made = [x.new_empty(x.shape if want else [0]) for x, want in zip(leaves, wanted, strict=True)]
    return [x.new_empty(x.shape) for x in (q, k, v)] + made


def _setup(ctx, inputs, output) -> None:
    q, k, v, leaves, numbers, program, scale, origin, sizes, bounds = inputs
    out, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *leaves)
    ctx.settings = (numbers, program, scale, origin, sizes, bounds)


def _backward(ctx, grad, grad_lse):
    q, k, v, out, lse, *leaves = ctx.saved_tensors
    # torch takes an empty list of integers for an empty list of tensors, and wants a list back.
    no_numbers = None if len(ctx.settings[0]) else []
    if grad is None and grad_lse is None:
        return None, None, None, [None] * len(leaves), no_numbers, *(None,) * 5
    if grad is None:
        grad = torch.zeros_like(out)
    wanted = list(ctx.needs_input_grad[3]) if leaves else []
    dq, dk, dv, *found = torch.ops.autosp.block_attention_backward(
        grad, grad_lse, q, k, v, out, lse, leaves, *ctx.settings, wanted
    )
    leaf_grads = [g if want else None for g, want in zip(found, wanted, strict=True)]
    return dq, dk, dv, leaf_grads, no_numbers, *(None,) * 5


block_attention.register_autograd(_backward, setup_context=_setup)
