"""KL, Jensen-Shannon and top-k KL divergences between a student and a teacher whose logits are sharded, or whole.

Results are float32 (float64 for float64 logits), per row and in nats, the same on every rank of ``tp_group``;
gradients are contiguous, in the dtype of their logits, and flow to every input that requires one. Detach the teacher
to spare its gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import InputError
from .checks import check_bounds, check_group, check_index, check_logits, check_options, check_pair, check_scaling
from .functions import DEFAULT_IGNORE_INDEX, run_row_stats
from .jsd_op import vocab_jsd
from .kl_op import vocab_kl

# Teacher log-probabilities that were rounded to bfloat16 may add up to a little more than 1.
_TEACHER_MASS_LIMIT = 1.01


def vocab_parallel_kl_div(
    student: torch.Tensor,
    teacher: torch.Tensor,
    reverse: bool = False,
    tp_group: Any = None,
    *,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Forward KL(teacher || student), or with ``reverse`` KL(student || teacher), per row.

    Args:
        student: ``[..., V_local]`` logits; float32, bfloat16, float16 or float64.
        teacher: logits of the same shape; the dtype may differ.
        reverse: which of the two.
        tp_group: group over which the vocabulary is sharded: None (whole vocabulary here; never the world), a
        ProcessGroup
            or its name. Shards may be uneven or empty, but equal for student and teacher.
        vocab_start_index, vocab_end_index: only needed to name padding columns, those from ``end - start`` on.
        temperature: positive number or ``[...]`` tensor; divides both logits (no factor T^2 is applied).
        softcap: c of ``c tanh(logits / c)``, applied to both, or None.

    Returns:
        float32 ``[...]``. Terms of weight zero are skipped, so KL(p || p) is exactly 0; a column of weight that has
        probability zero on the other side gives inf.

    Raises:
        InputError: a wrong shape, dtype, device, group, bound or option.
    """
    check_pair(student, teacher)
    group = check_group(tp_group)
    bounds = check_bounds(student, group, vocab_start_index, vocab_end_index)
    scaling = check_scaling(student, temperature, softcap)
    p, q = (student, teacher) if reverse else (teacher, student)
    kl, _ = vocab_kl(p, q, scaling.inverse_rows, (scaling.inverse, scaling.softcap), bounds, group)
    return kl


