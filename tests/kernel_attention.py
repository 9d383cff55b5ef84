"""Attention operators as a kernel library registers them: opaque to torch, with a backward of their own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import autosp


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if hidden is None else ~hidden
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous()


def _causal(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)


def _documents(q: Tensor, starts: Tensor) -> Tensor:
    number = (torch.arange(q.shape[0])[:, None] >= starts[None, :]).sum(-1)
    return (number[:, None] != number[None, :]) | torch.ones(q.shape[0], q.shape[0], dtype=torch.bool).triu(1)


@torch.library.custom_op("autosp_test::flash", mutates_args=())
def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of ``[batch, tokens, heads, size]``; the second result is for the backward alone."""
    return _attend(q, k, v, scale, _causal(q, k)), q.new_empty(q.shape[0], q.shape[2], q.shape[1])


@flash.register_fake
def _(q, k, v, scale):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[0], q.shape[2], q.shape[1])


@torch.library.custom_op("autosp_test::flash_varlen", mutates_args=())
def flash_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float) -> Tensor:
    """Causal attention of documents of a packed row ``[tokens, heads, size]`` that begin at ``starts``."""
    return _attend(q[None], k[None], v[None], scale, _documents(q, starts))[0]


@flash_varlen.register_fake
def _(q, k, v, starts, scale):
    return q.new_empty(*q.shape[:2], v.shape[2])


@torch.library.custom_op("autosp_test::flash_backward", mutates_args=())
def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        if starts is None:
            out = _attend(*leaves, scale, _causal(q, k))
        else:
            out = _attend(*(x[None] for x in leaves), scale, _documents(q, starts))[0]
        dq, dk, dv = torch.autograd.grad(out, leaves, grad)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@flash_backward.register_fake
def _(grad, q, k, v, starts, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output):
    q, k, v, *rest = inputs
    ctx.scale = rest[-1]
    ctx.save_for_backward(q, k, v, *rest[:-1])


flash.register_autograd(
    lambda ctx, grad, _: (*torch.ops.autosp_test.flash_backward(grad, *ctx.saved_tensors, None, ctx.scale), None),
    setup_context=_setup,
)
flash_varlen.register_autograd(
    lambda ctx, grad: (*torch.ops.autosp_test.flash_backward(grad, *ctx.saved_tensors, ctx.scale), None, None),
    setup_context=_setup,
)


def register() -> None:
    """What a user writes, once."""
    autosp.register_attention(torch.ops.autosp_test.flash.default)
    autosp.register_attention(torch.ops.autosp_test.flash_varlen.default, layout="shd")


def transformers_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """The interface of transformers: ``[batch, heads, tokens, size]`` in, ``[batch, tokens, heads, size]`` out."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return torch.ops.autosp_test.flash(query, key, value, scaling)[0], None
