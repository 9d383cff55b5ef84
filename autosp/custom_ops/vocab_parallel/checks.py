"""What the public functions accept, and the errors that say so before anything runs."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ...errors import InputError
from ..forward_mode import refuse_tangent
from .groups import MAX_VOCABULARY, group_name
from .rows import accumulator_dtype, count_rows

_LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Scaling(NamedTuple):
    """Temperature and soft cap as the operators take them: ``z = softcap(x) * inverse``."""

    inverse_rows: torch.Tensor | None
    inverse: float
    softcap: float


class Bounds(NamedTuple):
    """Bounds of this rank's shard as the operators take them; -1 stands for "not given"."""

    start: int
    end: int
    total: int


def check_logits(logits: Any, name: str = "logits") -> None:
    """Refuse what is not a local, dense floating tensor of shape ``[..., vocabulary]``.

    Raises:
        InputError: not a tensor, a DTensor, a sparse or nested tensor, a dtype other than
            float32/bfloat16/float16/float64, no dimension, or a tangent of forward-mode differentiation.
    """
    if isinstance(logits, DTensor):
        raise InputError(f"{name} is a DTensor; pass {name}.to_local() and its vocabulary's group as tp_group.")
    if not isinstance(logits, torch.Tensor):
        raise InputError(f"{name} must be a tensor of shape [..., vocabulary], got {type(logits).__name__}.")
    if logits.dtype not in _LOGITS_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _LOGITS_DTYPES)
        raise InputError(f"{name} has dtype {logits.dtype}; allowed are {allowed}.")
    if logits.layout != torch.strided or logits.is_nested:
        kind = "nested" if logits.is_nested else str(logits.layout).removeprefix("torch.")
        raise InputError(
            f"{name} is a {kind} tensor; pass a dense one, such as its values of shape [tokens, vocabulary]."
        )
    if logits.dim() == 0:
        raise InputError(f"{name} has no dimension; its last dimension must be the vocabulary.")
    refuse_tangent(name, logits)


def check_pair(student: torch.Tensor, teacher: torch.Tensor) -> None:
    """Refuse a student and a teacher that do not lie over each other.

    Raises:
        InputError: as ``check_logits`` for each; different shapes or devices.
    """
    check_logits(student, "student")
    check_logits(teacher, "teacher")
    if student.shape != teacher.shape or student.device != teacher.device:
        raise InputError(
            f"student and teacher must have one shape and device, got {tuple(student.shape)} on {student.device} and"
            f" {tuple(teacher.shape)} on {teacher.device}; cut both to the common vocabulary first."
        )


def check_index(logits: torch.Tensor, index: Any, name: str, trailing: bool = True) -> torch.Tensor:
    """``index`` as contiguous int64 of its own shape.

    Args:
        logits: ``[..., V]``.
        index: integers of shape ``logits.shape[:-1]``, or with one trailing dimension K where ``trailing`` is True.
        name: the argument's name, for the message.
        trailing: whether a trailing dimension is allowed.

    Raises:
        InputError: no integer tensor, another shape or another device.
    """
    rows = tuple(logits.shape[:-1])
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.int64, torch.int32):
        got = index.dtype if isinstance(index, torch.Tensor) else type(index).__name__
        raise InputError(f"{name} must be an int64 or int32 tensor of vocabulary ids, got {got}.")
    if index.device != logits.device:
        raise InputError(f"{name} is on {index.device} and the logits on {logits.device}; move it there.")
    plain = tuple(index.shape) == rows
    top_k = trailing and index.dim() == logits.dim() and tuple(index.shape[:-1]) == rows
    if not plain and not top_k:
        also = f" or {(*rows, 'K')}" if trailing else ""
        raise InputError(
            f"{name} must have shape {rows}{also} for logits {tuple(logits.shape)}, got {tuple(index.shape)}."
        )
    return index.to(torch.int64).contiguous()


def check_scaling(logits: torch.Tensor, temperature: Any, softcap: Any) -> Scaling:
    """Temperature (a number, or one per row) and soft cap.

    A per-row temperature that is not positive makes that row NaN: looking at its values would stop the host.

    Raises:
        InputError: a number that is not positive and finite, a tensor of another shape, one that is not real, or one
            that requires a gradient.
    """
    cap = 0.0 if softcap is None else _positive(softcap, "softcap")
    if not isinstance(temperature, torch.Tensor):
        return Scaling(None, 1.0 / _positive(temperature, "temperature"), cap)
    if temperature.is_complex() or temperature.dtype == torch.bool:
        raise InputError(f"temperature must hold real numbers, got {temperature.dtype}.")
    if temperature.requires_grad:
        raise InputError("temperature requires a gradient, which these losses do not give; pass temperature.detach().")
    if temperature.dim() != 0 and tuple(temperature.shape) != tuple(logits.shape[:-1]):
        raise InputError(
            f"temperature must be a number or have shape {tuple(logits.shape[:-1])} (one per row of the logits),"
            f" got {tuple(temperature.shape)}."
        )
    values = temperature.to(device=logits.device, dtype=accumulator_dtype(logits)).expand(logits.shape[:-1])
    inverse = torch.where(values > 0, 1.0 / values, torch.nan)
    return Scaling(inverse.reshape(count_rows(logits)).contiguous(), 1.0, cap)


