"""The registered operators ``autosp::linear_*``: schema, fake, autograd. Groups are name strings, ``""`` is none.

Rows are flattened to ``[N, ...]`` by the public functions. ``dtype`` is the compute dtype of the GEMMs; statistics and
losses come in fp32 (fp64 for fp64). Backward operators have no derivative of their own: a second derivative raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autosp.errors import InternalError

from .. import dispatch
from . import form_impl, stats_impl
from .gemm import accumulator_dtype, logits_dtype
from .modes import exact_products, refuse_second_derivative

_INT = torch.int64


def _options(
    softcap: float, tp: str, start: int, end: int, chunk_size: int, dtype: torch.dtype, strict=False, debug=False
) -> stats_impl.Options:
    return stats_impl.Options(softcap, tp, start, end, chunk_size, dtype, strict, debug)


@torch.library.custom_op("autosp::linear_stats", mutates_args=())
def linear_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, valid: Tensor | None,
    temperature: Tensor | None, main_grad: Tensor | None, softcap: float, tp: str, start: int, end: int,
    chunk_size: int, dtype: torch.dtype, want_entropy: bool, want_mean: bool, keep: bool, strict: bool, debug: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Per-token statistics; see ``stats_impl.Statistics``.

    Returns:
        ``logprob [N, K]``, ``entropy [N]``, ``lse [N]``, ``mean [N]`` (differentiable; no elements if not wanted),
        ``is_top [N, K]`` bool, ``top [N]``, ``log_total [N]``, ``order [N or 0]`` int64, ``layout [4]`` int64 on the
        CPU, ``kept [N or 0, V_local]``.
    """
    options = _options(softcap, tp, start, end, chunk_size, dtype, strict, debug)
    with exact_products(hidden):
        wants = (want_entropy, want_mean)
        s = stats_impl.forward(hidden, weight, bias, index, valid, temperature, options, keep, wants)
        lse = s.top + s.log_total
    return s.logprob, s.entropy, lse, s.mean, s.is_top, s.top, s.log_total, s.order, s.layout, s.kept


@linear_stats.register_fake
def _(
    hidden, weight, bias, index, valid, temperature, main_grad, softcap, tp, start, end, chunk_size, dtype,
    want_entropy, want_mean, keep, strict, debug,
):  # fmt: skip
    wide = accumulator_dtype(dtype)
    n = hidden.shape[0]

    def vector(wanted=True):
        return hidden.new_empty(n if wanted else 0, dtype=wide)

    kept_dtype = logits_dtype(hidden.device, dtype, bias is not None)
    return (
        hidden.new_empty(index.shape, dtype=wide), vector(want_entropy), vector(), vector(want_mean),
        hidden.new_empty(index.shape, dtype=torch.bool), vector(), vector(),
        hidden.new_empty(0 if valid is None else n, dtype=_INT),
        torch.empty(4, dtype=_INT, device="cpu"), hidden.new_empty(n if keep else 0, weight.shape[0], dtype=kept_dtype),
    )  # fmt: skip


def _stats_setup(ctx, inputs, output) -> None:
    hidden, weight, bias, index, _, temperature, main_grad, softcap, tp, _, _, chunk_size, dtype = inputs[:13]
    logprob, entropy, _, _, is_top, top, log_total, order, layout, kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(is_top, top, log_total, order, layout, kept)
    ctx.save_for_backward(
        hidden, weight, bias, index, temperature, logprob, entropy, top, log_total, order, layout, kept
    )
    # Not among the saved tensors: every backward of the step adds to it.
    ctx.main_grad = main_grad
    ctx.settings = (softcap, tp, chunk_size, dtype)
    ctx.wants = inputs[13:15]


def _stats_backward(ctx, g_logprob, g_entropy, g_lse, g_mean, *_):
    refuse_second_derivative()
    none = (None,) * 15
    if g_logprob is None and g_entropy is None and g_lse is None and g_mean is None:
        return (None, None, None, *none)
    # A tracer hands a tangent of no elements to an output of no elements.
    g_entropy, g_mean = (g if want else None for g, want in zip((g_entropy, g_mean), ctx.wants, strict=True))
    needs = ctx.needs_input_grad[:3]
    hidden, weight, bias, index, temperature, *saved = ctx.saved_tensors
    dh, dw, db = linear_stats_backward(
        g_logprob, g_entropy, g_lse, g_mean, hidden, weight, bias, index, temperature, *saved, ctx.main_grad,
        *ctx.settings, *needs,
    )  # fmt: skip
    takes_weight = needs[1] and ctx.main_grad is None
    return (dh if needs[0] else None, dw if takes_weight else None, db if needs[2] else None, *none)


linear_stats.register_autograd(_stats_backward, setup_context=_stats_setup)


