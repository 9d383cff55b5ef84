"""The LM head fused into its cross entropy: ``F.linear`` and the loss with no ``[tokens, vocabulary]`` tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autosp.errors import InputError

from . import checks, form_impl, gemm, ops, ops_direct, plan
from .groups import group_name


@dataclass
class Head:
    """The flattened, checked arguments."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    temperature: Tensor | None
    softcap: float
    tp: str
    start: int
    end: int
    chunk: int
    dtype: torch.dtype
    strict: bool
    debug: bool

    @property
    def tail(self) -> tuple:
        return self.tp, self.start, self.end, self.chunk, self.dtype

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        on = torch.is_grad_enabled()
        bias = self.bias is not None and self.bias.requires_grad
        return on and self.hidden.requires_grad, on and self.weight.requires_grad, on and bias

    @property
    def itemsize(self) -> int:
        return gemm.logits_dtype(self.hidden.device, self.dtype, self.bias is not None).itemsize


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    tp_group: object = None,
    sp_group: object = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    *,
    memory: str = "auto",
    main_grad: Tensor | bool | None = None,
    main_grad_upstream: float | None = None,
    strict: bool = False,
    debug: bool = False,
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T + bias``, as ``F.linear`` and ``F.cross_entropy`` give it, in little memory.

    ``loss = (1 - label_smoothing) * nll + label_smoothing * mean_v(-log p_v) + z_loss * lse^2`` of the logits
    ``softcap * tanh(z / softcap) / temperature``; v runs over the whole vocabulary, lse is its log-sum-exp.

    Args:
        hidden: ``[..., H]`` fp16, bf16, fp32 or fp64; the same on every rank of ``tp_group``.
        weight: ``[V_local, H]``, this rank's vocabulary rows (uneven and empty shards are fine).
        target: ``[...]`` integer *global* ids; ``ignore_index`` does not count and costs no GEMM.
        bias: ``[V_local]`` or ``None``.
        tp_group, sp_group: ``None`` (no group, never the world), a ProcessGroup or its name. ``tp_group`` shares the
            vocabulary, ``sp_group`` the tokens.
        vocab_start_index, vocab_end_index: this rank's bounds; derived from the shards' sizes when left out. Rows of
            ``weight`` beyond ``end - start`` are padding.
        reduction: ``"mean"`` and ``"sum"`` are over all tokens of ``sp_group``; ``"none"`` is this rank's, ``[...]``,
            zeros where ignored. The mean of no token at all is NaN with zero gradients, as in ``F.cross_entropy``.
        chunk_size: tokens whose logits exist at once; ``None`` derives it from the vocabulary. No result depends on it.
        temperature: a number or a tensor ``[...]``; no gradient flows to it.
        memory: ``"fast"`` (three GEMMs), ``"lean"`` (four, half a GiB), or ``"auto"``: fast for a mean or sum unless
            its fp32 weight gradient is more than an eighth of the device's memory.
        main_grad: fp32 ``[V_local, H]`` (or ``True`` for ``weight.main_grad``): the weight gradient is added there and
            ``weight.grad`` stays ``None``.
        main_grad_upstream: the number that the backward will bring for this loss (loss scale over accumulation steps).
            With it the gradient is added to ``main_grad`` in the *forward*: three GEMMs and no fp32 buffer; every such
            forward must then see one backward, which checks the number: another one is an error on a CPU or with
            ``strict``, and otherwise gives NaN gradients, the first element of ``main_grad`` among them.
        strict: raise for a target outside the vocabulary, or another upstream number than the promised one (a host
            synchronisation each); otherwise the loss, or the gradient, is NaN.
        debug: compare ``hidden`` and ``target`` across the ranks of ``tp_group`` and raise when they differ.

    Returns:
        fp32 (fp64 for fp64 inputs): a number, or ``[...]`` for ``"none"``.

    Raises:
        InputError: an argument has a wrong shape, dtype or value.
        RankMismatchError: ranks of ``tp_group`` disagree on tokens, chunk size, bounds or the way (``memory``).
    """
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    checks.one_of("memory", memory, checks.MEMORY)
    checks.number("label_smoothing", label_smoothing, 0.0, 1.0)
    checks.number("z_loss", z_loss, 0.0, float("inf"))
    checks.whole("ignore_index", ignore_index)
    given = prepare(
        hidden, weight, bias, target, tp_group, vocab_start_index, vocab_end_index, chunk_size, softcap, temperature,
        strict, debug,
    )  # fmt: skip
    sp = group_name(sp_group, "sp_group")
    buffer = checks.main_grad(main_grad, weight)
    loss = form_impl.Loss(float(label_smoothing), float(z_loss))
    if main_grad_upstream is not None:
        _check_promise(given, buffer, reduction, memory, main_grad_upstream)
        if any(given.needs):
            return _direct(given, loss, ignore_index, reduction, sp, buffer, float(main_grad_upstream))
    if reduction == "none":
        losses, _ = _per_token(given, loss, ignore_index, plan_keep(given, memory), buffer)
        return losses.reshape(target.shape)
    total, count = sum_and_count(given, loss, ignore_index, memory, given.needs, buffer)
    return _reduced(total, count, reduction, sp)


def prepare(
    hidden, weight, bias, target, tp_group, start, end, chunk_size, softcap, temperature, strict, debug, top_k=False,
    has_target=True,
) -> Head:  # fmt: skip
    """Check the arguments that all single-head functions share, and flatten tokens to rows."""
    dtype = checks.head(hidden, weight, bias)
    if has_target:
        checks.target(target, hidden, top_k)
    low, high = checks.bounds(start, end, weight.shape[0])
    flat = hidden.reshape(-1, hidden.shape[-1])
    if has_target:
        target = target.reshape(flat.shape[0] if target.dim() == hidden.dim() - 1 else (flat.shape[0], -1)).long()
    return Head(
        flat, weight, bias, target, checks.temperature(temperature, hidden), checks.softcap(softcap),
        group_name(tp_group, "tp_group"), low, high, checks.chunk(chunk_size), dtype, bool(strict), bool(debug),
    )  # fmt: skip


def plan_keep(given: Head, memory: str) -> bool:
    return any(given.needs) and plan.keep_per_token(memory, given.hidden.shape[0], given.weight, given.itemsize)


def _per_token(given: Head, loss, ignore_index: int, keep: bool, buffer) -> tuple[Tensor, Tensor]:
    """Losses ``[N]``, zeros where ignored, and which tokens count."""
    valid = given.target != ignore_index
    logprob, _, lse, mean, *_ = ops.linear_stats(
        given.hidden, given.weight, given.bias, given.target[:, None], valid, given.temperature, buffer,
        given.softcap, *given.tail, False, loss.smoothing != 0, keep, given.strict, given.debug,
    )  # fmt: skip
    losses = loss.value(logprob[:, 0], mean, lse)
    return torch.where(valid, losses, 0.0), valid


def sum_and_count(given: Head, loss, ignore_index, memory, needs, buffer=None) -> tuple[Tensor, Tensor]:
    """Sum of this rank's losses and its number of tokens that count (fp32 numbers)."""
    tokens = given.hidden.shape[0]
    way = plan.choose_way(memory, tokens, given.weight, needs[1], given.itemsize, buffer is not None, bool(given.tp))
    if way != "form" or not any(needs):
        losses, valid = _per_token(given, loss, ignore_index, way == "keep" and any(needs), buffer)
        return losses.sum(), valid.sum(dtype=torch.float32)
    total, count, *_ = ops.linear_cross_entropy(
        given.hidden, given.weight, given.bias, given.target, given.temperature, buffer, ignore_index,
        loss.smoothing, loss.z_loss, given.softcap, *given.tail, *needs, given.strict, given.debug,
    )  # fmt: skip
    return total, count