def check_bounds(logits: torch.Tensor, group: str, start: Any, end: Any, total: Any = None) -> Bounds:
    """Bounds of this rank's shard.

    Raises:
        InputError: an end without a start, a negative or reversed range, more ids than columns, bounds that cannot be
        the
            whole vocabulary where there is no group, or a vocabulary of 2**24 ids or more.
    """
    columns = logits.shape[-1]
    if columns >= MAX_VOCABULARY:
        raise InputError(
            f"the logits have {columns} columns; the largest vocabulary supported is {MAX_VOCABULARY - 1}."
        )
    for name, value in (("vocab_start_index", start), ("vocab_end_index", end), ("global_vocab_size", total)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < 0):
            raise InputError(f"{name} must be a non-negative integer or None, got {value!r}.")
        if value is not None and value >= MAX_VOCABULARY:
            raise InputError(f"{name}={value} exceeds {MAX_VOCABULARY - 1}, the largest vocabulary supported.")
    if start is None and end is not None:
        if group:
            raise InputError("vocab_end_index needs vocab_start_index when a tp_group is given.")
        start = 0
    if start is None:
        if total is not None and not group and total > columns:
            raise InputError(f"global_vocab_size={total} exceeds the {columns} columns, and there is no tp_group.")
        return Bounds(-1, -1, -1 if total is None else total)
    last = start + columns if end is None else end
    if last >= MAX_VOCABULARY:
        raise InputError(f"the shard ends at {last}; the largest vocabulary supported is {MAX_VOCABULARY - 1}.")
    if last < start or last - start > columns:
        raise InputError(f"the shard [{start}, {last}) does not fit the {columns} columns of the logits.")
    if not group and start != 0:
        raise InputError(
            f"vocab_start_index={start} without tp_group: a part of a vocabulary has no normalisation. Pass the group"
            " that holds the other parts (None never means the world)."
        )
    if not group and total is not None and total != last:
        raise InputError(f"global_vocab_size={total}, but without a tp_group the ids end at {last}.")
    return Bounds(start, last, -1 if total is None else total)


def check_options(ignore_index: Any, label_smoothing: Any = 0.0, z_loss: Any = 0.0) -> None:
    """Options of every loss that are plain numbers.

    Raises:
        InputError: ``ignore_index`` no integer, ``label_smoothing`` outside [0, 1], ``z_loss`` not finite.
    """
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, torch.SymInt)):
        raise InputError(f"ignore_index must be an integer, got {ignore_index!r}.")
    if not _is_real(label_smoothing) or not 0.0 <= label_smoothing <= 1.0:
        raise InputError(f"label_smoothing must be a number in [0, 1], got {label_smoothing!r}.")
    if not _is_real(z_loss) or not -math.inf < z_loss < math.inf:
        raise InputError(f"z_loss must be a finite number (0 for none), got {z_loss!r}.")


def check_inplace(logits: torch.Tensor) -> None:
    """Refuse ``inplace_backward=True`` where the logits' memory cannot become the gradient.

    Raises:
        InputError: under torch.compile, for a leaf that requires a gradient or a view of one, or for logits that are
            not contiguous.
    """
    if torch.compiler.is_compiling():
        raise InputError("inplace_backward=True is for eager mode; leave it False under torch.compile.")
    # A parameter seen through a view is a parameter still; `_base` is how autograd itself knows (torch 2.11 to 2.14).
    if any(tensor is not None and tensor.requires_grad and tensor.is_leaf for tensor in (logits, logits._base)):
        raise InputError(
            "inplace_backward=True would overwrite a leaf tensor, or the leaf that the logits are a view of; leave it"
            " False or pass computed logits."
        )
    if not logits.is_contiguous():
        raise InputError(
            f"inplace_backward=True needs contiguous logits, got strides {logits.stride()}; leave it False."
        )


def check_group(group: Any, argument: str = "tp_group") -> str:
    """The group's name for an operator; see ``groups.group_name``."""
    return group_name(group, argument)


def _is_real(value: Any) -> bool:
    # Dynamo knows a traced number's exact type, but not that it is a Real.
    return type(value) in (int, float) or (isinstance(value, Real) and not isinstance(value, bool))


def _positive(value: Any, name: str) -> float:
    if not _is_real(value) or not 0.0 < value < math.inf:
        raise InputError(f"{name} must be a positive finite number, got {value!r}.")
    return float(value)