@torch.library.custom_op("autosp::linear_stats_backward", mutates_args={"main_grad"})
def linear_stats_backward(
    g_logprob: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, g_mean: Tensor | None,
    hidden: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, temperature: Tensor | None, logprob: Tensor,
    entropy: Tensor, top: Tensor, log_total: Tensor, order: Tensor, layout: Tensor, kept: Tensor,
    main_grad: Tensor | None, softcap: float, tp: str, chunk_size: int, dtype: torch.dtype,
    need_hidden: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of hidden, weight and bias from those of the statistics; see ``stats_impl.backward``."""
    stats = stats_impl.Statistics(logprob, logprob, top, log_total, entropy, entropy, order, layout, kept)
    up = stats_impl.Upstream(g_logprob, g_entropy, g_lse, g_mean)
    options = _options(softcap, tp, -1, -1, chunk_size, dtype)
    needs = (need_hidden, need_weight, need_bias)
    with exact_products(hidden):
        return stats_impl.backward(up, stats, hidden, weight, bias, index, temperature, options, needs, main_grad)


@linear_stats_backward.register_fake
def _(
    g_logprob, g_entropy, g_lse, g_mean, hidden, weight, bias, index, temperature, logprob, entropy, top, log_total,
    order, layout, kept, main_grad, softcap, tp, chunk_size, dtype, need_hidden, need_weight, need_bias,
):  # fmt: skip
    none = hidden.new_empty(0, dtype=dtype)
    return (
        hidden.new_empty(hidden.shape) if need_hidden else none,
        weight.new_empty(weight.shape) if need_weight and main_grad is None else hidden.new_empty(0, dtype=dtype),
        bias.new_empty(bias.shape) if need_bias else hidden.new_empty(0, dtype=dtype),
    )


@torch.library.custom_op("autosp::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: Tensor | None,
    main_grad: Tensor | None, ignore_index: int, smoothing: float, z_loss: float, softcap: float, tp: str, start: int,
    end: int, chunk_size: int, dtype: torch.dtype, need_hidden: bool, need_weight: bool, need_bias: bool, strict: bool,
    debug: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Sum of the losses of the tokens whose target is not ``ignore_index``, and how many there are.

    Args:
        hidden: ``[N, H]``; weight: ``[V_local, H]``; bias: ``[V_local]``; target: ``[N]`` int64.
        main_grad: fp32 ``[V_local, H]`` to which the backward adds the weight gradient instead of returning it.
        need_hidden, need_weight, need_bias: which gradients are formed; a backward that wants another one raises.

    Returns:
        ``loss_sum`` (a number, differentiable), ``count`` (fp32 number), and the gradients of upstream 1 in fp32, a
        tensor of no elements for each that is not formed.
    """
    options = _options(softcap, tp, start, end, chunk_size, dtype, strict, debug)
    valid = target != ignore_index
    needs = (need_hidden, need_weight, need_bias)
    loss = form_impl.Loss(smoothing, z_loss)
    with exact_products(hidden):
        total, *grads = form_impl.forward(
            hidden, weight, bias, target, valid, temperature, loss, options, needs, None, None
        )
    return total, valid.sum(dtype=torch.float32), *grads


@linear_cross_entropy.register_fake
def _(
    hidden, weight, bias, target, temperature, main_grad, ignore_index, smoothing, z_loss, softcap, tp, start, end,
    chunk_size, dtype, need_hidden, need_weight, need_bias, strict, debug,
):  # fmt: skip
    wide = accumulator_dtype(dtype)
    return (
        hidden.new_empty((), dtype=wide),
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape if need_hidden else (0,), dtype=wide),
        hidden.new_empty(weight.shape if need_weight else (0,), dtype=wide),
        hidden.new_empty(bias.shape if need_bias else (0,), dtype=wide),
    )


def _formed_setup(ctx, inputs, output) -> None:
    hidden, weight, bias = inputs[:3]
    _, count, *grads = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(count, *grads)
    ctx.save_for_backward(*grads)
    ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
    ctx.main_grad = inputs[5]
    ctx.formed = inputs[15:18]


def scaled(upstream, grads, needs, formed, dtypes) -> list[Tensor | None]:
    """The kept fp32 gradients times the upstream number, in the inputs' dtypes; ``None`` where none is needed."""
    result: list[Tensor | None] = []
    for grad, need, has, dtype in zip(grads, needs, formed, dtypes, strict=True):
        if not need:
            result.append(None)
        elif not has:
            raise InternalError(
                "a backward wants a gradient that the fused loss was told not to form; pass need_*=True for every "
                "input that requires a gradient"
            )
        else:
            result.append(scale_gradient(upstream, grad, dtype))
    return result


def _formed_backward(ctx, upstream, *_):
    refuse_second_derivative()
    if upstream is None:
        return (None,) * 20
    needs, grads = list(ctx.needs_input_grad[:3]), ctx.saved_tensors
    if ctx.main_grad is not None and needs[1]:
        needs[1] = False
        add_scaled(ctx.main_grad, upstream, grads[1])
    result = scaled(upstream, grads, needs, ctx.formed, ctx.dtypes)
    return (*result, *(None,) * 17)


linear_cross_entropy.register_autograd(_formed_backward, setup_context=_formed_setup)


@torch.library.custom_op("autosp::linear_scale_gradient", mutates_args=())
def scale_gradient(upstream: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """``upstream`` (a number) times ``grad`` in ``grad``'s dtype, rounded once to ``dtype``; one pass."""
    out = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    if dispatch.triton_usable(grad) and grad.is_contiguous() and grad.numel():
        from . import kernels

        kernels.scale_into(out, grad, upstream.to(torch.float32))
        return out
    return torch.mul(grad, upstream.to(grad.dtype), out=out)


@scale_gradient.register_fake
def _(upstream, grad, dtype):
    return grad.new_empty(grad.shape, dtype=dtype)


@torch.library.custom_op("autosp::linear_add_scaled", mutates_args={"main_grad"})
def add_scaled(main_grad: Tensor, upstream: Tensor, grad: Tensor) -> None:
    """``main_grad += upstream * grad`` in fp32, in one pass."""
    main_grad.addcmul_(grad, upstream.to(grad.dtype))


@add_scaled.register_fake
def _(main_grad, upstream, grad):
    return None


@torch.library.custom_op("autosp::linear_sum_over", mutates_args=())
def sum_over(value: Tensor, group: str) -> Tensor:
    """Sum of ``value`` over the group; its adjoint is the identity, since every rank has the same loss."""
    from . import groups

    return groups.all_reduce(value.clone(), "sum", group)


@sum_over.register_fake
def _(value, group):
    return torch.empty_like(value)


sum_over.register_autograd(lambda ctx, upstream: (upstream, None))
