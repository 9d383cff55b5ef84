"""A stand-in for the packages of FlashAttention 2 and 3: operators of the same names and arguments, on the CPU.

As in those packages the functions are ``torch.autograd.Function`` around operators, and the backward operators write
the gradients that they are given. Only the mathematics is torch's own.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def _hidden(rows: int, keys: int, causal: bool, left: int, right: int, device: torch.device) -> Tensor:
    """Where a key is not seen: windows count from the last query and the last key, as FlashAttention counts them."""
    distance = torch.arange(rows, device=device)[:, None] + (keys - rows) - torch.arange(keys, device=device)[None]
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=device)
    if causal:
        right = 0
    if left >= 0:
        hidden = hidden | (distance > left)
    if right >= 0:
        hidden = hidden | (-distance > right)
    return hidden


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, right: int, softcap: float,
           slopes: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``[batch, tokens, heads, size]`` and the log-sum-exp ``[batch, heads, tokens]``, written out."""
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        rows, keys = q.shape[1], k.shape[1]
        distance = torch.arange(rows)[:, None] + (keys - rows) - torch.arange(keys)[None]
        scores = scores - slopes.view(-1, q.shape[2], 1, 1) * distance.abs()
    scores = scores.masked_fill(_hidden(q.shape[1], k.shape[1], causal, left, right, q.device), float("-inf"))
    mixed = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v.float())
    return mixed.to(q.dtype), torch.logsumexp(scores, -1)


def _packed(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """``[tokens, heads, size]``: the documents one by one."""
    parts = [
        _dense(q[None, a:b], k[None, c:d], v[None, c:d], *rest)
        for a, b, c, d in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True)
    ]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], -1)


def _gradients(function: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, into: list[Tensor | None]) -> None:
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(function(*leaves)[0], leaves, grad)
    for place, value in zip(into, found, strict=True):
        assert place is not None
        place.copy_(value)


# FlashAttention 2: https://github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py.
@torch.library.custom_op("flashattn::_flash_attn_forward", mutates_args=())
def forward_2(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert q.stride(-1) == 1 and q.shape[-1] % 8 == 0, "the kernel wants padded heads"
    window = window_size_left, window_size_right
    out, lse = _dense(q, k, v, softmax_scale, causal, *window, softcap, alibi_slopes)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


@forward_2.register_fake
def _(q, k, v, *rest):
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op("flashattn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def backward_2(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rest = softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
    _gradients(lambda *x: _dense(*x, *rest), dout, q, k, v, [dq, dk, dv])
    return q.new_empty(1, dtype=torch.float32)


@backward_2.register_fake
def _(dout, q, *rest):
    return q.new_empty(1, dtype=torch.float32)


@torch.library.custom_op("flashattn::_flash_attn_varlen_forward", mutates_args=())
def varlen_forward_2(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    window = window_size_left, window_size_right
    out, lse = _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, *window, softcap, alibi_slopes)
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


@varlen_forward_2.register_fake
def _(q, k, v, *rest, **settings):
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op("flashattn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def varlen_backward_2(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    rest = softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
    _gradients(lambda *x: _packed(*x, cu_seqlens_q, cu_seqlens_k, *rest), dout, q, k, v, [dq, dk, dv])
    return q.new_empty(1, dtype=torch.float32)


@varlen_backward_2.register_fake
def _(dout, q, *rest):
    return q.new_empty(1, dtype=torch.float32)


def _padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, [0, -x.shape[-1] % 8]) if x.shape[-1] % 8 else x


class Function2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic):
        size = q.size(3)
        scale = softmax_scale or q.shape[-1] ** -0.5
        q, k, v = (_padded(x.detach()) for x in (q, k, v))
        rest = dropout_p, scale, causal, *window_size, softcap, alibi_slopes
        out, lse, _, state = torch.ops.flashattn._flash_attn_forward(q, k, v, *rest, False)
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.rest, ctx.deterministic = rest, deterministic
        return out[..., :size]

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, state = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flashattn._flash_attn_backward(
            _padded(dout), q, k, v, out, lse, dq, dk, dv, *ctx.rest, ctx.deterministic, state
        )
        size = dout.shape[-1]
        return dq[..., :size], dk[..., :size], dv[..., :size], None, None, None, None, None, None, None


class VarlenFunction2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, softmax_scale, causal, window_size, softcap,
                alibi_slopes, deterministic):  # fmt: skip
        size = q.size(2)
        scale = softmax_scale or q.shape[-1] ** -0.5
        q, k, v = (_padded(x.detach()) for x in (q, k, v))
        rest = max_q, max_k, dropout_p, scale, causal, *window_size, softcap, alibi_slopes
        out, lse, _, state = torch.ops.flashattn._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, *rest, False)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, state)
        ctx.rest, ctx.deterministic = rest, deterministic
        return out[..., :size]

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, cu_q, cu_k, state = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flashattn._flash_attn_varlen_backward(
            _padded(dout), q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, *ctx.rest, ctx.deterministic, state
        )
        size = dout.shape[-1]
        return dq[..., :size], dk[..., :size], dv[..., :size], *(None,) * 11


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False):  # fmt: skip
    return Function2.apply(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False):  # fmt: skip
    return VarlenFunction2.apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic,
    )  # fmt: skip


