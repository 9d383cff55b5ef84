"""The registered operators of the divergences between two heads: ``autosp::linear_pair*``."""

from __future__ import annotations

import torch
from torch import Tensor

from . import pair_impl
from .gemm import accumulator_dtype
from .modes import exact_products, refuse_second_derivative
from .ops import _options, scaled
from .pair_rows import Kind


def _models(sh, sw, sb, th, tw, tb, s_cap, t_cap, needs) -> tuple[pair_impl.Model, pair_impl.Model]:
    student = pair_impl.Model(sh, sw, sb, s_cap, tuple(needs[:3]))
    return student, pair_impl.Model(th, tw, tb, t_cap, tuple(needs[3:]))


@torch.library.custom_op("autosp::linear_pair", mutates_args=())
def linear_pair(
    sh: Tensor, sw: Tensor, sb: Tensor | None, th: Tensor, tw: Tensor, tb: Tensor | None, valid: Tensor | None,
    temperature: Tensor | None, code: int, beta: float, s_cap: float, t_cap: float, tp: str, start: int, end: int,
    chunk_size: int, dtype: torch.dtype, debug: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Divergence per token.

    Args:
        sh, sw, sb: student's hidden ``[N, Hs]``, head ``[V_local, Hs]``, bias; th, tw, tb: the teacher's, ``Ht``.
        code, beta: see ``pair_rows.Kind``.

    Returns:
        ``value [N]`` (differentiable), statistics ``[6, N]``, ``order [N or 0]``, ``layout [4]`` int64 on the CPU.
    """
    kind = Kind(code, beta)
    student, teacher = _models(sh, sw, sb, th, tw, tb, s_cap, t_cap, (False,) * 6)
    options = _options(0.0, tp, start, end, chunk_size, dtype, debug=debug)
    with exact_products(sh):
        stats = pair_impl.forward(student, teacher, valid, temperature, kind, options)
        value = kind.value(stats.table[4], stats.table[5]).clone()
    return value, stats.table, stats.order, stats.layout


@linear_pair.register_fake
def _(
    sh, sw, sb, th, tw, tb, valid, temperature, code, beta, s_cap, t_cap, tp, start, end, chunk_size, dtype, debug
):  # fmt: skip
    wide = accumulator_dtype(dtype)
    n = sh.shape[0]
    order = sh.new_empty(0 if valid is None else n, dtype=torch.int64)
    layout = torch.empty(4, dtype=torch.int64, device="cpu")
    return sh.new_empty(n, dtype=wide), sh.new_empty(6, n, dtype=wide), order, layout


def _pair_setup(ctx, inputs, output) -> None:
    _, *saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(*inputs[:6], inputs[7], *saved)
    ctx.settings = (*inputs[8:13], *inputs[15:17])


def _pair_backward(ctx, upstream, *_):
    refuse_second_derivative()
    if upstream is None:
        return (None,) * 18
    needs = list(ctx.needs_input_grad[:6])
    grads = linear_pair_backward(upstream, *ctx.saved_tensors, *ctx.settings, needs)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 12)


linear_pair.register_autograd(_pair_backward, setup_context=_pair_setup)


def _none(tensor: Tensor) -> Tensor:
    return tensor.new_empty(0)


@torch.library.custom_op("autosp::linear_pair_backward", mutates_args=())
def linear_pair_backward(
    upstream: Tensor, sh: Tensor, sw: Tensor, sb: Tensor | None, th: Tensor, tw: Tensor, tb: Tensor | None,
    temperature: Tensor | None, table: Tensor, order: Tensor, layout: Tensor, code: int, beta: float,
    s_cap: float, t_cap: float, tp: str, chunk_size: int, dtype: torch.dtype, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the six inputs; a tensor of no elements for each that is not needed."""
    student, teacher = _models(sh, sw, sb, th, tw, tb, s_cap, t_cap, needs)
    options = _options(0.0, tp, -1, -1, chunk_size, dtype)
    stats = pair_impl.PairStatistics(table, order, layout)
    with exact_products(sh):
        grads = pair_impl.backward(upstream, stats, student, teacher, temperature, Kind(code, beta), options)
    inputs = (sh, sw, sb, th, tw, tb)
    return tuple(g if need else _none(sh if x is None else x) for g, need, x in zip(grads, needs, inputs, strict=True))


@linear_pair_backward.register_fake
def _(
    upstream, sh, sw, sb, th, tw, tb, temperature, table, order, layout, code, beta, s_cap, t_cap, tp, chunk_size,
    dtype, needs,
):  # fmt: skip
    inputs = (sh, sw, sb, th, tw, tb)
    return tuple(
        x.new_empty(x.shape) if need else _none(sh if x is None else x) for x, need in zip(inputs, needs, strict=True)
    )


@torch.library.custom_op("autosp::linear_pair_sum", mutates_args=())
def linear_pair_sum(
    sh: Tensor, sw: Tensor, sb: Tensor | None, th: Tensor, tw: Tensor, tb: Tensor | None, valid: Tensor | None,
    temperature: Tensor | None, code: int, beta: float, s_cap: float, t_cap: float, tp: str, start: int, end: int,
    chunk_size: int, dtype: torch.dtype, needs: list[bool], debug: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Sum of the divergences (differentiable), and the fp32 gradients of upstream 1 of the six inputs."""
    student, teacher = _models(sh, sw, sb, th, tw, tb, s_cap, t_cap, needs)
    options = _options(0.0, tp, start, end, chunk_size, dtype, debug=debug)
    with exact_products(sh):
        return tuple(pair_impl.form(student, teacher, valid, temperature, Kind(code, beta), options))


@linear_pair_sum.register_fake
def _(
    sh, sw, sb, th, tw, tb, valid, temperature, code, beta, s_cap, t_cap, tp, start, end, chunk_size, dtype, needs,
    debug,
):  # fmt: skip
    wide = accumulator_dtype(dtype)
    inputs = (sh, sw, sb, th, tw, tb)
    grads = (sh.new_empty(x.shape if need else (0,), dtype=wide) for x, need in zip(inputs, needs, strict=True))
    return (sh.new_empty((), dtype=wide), *grads)


def _sum_setup(ctx, inputs, output) -> None:
    _, *grads = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*grads)
    ctx.save_for_backward(*grads)
    ctx.dtypes = [None if t is None else t.dtype for t in inputs[:6]]
    ctx.formed = inputs[17]


def _sum_backward(ctx, upstream, *_):
    refuse_second_derivative()
    if upstream is None:
        return (None,) * 19
    grads = scaled(upstream, ctx.saved_tensors, ctx.needs_input_grad[:6], ctx.formed, ctx.dtypes)
    return (*grads, *(None,) * 13)


linear_pair_sum.register_autograd(_sum_backward, setup_context=_sum_setup)