def vocab_parallel_jsd(
    student: torch.Tensor,
    teacher: torch.Tensor,
    beta: float = 0.5,
    tp_group: Any = None,
    *,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """``beta KL(teacher || M) + (1 - beta) KL(student || M)`` with ``M = beta teacher + (1 - beta) student``, per row.

    Args:
        student: ``[..., V_local]`` logits.
        teacher: logits of the same shape.
        beta: in [0, 1]. 0 is the forward KL(teacher || student) and 1 the reverse KL(student || teacher): the limits of
            ``JSD / beta`` and ``JSD / (1 - beta)``, which is what distillation trainers mean by them.
        others: as in ``vocab_parallel_kl_div``.

    Returns:
        float32 ``[...]``.

    Raises:
        InputError: beta outside [0, 1]; a wrong shape, dtype, device, group, bound or option.
    """
    check_pair(student, teacher)
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0.0 <= beta <= 1.0:
        raise InputError(f"beta must be a number in [0, 1], got {beta!r}.")
    options = dict(
        vocab_start_index=vocab_start_index, vocab_end_index=vocab_end_index, temperature=temperature, softcap=softcap
    )
    if beta == 0:
        return vocab_parallel_kl_div(student, teacher, False, tp_group, **options)
    if beta == 1:
        return vocab_parallel_kl_div(student, teacher, True, tp_group, **options)
    group = check_group(tp_group)
    bounds = check_bounds(student, group, vocab_start_index, vocab_end_index)
    scaling = check_scaling(student, temperature, softcap)
    scales = (scaling.inverse, scaling.softcap)
    jsd, _, _ = vocab_jsd(student, teacher, float(beta), scaling.inverse_rows, scales, bounds, group)
    return jsd


def vocab_parallel_topk_kl_div(
    student: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    teacher_index: torch.Tensor,
    reverse: bool = False,
    tp_group: Any = None,
    *,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = DEFAULT_IGNORE_INDEX,
    temperature: float | torch.Tensor = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """KL between distributions over K + 1 buckets: the teacher's top-k ids, and everything else as one bucket.

    Keeping the tail as a bucket makes this a lower bound of the full KL (log-sum inequality) and zero only if the top-k
    probabilities agree; renormalising the top-k does neither. The student's tail is summed over the columns outside the
    top-k, not as one minus their sum, so a small tail keeps its digits.

    Args:
        student: ``[..., V_local]`` logits.
        teacher_logprobs: ``[..., K]``, natural logarithms of the teacher's probabilities (not logits) at the same
            temperature; the rest of the mass is its tail, or nothing where it is below their rounding.
        teacher_index: int64 or int32 ``[..., K]``, global ids, distinct within a row. Entries equal to
        ``ignore_index`` are
            no bucket: for rows with fewer than K ids.
        reverse: False for KL(teacher || student), True for KL(student || teacher).
        others: as in ``vocab_parallel_logprobs``.

    Returns:
        float32 ``[...]``; NaN where an id is repeated or in nobody's shard, or where the teacher's mass exceeds 1 by
        more than rounding (logits given for log-probabilities).

    Raises:
        InputError: a wrong shape, dtype, device, group, bound or option.
    """
    check_logits(student, "student")
    check_options(ignore_index)
    if not isinstance(teacher_logprobs, torch.Tensor) or not teacher_logprobs.is_floating_point():
        raise InputError("teacher_logprobs must be a floating tensor of shape [..., K].")
    if not isinstance(teacher_index, torch.Tensor) or teacher_logprobs.shape != teacher_index.shape:
        raise InputError(
            f"teacher_logprobs and teacher_index must have one shape [..., K], got {tuple(teacher_logprobs.shape)} and"
            f" {tuple(getattr(teacher_index, 'shape', ()))}."
        )
    if teacher_index.dim() != student.dim() or teacher_logprobs.device != student.device:
        raise InputError(
            f"teacher_index must have shape {(*student.shape[:-1], 'K')} and teacher_logprobs be on {student.device},"
            f" got {tuple(teacher_index.shape)} and {teacher_logprobs.device}."
        )
    ids = check_index(student, teacher_index, "teacher_index")
    group = check_group(tp_group)
    bounds = check_bounds(student, group, vocab_start_index, vocab_end_index, global_vocab_size)
    scaling = check_scaling(student, temperature, softcap)
    stats = run_row_stats(student, ids, group, bounds, scaling, ignore_index, exclude=True)
    ignored = ids == ignore_index
    # [..., K + 1] values only: float64 costs nothing here and keeps the cancelling terms of the reverse KL's gradient.
    top_student = stats.logp.double().masked_fill(ignored, -torch.inf)
    buckets = torch.log_softmax(torch.cat([top_student, stats.lse.double().unsqueeze(-1)], dim=-1), dim=-1)
    top_teacher = teacher_logprobs.to(buckets.dtype).masked_fill(ignored, -torch.inf)
    mass = top_teacher.exp().sum(dim=-1, keepdim=True)
    has_tail = mass < 1.0 - _tail_rounding(teacher_logprobs.dtype)
    tail = torch.where(has_tail, torch.log1p(-torch.where(has_tail, mass, 0.0)), -torch.inf)
    teacher = torch.cat([top_teacher, tail], dim=-1)
    p, q = (buckets, teacher) if reverse else (teacher, buckets)
    skipped = p == -torch.inf
    difference = torch.where(skipped, 0.0, p) - torch.where(skipped, 0.0, q)
    kl = (p.masked_fill(skipped, -torch.inf).exp() * difference).sum(dim=-1)
    ordered = ids.masked_fill(ignored, -1).sort(dim=-1).values
    repeated = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(dim=-1)
    bad = repeated | (mass.squeeze(-1) > _TEACHER_MASS_LIMIT)
    return torch.where(bad, torch.nan, kl).to(stats.lse.dtype)


def _tail_rounding(dtype: torch.dtype) -> float:
    """The mass that log-probabilities of ``dtype`` may miss by rounding alone: no tail can be read from less."""
    eps = torch.finfo(dtype).eps
    return eps if eps > torch.finfo(torch.float32).eps else 8 * eps