def _reduced(total: Tensor, count: Tensor, reduction: str, sp: str) -> Tensor:
    if sp:
        # fp64: counts stay exact beyond 2^24 tokens, and one collective carries both.
        packed = ops.sum_over(torch.stack([total.double(), count.double()]), sp)
        count, total = packed[1], packed[0].to(total.dtype)
    return total if reduction == "sum" else mean_of(total, count)


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """``total / count``; for no token at all NaN, with a zero gradient instead of ``0 * inf``."""
    return torch.where(count > 0, total / count.clamp(min=1).to(total.dtype), float("nan"))


def _check_promise(given: Head, buffer, reduction: str, memory: str, upstream) -> None:
    if buffer is None:
        raise InputError("main_grad_upstream is given without main_grad; it says with what number main_grad is filled")
    if reduction == "none" or memory == "lean":
        raise InputError(
            "main_grad_upstream needs reduction 'mean' or 'sum' and memory 'auto' or 'fast', not "
            f"{reduction!r} and {memory!r}"
        )
    if given.dtype == torch.float16:
        raise InputError(
            "main_grad_upstream is not available in float16, whose range a loss scale leaves; use bfloat16"
        )
    checks.number("main_grad_upstream", upstream, -float("inf"), float("inf"))
    if torch.is_grad_enabled() and not given.weight.requires_grad:
        raise InputError("main_grad is given, but weight does not require a gradient")