# FlashAttention 3: the same repository, hopper/flash_attn_interface.py: one operator for rows and packed rows.
@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
def forward_3(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
    attention_chunk: int = 0, softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rest = softmax_scale or q.shape[-1] ** -0.5, causal, window_size_left, window_size_right, softcap, None
    if cu_seqlens_q is None:
        out, lse = _dense(q, k, v, *rest)
    else:
        out, lse = _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest)
    return out, lse, q.new_empty(0), q.new_empty(0)


@forward_3.register_fake
def _(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, *rest, **settings):
    shape = q.shape[:-1]
    lse_shape = (shape[0], shape[2], shape[1]) if cu_seqlens_q is None else (shape[1], shape[0])
    lse = q.new_empty(lse_shape, dtype=torch.float32)
    return q.new_empty(*shape, v.shape[-1]), lse, q.new_empty(0), q.new_empty(0)


@torch.library.custom_op("flash_attn_3::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def backward_3(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None, softmax_scale: float | None = None,
    is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    rest = softmax_scale or q.shape[-1] ** -0.5, is_causal, window_size_left, window_size_right, softcap, None
    if cu_seqlens_q is None:
        _gradients(lambda *x: _dense(*x, *rest), dout, q, k, v, [dq, dk, dv])
    else:
        _gradients(lambda *x: _packed(*x, cu_seqlens_q, cu_seqlens_k, *rest), dout, q, k, v, [dq, dk, dv])
    return q.new_empty(1, dtype=torch.float32)


@backward_3.register_fake
def _(dout, q, *rest, **settings):
    return q.new_empty(1, dtype=torch.float32)


class Function3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size, softcap, deterministic):
        scale = softmax_scale or q.shape[-1] ** -0.5
        packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
        window = {"window_size_left": window_size[0], "window_size_right": window_size[1], "softcap": softcap}
        out, lse, *_ = torch.ops.flash_attn_3._flash_attn_forward(
            q, k, v, **packed, softmax_scale=scale, causal=causal, **window
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.lengths, ctx.rest = (max_q, max_k), (scale, causal, *window_size, softcap, deterministic)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn_3._flash_attn_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, None, None, *ctx.lengths, dq, dk, dv, *ctx.rest
        )
        return dq, dk, dv, *(None,) * 9


def flash_attn_func_3(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                      deterministic=False):  # fmt: skip
    return Function3.apply(q, k, v, None, None, None, None, softmax_scale, causal, window_size, softcap, deterministic)


def flash_attn_varlen_func_3(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
                             causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False):  # fmt: skip
    return Function3.apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap,
        deterministic,
    )  # fmt: skip


def _unused(*_: Any, **__: Any) -> Any:
    raise AssertionError("training has no use for this")


def _module(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    return module


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """transformers finds both packages, and lets them run without a GPU."""
    from transformers import PreTrainedModel
    from transformers import modeling_flash_attention_utils as utils

    modules = {
        "flash_attn": _module("flash_attn", flash_attn_func=flash_attn_func,
                              flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=_unused),
        "flash_attn.bert_padding": _module("flash_attn.bert_padding", pad_input=utils._pad_input,
                                           unpad_input=utils._unpad_input),
        "flash_attn_interface": _module("flash_attn_interface", flash_attn_func=flash_attn_func_3,
                                        flash_attn_varlen_func=flash_attn_varlen_func_3,
                                        flash_attn_with_kvcache=_unused),
    }  # fmt: skip
    here = {2: "is_flash_attn_2_available", 3: "is_flash_attn_3_available"}
    with contextlib.ExitStack() as stack:
        # Not mock.patch.dict: it would forget whatever else is imported meanwhile.
        sys.modules.update(modules)
        stack.callback(lambda: [sys.modules.pop(name) for name in modules])
        for version, name in here.items():
            stack.enter_context(mock.patch.object(utils, name, lambda *_, **__: True))
            entry = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[version]
            stack.enter_context(mock.patch.dict(entry, {"general_availability_check": lambda *_, **__: True}))
        stack.enter_context(mock.patch.object(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True))
        stack.enter_context(mock.patch.object(utils, "_loaded_implementation", None))
        yield
