"""The cross entropy whose weight gradient goes into a ``main_grad`` in the forward, with a promised upstream."""

from __future__ import annotations

import torch
from torch import Tensor

from autosp.errors import InputError

from . import form_impl
from .modes import exact_products, refuse_second_derivative
from .ops import _options


@torch.library.custom_op("autosp::linear_cross_entropy_into", mutates_args={"main_grad"})
def linear_cross_entropy_into(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: Tensor | None,
    main_grad: Tensor, promised: Tensor, ignore_index: int, smoothing: float, z_loss: float, softcap: float, tp: str,
    start: int, end: int, chunk_size: int, dtype: torch.dtype, need_hidden: bool, need_bias: bool, strict: bool,
    debug: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``linear_cross_entropy``; adds ``promised * dloss_sum/dweight`` to ``main_grad``.

    Returns:
        ``loss_sum``, and the final gradients (upstream ``promised``) of hidden and bias in their dtypes.
    """
    options = _options(softcap, tp, start, end, chunk_size, dtype, strict, debug)
    loss = form_impl.Loss(smoothing, z_loss)
    with exact_products(hidden):
        total, dh, _, db = form_impl.forward(
            hidden, weight, bias, target, target != ignore_index, temperature, loss, options,
            (need_hidden, True, need_bias), main_grad, promised,
        )  # fmt: skip
    return total, dh, db


@linear_cross_entropy_into.register_fake
def _(
    hidden, weight, bias, target, temperature, main_grad, promised, ignore_index, smoothing, z_loss, softcap, tp, start,
    end, chunk_size, dtype, need_hidden, need_bias, strict, debug,
):  # fmt: skip
    from .gemm import accumulator_dtype

    return (
        hidden.new_empty((), dtype=accumulator_dtype(dtype)),
        hidden.new_empty(hidden.shape if need_hidden else (0,)),
        bias.new_empty(bias.shape) if need_bias else hidden.new_empty(0),
    )


@torch.library.custom_op("autosp::linear_attach", mutates_args=())
def attach(
    value: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, dh: Tensor, db: Tensor, promised: Tensor,
    main_grad: Tensor, strict: bool,
) -> Tensor:  # fmt: skip
    """``value`` with ready-made gradients; its backward compares the upstream number with ``promised``."""
    return value.clone()


@attach.register_fake
def _(value, hidden, weight, bias, dh, db, promised, main_grad, strict):
    return torch.empty_like(value)


def _attach_setup(ctx, inputs, output) -> None:
    _, _, _, _, dh, db, promised, main_grad, strict = inputs
    ctx.save_for_backward(dh, db, promised)
    # Not among the saved tensors: every loss of the step adds to it.
    ctx.main_grad, ctx.strict = main_grad, strict


def _attach_backward(ctx, upstream):
    refuse_second_derivative()
    dh, db, promised = ctx.saved_tensors
    needs = ctx.needs_input_grad
    check_promise(ctx.main_grad, upstream, promised, ctx.strict)
    grads = [as_promised(upstream, promised, g) if need else None for g, need in ((dh, needs[1]), (db, needs[3]))]
    return None, grads[0], None, grads[1], None, None, None, None, None


attach.register_autograd(_attach_backward, setup_context=_attach_setup)


def _is_free_to_read(number: Tensor) -> bool:
    return number.device.type == "cpu"


def _kept(upstream: Tensor, promised: Tensor) -> Tensor:
    return (upstream - promised).abs() <= 1e-6 * promised.abs()


@torch.library.custom_op("autosp::linear_check_promise", mutates_args={"main_grad"})
def check_promise(main_grad: Tensor, upstream: Tensor, promised: Tensor, strict: bool) -> None:
    """See that the upstream number is the promised one; otherwise the gradient in ``main_grad`` is wrong.

    On a CPU, or with ``strict``, the number is read and a broken promise is an error. Elsewhere reading it would let
    the device run dry in every step: the first element of ``main_grad`` becomes NaN instead.

    Raises:
        InputError: it is another number.
    """
    if not strict and not _is_free_to_read(upstream):
        if main_grad.numel():
            main_grad[0, 0].add_(torch.where(_kept(upstream, promised), 0.0, float("nan")))
        return
    if not bool(_kept(upstream, promised)):
        raise InputError(
            f"main_grad_upstream promised an upstream gradient of {float(promised)} for the loss, but the backward "
            f"brought {float(upstream)}; main_grad already holds the gradient of the promise: zero it, and give "
            "main_grad_upstream the number that the loss is multiplied by (the loss scale over the accumulation "
            "steps), or leave it out"
        )


@check_promise.register_fake
def _(main_grad, upstream, promised, strict):
    return None


@torch.library.custom_op("autosp::linear_as_promised", mutates_args=())
def as_promised(upstream: Tensor, promised: Tensor, grad: Tensor) -> Tensor:
    """``grad`` where the upstream number is the promised one, NaN otherwise; the device is not waited for."""
    return torch.where(_kept(upstream, promised), grad, float("nan"))


@as_promised.register_fake
def _(upstream, promised, grad):
    return torch.empty_like(grad)
