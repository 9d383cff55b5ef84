"""KL and Jensen-Shannon divergence between a student's and a teacher's next-token distributions, from hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autosp.errors import InputError

from . import checks, ops_pair, plan
from .groups import group_name
from .pair_rows import FORWARD, JSD, REVERSE, Kind
from .token_level import reduce_sum


@dataclass
class _Settings:
    tp_group: object
    sp_group: object
    start: int | None
    end: int | None
    mask: Tensor | None
    reduction: str
    chunk_size: int | None
    softcap: float | None
    teacher_softcap: float | None
    temperature: float | Tensor
    memory: str
    debug: bool


def vocab_parallel_linear_kl_div(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    reverse: bool = False,
    tp_group: object = None,
    sp_group: object = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    mask: Tensor | None = None,
    reduction: str = "none",
    chunk_size: int | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    *,
    memory: str = "auto",
    debug: bool = False,
) -> Tensor:
    """``KL(teacher || student)``, or with ``reverse`` ``KL(student || teacher)``, of two heads over one vocabulary.

    Args:
        student_hidden: ``[..., Hs]``; student_weight: ``[V_local, Hs]``; student_bias: ``[V_local]``.
        teacher_hidden: ``[..., Ht]``; teacher_weight: ``[V_local, Ht]``; the hidden sizes may differ, the leading shape
            and the vocabulary rows may not. Detach what needs no gradient: it then costs no GEMM.
        tp_group, sp_group, vocab_start_index, vocab_end_index, chunk_size: as in
            ``vocab_parallel_linear_cross_entropy``; both heads are sharded alike.
        mask: bool ``[...]``, the tokens that count; the others give 0 and cost no GEMM.
        reduction: ``"none"`` gives ``[...]``; ``"sum"`` and ``"mean"`` are over the tokens that count of ``sp_group``,
            and form their gradient in the forward.
        temperature: divides both sides' logits; a number or ``[...]``. softcap, teacher_softcap: before it.
        memory: ``"lean"`` recomputes in the backward also for a mean or sum.

    Returns:
        fp32 (fp64 for fp64): a number, or ``[...]``; exactly 0 for equal distributions.

    Raises:
        InputError: shapes, dtypes or settings do not fit. RankMismatchError: ranks of ``tp_group`` disagree.
    """
    settings = _Settings(
        tp_group, sp_group, vocab_start_index, vocab_end_index, mask, reduction, chunk_size, softcap, teacher_softcap,
        temperature, memory, debug,
    )  # fmt: skip
    kind = Kind(REVERSE if reverse else FORWARD)
    sides = (student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias)
    return _divergence(sides, kind, settings)


def vocab_parallel_linear_jsd(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    beta: float = 0.5,
    tp_group: object = None,
    sp_group: object = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    mask: Tensor | None = None,
    reduction: str = "none",
    chunk_size: int | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    *,
    memory: str = "auto",
    debug: bool = False,
) -> Tensor:
    """``beta KL(teacher || m) + (1 - beta) KL(student || m)`` with ``m = beta teacher + (1 - beta) student``.

    ``beta`` 0 is ``KL(teacher || student)`` and 1 is ``KL(student || teacher)``, as generalized knowledge
    distillation has it (arXiv:2306.13649). All else as in ``vocab_parallel_linear_kl_div``.

    Raises:
        InputError, RankMismatchError: as there; ``beta`` outside [0, 1].
    """
    checks.number("beta", beta, 0.0, 1.0)
    settings = _Settings(
        tp_group, sp_group, vocab_start_index, vocab_end_index, mask, reduction, chunk_size, softcap, teacher_softcap,
        temperature, memory, debug,
    )  # fmt: skip
    kind = Kind(FORWARD) if beta == 0 else Kind(REVERSE) if beta == 1 else Kind(JSD, float(beta))
    sides = (student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias)
    return _divergence(sides, kind, settings)


def _divergence(sides: tuple[Tensor | None, ...], kind: Kind, s: _Settings) -> Tensor:
    checks.one_of("reduction", s.reduction, checks.REDUCTIONS)
    checks.one_of("memory", s.memory, checks.MEMORY)
    dtype = _check_sides(sides)
    hidden, weight = sides[0], sides[1]
    start, end = checks.bounds(s.start, s.end, weight.shape[0])
    valid = checks.mask(s.mask, hidden)
    caps = checks.softcap(s.softcap), checks.softcap(s.teacher_softcap, "teacher_softcap")
    temperature = checks.temperature(s.temperature, hidden)
    sp, tp, chunk = group_name(s.sp_group, "sp_group"), group_name(s.tp_group, "tp_group"), checks.chunk(s.chunk_size)
    flat = [None if x is None else (x.reshape(-1, x.shape[-1]) if i % 3 == 0 else x) for i, x in enumerate(sides)]
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in sides]
    settings = (kind.code, kind.beta, *caps, tp, start, end, chunk, dtype)
    if s.reduction != "none" and any(needs) and _forms(s.memory, sides, needs):
        total, *_ = ops_pair.linear_pair_sum(*flat, valid, temperature, *settings, needs, bool(s.debug))
    else:
        value, *_ = ops_pair.linear_pair(*flat, valid, temperature, *settings, bool(s.debug))
        if valid is not None:
            # Also what the operator left out: no upstream gradient may reach a token that does not count.
            value = torch.where(valid, value, 0.0)
        if s.reduction == "none":
            return value.reshape(hidden.shape[:-1])
        total = value.sum()
    count = torch.full((), flat[0].shape[0], device=total.device) if valid is None else valid.sum()
    return reduce_sum(total, count.to(torch.float32), s.reduction, sp)


def _forms(memory: str, sides, needs) -> bool:
    """Whether the gradient is formed in the forward: its fp32 buffers must fit an eighth of the device's memory."""
    if memory != "auto":
        return memory == "fast"
    buffers = sum(4 * sides[i].shape[0] * sides[i].shape[1] for i in (1, 4) if needs[i])
    return buffers + plan.CHUNK_BYTES <= plan.device_memory(sides[1].device) // 8


def _check_sides(sides: tuple[Tensor | None, ...]) -> torch.dtype:
    sh, sw, sb, th, tw, tb = sides
    dtype = checks.head(sh, sw, sb, "student_")
    teacher_dtype = checks.head(th, tw, tb, "teacher_")
    if dtype != teacher_dtype:
        raise InputError(f"student computes in {dtype} and teacher in {teacher_dtype}; cast them to one dtype")
    if sh.shape[:-1] != th.shape[:-1] or sw.shape[0] != tw.shape[0]:
        raise InputError(
            f"student_hidden {tuple(sh.shape)} with student_weight {tuple(sw.shape)} and "
            f"teacher_hidden {tuple(th.shape)} with teacher_weight {tuple(tw.shape)} must agree on the tokens (leading "
            "dimensions) and on the vocabulary rows"
        )
    if th.device != sh.device:
        raise InputError(f"teacher_hidden is on {th.device}, student_hidden on {sh.device}; move them to one device")
    return dtype
