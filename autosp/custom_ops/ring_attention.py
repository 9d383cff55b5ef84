"""``autosp::ring_attention``: keys and values go round the group, block by block (Liu et al. 2023, arXiv:2310.01889).

The forward merges the results of the blocks by their log-sum-exp; the backward sends keys, values and their gradients
round once more. One node before dispatch; below autograd point-to-point exchanges and ``autosp::block_attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import block_attention  # noqa: F401 - defines the operators that a ring is made of
from ._library import define, group_rank, group_size

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class _Ring:
    """The arguments of the operator besides tensors, seen from this rank."""

    numbers: Sequence[Any]
    program: str
    scale: float
    rows: Sequence[Any]
    starts: Sequence[Any]
    sizes: Sequence[Any]
    bounds: Sequence[Any]
    group: str

    @property
    def ranks(self) -> int:
        return group_size(self.group)

    def settings(self, step: int) -> tuple[Any, ...]:
        """Settings of ``autosp::block_attention`` for the keys that are here after ``step`` passes."""
        rank = group_rank(self.group)
        owner = (rank - step) % self.ranks
        origin = [0, 0, rank * self.rows[0] - self.starts[0], owner * self.rows[1] - self.starts[1]]
        return list(self.numbers), self.program, self.scale, origin, list(self.sizes), list(self.bounds)

    def pass_on(self, *tensors: Tensor) -> list[Tensor]:
        """Each rank's tensors go to the next rank, in one exchange."""
        flat = torch.cat([x.reshape(-1) for x in tensors])
        rank, count = group_rank(self.group), flat.numel()
        send = [count if p == (rank + 1) % self.ranks else 0 for p in range(self.ranks)]
        receive = [count if p == (rank - 1) % self.ranks else 0 for p in range(self.ranks)]
        flat = _c10d.wait_tensor(_c10d.all_to_all_single(flat, receive, send, self.group))
        return [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True)]


def _merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Results over two sets of keys as the result over both; ``out`` is wide, a row that sees nothing has -inf."""
    both = torch.logaddexp(lse, new_lse)
    zero = both.isinf()
    old_share = torch.where(zero, 0.0, torch.exp(lse - both)).unsqueeze(-1)
    new_share = torch.where(zero, 0.0, torch.exp(new_lse - both)).unsqueeze(-1)
    return out * old_share + new_out.to(out.dtype) * new_share, both


def _forward(ring: _Ring, q: Tensor, k: Tensor, v: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    attend = torch.ops.autosp.block_attention
    part, lse = attend(q, k, v, leaves, *ring.settings(0))
    out = part.to(lse.dtype)
    for step in range(1, ring.ranks):
        k, v = ring.pass_on(k, v) if k.dtype == v.dtype else (*ring.pass_on(k), *ring.pass_on(v))
        out, lse = _merge(out, lse, *attend(q, k, v, leaves, *ring.settings(step)))
    return out.to(q.dtype), lse


def _backward(
    ring: _Ring, grad: Tensor, grad_lse: Tensor | None, saved: Sequence[Tensor], leaves: Sequence[Tensor],
    wanted: Sequence[bool],
):  # fmt: skip
    q, k, v, out, lse = saved
    own_types = k.dtype, v.dtype
    dq, dk, dv, leaf_grads = None, None, None, None
    for step in range(ring.ranks):
        if step:
            # Gradients travel in the width in which they are summed.
            k, v = ring.pass_on(k, v) if k.dtype == v.dtype else (*ring.pass_on(k), *ring.pass_on(v))
            dk, dv = ring.pass_on(dk, dv)
        part = torch.ops.autosp.block_attention_backward(
            grad, grad_lse, q, k, v, out, lse, leaves, *ring.settings(step), list(wanted)
        )
        found = [x.to(lse.dtype) for x in part]
        dq = found[0] if dq is None else dq + found[0]
        dk = found[1] if dk is None else dk + found[1]
        dv = found[2] if dv is None else dv + found[2]
        leaf_grads = found[3:] if leaf_grads is None else [a + b for a, b in zip(leaf_grads, found[3:], strict=True)]
    dk, dv = ring.pass_on(dk, dv)
    return dq.to(q.dtype), dk.to(own_types[0]), dv.to(own_types[1]), leaf_grads or []


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ring, q, k, v, *leaves):
        out, lse = _forward(ring, q, k, v, leaves)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *leaves)
        ctx.ring = ring
        return out, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        saved, leaves = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        grad = torch.zeros_like(saved[3]) if grad is None else grad
        wanted = ctx.needs_input_grad[4:]
        dq, dk, dv, leaf_grads = _backward(ctx.ring, grad, grad_lse, saved, leaves, wanted)
        grads = [g.to(x.dtype) if want else None for g, x, want in zip(leaf_grads, leaves, wanted, strict=True)]
        return None, dq, dk, dv, *grads


def _fake(q, k, v, leaves, *_):
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, rows, _ = q.shape
    return q.new_empty(batch, heads, rows, v.shape[-1]), q.new_empty(batch, heads, rows, dtype=wide)


ring_attention = define(
    "ring_attention(Tensor q, Tensor k, Tensor v, Tensor[] leaves, SymInt[] numbers, str program, float scale, "
    "SymInt[] rows, SymInt[] starts, SymInt[] sizes, SymInt[] bounds, str group) -> (Tensor, Tensor)",
    forward=lambda q, k, v, leaves, *settings: _forward(_Ring(*settings), q, k, v, leaves),
    fake=_fake,
    autograd=lambda q, k, v, leaves, *settings: _RingAttention.apply(_Ring(*settings), q, k, v, *leaves),
)