def _direct(given: Head, loss, ignore_index, reduction, sp, buffer, upstream: float) -> Tensor:
    """Three GEMMs, the weight gradient added to ``buffer`` in the forward."""
    count = (given.target != ignore_index).sum(dtype=torch.float32)
    if sp:
        count = ops.sum_over(count.double(), sp)
    promised = torch.full((), upstream, dtype=torch.float32, device=given.hidden.device)
    factor = promised if reduction == "sum" else promised / count.clamp(min=1).to(torch.float32)
    need_hidden, _, need_bias = given.needs
    bias = None if given.bias is None else given.bias.detach()
    total, dh, db = ops_direct.linear_cross_entropy_into(
        given.hidden.detach(), given.weight.detach(), bias, given.target, given.temperature, buffer, factor,
        ignore_index, loss.smoothing, loss.z_loss, given.softcap, *given.tail, need_hidden, need_bias, given.strict,
        given.debug,
    )  # fmt: skip
    if sp:
        total = ops.sum_over(total.double(), sp).to(total.dtype)
    value = total if reduction == "sum" else mean_of(total, count)
    sides = (given.hidden, given.weight, given.bias)
    return ops_direct.attach(value, *sides, dh, db, promised, buffer, given.strict)


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    tp_group: object = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    chunk_size: int | None = None,
    memory: str = "auto",
    needs: tuple[bool, bool, bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """This rank's sum of losses and its number of tokens that count: what a sequence-parallel loss aggregates.

    Nothing is reduced over a sequence group; arguments as in :func:`vocab_parallel_linear_cross_entropy`.

    Args:
        needs: which gradients (hidden, weight, bias) a backward will want; ``None`` reads ``requires_grad``. A tracer
            whose fake tensors carry no ``requires_grad`` says it here; a backward that wants more raises.

    Returns:
        ``(loss_sum, count)``, two fp32 numbers; ``loss_sum`` is differentiable (fp64 for fp64 inputs).
    """
    checks.one_of("memory", memory, checks.MEMORY)
    checks.number("label_smoothing", label_smoothing, 0.0, 1.0)
    checks.number("z_loss", z_loss, 0.0, float("inf"))
    checks.whole("ignore_index", ignore_index)
    given = prepare(
        hidden, weight, bias, target, tp_group, vocab_start_index, vocab_end_index, chunk_size, softcap, temperature,
        False, False,
    )  # fmt: skip
    loss = form_impl.Loss(float(label_smoothing), float(z_loss))
    return sum_and_count(given, loss, ignore_index, memory, given.needs if needs is None else needs)
