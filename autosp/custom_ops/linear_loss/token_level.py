"""Log-probabilities, entropy and their companions of a head's distribution, straight from the hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks, form_impl, ops
from .cross_entropy import Head, mean_of, plan_keep, prepare, sum_and_count
from .groups import group_name


class LinearTokenStats(NamedTuple):
    """Per token, ``[...]``: log-probability of the index, entropy, log-sum-exp, and whether the index is the argmax."""

    logprobs: Tensor
    entropy: Tensor
    logsumexp: Tensor
    is_argmax: Tensor


def vocab_parallel_linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None = None,
    tp_group: object = None,
    sp_group: object = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: str = "none",
    chunk_size: int | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    *,
    memory: str = "auto",
    main_grad: Tensor | bool | None = None,
    strict: bool = False,
    debug: bool = False,
) -> Tensor:
    """Log-probability of ``index`` under ``softmax(hidden @ weight.T + bias)``; zero where it is ``ignore_index``.

    Args:
        hidden: ``[..., H]``; weight: ``[V_local, H]``; bias: ``[V_local]``.
        index: ``[...]`` global ids, or ``[..., K]`` for K of them a token (duplicates add up in the gradient).
        reduction: ``"none"`` gives ``index``'s shape; ``"sum"`` and ``"mean"`` (over the ids that count) are over all
            tokens of ``sp_group``.

    The other arguments are those of ``vocab_parallel_linear_cross_entropy``; ``memory="fast"`` keeps the logits when
    they fit, ``"lean"`` always recomputes them in the backward. fp32 result (fp64 for fp64).

    Raises:
        InputError, RankMismatchError: as there.
    """
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    checks.one_of("memory", memory, checks.MEMORY)
    checks.whole("ignore_index", ignore_index)
    given = prepare(
        hidden, weight, bias, index, tp_group, vocab_start_index, vocab_end_index, chunk_size, softcap, temperature,
        strict, debug, top_k=True,
    )  # fmt: skip
    buffer = checks.main_grad(main_grad, weight)
    sp = group_name(sp_group, "sp_group")
    if reduction != "none" and given.target.dim() == 1:
        # The negative of a cross entropy: its gradient can be formed in the forward.
        loss = form_impl.Loss(0.0, 0.0)
        total, count = sum_and_count(given, loss, ignore_index, memory, given.needs, buffer)
        return reduce_sum(-total, count, reduction, sp)
    logprob, valid = _logprobs(given, ignore_index, memory, buffer)
    if reduction == "none":
        return logprob.reshape(index.shape)
    return reduce_sum(logprob.sum(), valid.sum(dtype=torch.float32), reduction, sp)


def _logprobs(given: Head, ignore_index: int, memory: str, buffer) -> tuple[Tensor, Tensor]:
    """``[N, K]`` log-probabilities, zero where ignored, and which of them count."""
    index = given.target if given.target.dim() == 2 else given.target[:, None]
    valid = index != ignore_index
    counts = valid.any(1)
    logprob, *_ = _stats(given, index, counts, memory, buffer, False)
    return torch.where(valid, logprob, 0.0), valid


def _stats(given: Head, index: Tensor, valid: Tensor | None, memory: str, buffer, entropy: bool = True):
    return ops.linear_stats(
        given.hidden, given.weight, given.bias, index, valid, given.temperature, buffer, given.softcap, *given.tail,
        entropy, False, plan_keep(given, memory), given.strict, given.debug,
    )  # fmt: skip


def reduce_sum(total: Tensor, count: Tensor, reduction: str, sp: str) -> Tensor:
    """``total``, or ``total / count``, over the sequence group ``sp`` (``""``: this rank alone)."""
    if sp:
        packed = ops.sum_over(torch.stack([total.double(), count.double()]), sp)
        count, total = packed[1], packed[0].to(total.dtype)
    return total if reduction == "sum" else mean_of(total, count)


def vocab_parallel_linear_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tp_group: object = None,
    sp_group: object = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    mask: Tensor | None = None,
    reduction: str = "none",
    chunk_size: int | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    *,
    memory: str = "auto",
    main_grad: Tensor | bool | None = None,
    debug: bool = False,
) -> Tensor:
    """Entropy (nats) of ``softmax(hidden @ weight.T + bias)`` per token, ``[...]``; zero where ``mask`` is False.

    Args:
        mask: bool ``[...]``, the tokens that count; the others cost no GEMM.

    The other arguments are those of ``vocab_parallel_linear_logprobs``.

    Raises:
        InputError, RankMismatchError: as there.
    """
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    checks.one_of("memory", memory, checks.MEMORY)
    given = prepare(
        hidden, weight, bias, None, tp_group, vocab_start_index, vocab_end_index, chunk_size, softcap, temperature,
        False, debug, has_target=False,
    )  # fmt: skip
    valid = checks.mask(mask, hidden)
    sp = group_name(sp_group, "sp_group")
    none = given.hidden.new_empty(given.hidden.shape[0], 0, dtype=torch.int64)
    _, entropy, *_ = _stats(given, none, valid, memory, checks.main_grad(main_grad, weight))
    if valid is not None:
        entropy = torch.where(valid, entropy, 0.0)
    if reduction == "none":
        return entropy.reshape(hidden.shape[:-1])
    count = torch.ones_like(entropy, dtype=torch.bool) if valid is None else valid
    return reduce_sum(entropy.sum(), count.sum(dtype=torch.float32), reduction, sp)


def vocab_parallel_linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None = None,
    tp_group: object = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    *,
    memory: str = "auto",
    main_grad: Tensor | bool | None = None,
    strict: bool = False,
    debug: bool = False,
) -> LinearTokenStats:
    """Log-probability, entropy, log-sum-exp and argmax test of one index a token, from one pass over the head.

    ``index`` is ``[...]``; every field has its shape, zeros (False) where it is ``ignore_index``. The first three are
    differentiable. The other arguments are those of ``vocab_parallel_linear_logprobs``.

    Raises:
        InputError, RankMismatchError: as there.
    """
    checks.one_of("memory", memory, checks.MEMORY)
    checks.whole("ignore_index", ignore_index)
    given = prepare(
        hidden, weight, bias, index, tp_group, vocab_start_index, vocab_end_index, chunk_size, softcap, temperature,
        strict, debug,
    )  # fmt: skip
    valid = given.target != ignore_index
    buffer = checks.main_grad(main_grad, weight)
    logprob, entropy, lse, _, is_top, *_ = _stats(given, given.target[:, None], valid, memory, buffer)
    fields = [torch.where(valid, field, 0.0) for field in (logprob[:, 0], entropy, lse)]
    fields.append(is_top[:, 0] & valid)
    return LinearTokenStats(*(field.reshape(index.shape) for field in fields))
