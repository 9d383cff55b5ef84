"""Optimizers on sharded rows: an update must be the one that the dense model's rows would get.

Optimizers that treat each element by itself (SGD, Adam) do not see a shard. Those that use norms, whole matrices or
sums over all parameters (LAMB, Muon, Adafactor, L-BFGS) compute another update on each rank, and what ranks hold alike
may drift apart. Which kind one is, is found by trying it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InputError
from . import registry
from .registry import key, parameter_groups, parameter_rows

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)
# In a group of parameters: whose rows its states are of. It is saved and loaded with them.
ROWS = "vocab_parallel_rows"
# Of each optimizer: when it was looked at, and which sharded rows each of its groups has ("" for none).
_SEEN: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[tuple[int, ...], list[str]]] = weakref.WeakKeyDictionary()
_STEPS = 3
_FRAMES = 16


def check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step on sharded rows: refuse an optimizer whose update of some rows depends on the others (each is tried
    once), states that are of another rank's rows, and a step that this rank alone might take.

    Raises:
        InputError: with the name of the optimizer and what to use instead.
    """
    stamp = registry.version(), len(optimizer.param_groups)
    if optimizer not in _SEEN or _SEEN[optimizer][0] != stamp:
        _check_for_replaced(optimizer)
        _SEEN[optimizer] = stamp, _rows_of(optimizer) if _has_rows_treated_alike(optimizer) else []
    rows = _SEEN[optimizer][1]
    _check_states(optimizer, rows)
    if rows and _is_under_a_scaler_of_one_rank():
        raise InputError(
            "a GradScaler looks for infinities in a rank's own gradients, but ranks that share a vocabulary have other "
            "rows, so one might skip a step that the others take. Train in bfloat16, or use torch.distributed.fsdp."
            "sharded_grad_scaler.ShardedGradScaler, which asks all ranks"
        )


def _check_for_replaced(optimizer: torch.optim.Optimizer) -> None:
    if any(registry.was_replaced(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise InputError(
            f"this {type(optimizer).__name__} holds the whole LM head that the model had before it was sharded, so the "
            "new one would never be trained; make the optimizer after autosp.initialize(config, model=model)"
        )


def _rows_of(optimizer: torch.optim.Optimizer) -> list[str]:
    known = parameter_rows()
    rows = [[known[key(p)] for p in group["params"] if key(p) in known] for group in optimizer.param_groups]
    return ["; ".join(sorted(set(each))) for each in rows]


def _check_states(optimizer: torch.optim.Optimizer, rows: Sequence[str]) -> None:
    """Mark each group with its rows, and refuse one that carries another rank's mark: one rank's file was loaded."""
    for group, mine in zip(optimizer.param_groups, rows, strict=False):
        if mine and group.setdefault(ROWS, mine) != mine:
            raise InputError(
                f"this {type(optimizer).__name__} was given states of other rows of the vocabulary: they are of "
                f"{group[ROWS]}, and this rank holds {mine}. A state dict of an optimizer that one rank saved holds "
                "that rank's rows only: save and load through torch.distributed.checkpoint, with "
                "optimizer_state_with_rows and optimizer_state_without_rows of autosp.layers, or one file a rank"
            )


def _is_under_a_scaler_of_one_rank() -> bool:
    """Whether ``GradScaler.step`` called the step: torch tells an optimizer nothing of it."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        frame = None if frame is None else frame.f_back
        if frame is None:
            return False
        if frame.f_code.co_name == "step" and isinstance(scaler := frame.f_locals.get("self"), torch.amp.GradScaler):
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            return not isinstance(scaler, ShardedGradScaler)
    return False


def _has_rows_treated_alike(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has sharded rows, each element of which it treats by itself.

    Raises:
        InputError: it has some, and mixes them.
    """
    sharded, found = parameter_groups(), False
    for group in optimizer.param_groups:
        parameter = next((p for p in group["params"] if key(p) in sharded), None)
        if parameter is None:
            continue
        found = True
        if type(optimizer) in _ELEMENTWISE:
            continue
        name = type(optimizer).__name__
        try:
            alike = _is_elementwise(optimizer, group, parameter.device)
        except Exception as error:
            warnings.warn(
                f"{name} cannot be tried on small tensors ({type(error).__name__}: {error}), so whether it treats the "
                "rows of a vocabulary-parallel head as those of a whole one is unknown. If it uses norms or whole "
                "matrices of parameters, the ranks' updates are wrong",
                stacklevel=4,
            )
            alike = True
        if not alike:
            raise InputError(
                f"{name} updates a row by what is in others (norms, whole matrices, sums over parameters), but a rank "
                "of a vocabulary-parallel head has its own rows only: the update would not be that of the whole head, "
                "and weights that all ranks hold could drift apart. Use an optimizer that treats each element by "
                f"itself (AdamW, SGD) for the parameters of the head; the others may stay with a {name} of their own"
            )
    return found


def _is_elementwise(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    """Whether some steps move the rows of a small matrix, and another parameter, as they do without the other rows.

    Raises:
        RuntimeError: nothing moves.
    """
    start = [torch.linspace(-1, 1, 12).view(4, 3).to(device), torch.linspace(1, 2, 6).view(2, 3).to(device)]
    whole = _moved(optimizer, group, start)
    scale = max(float(value.abs().max()) for value in whole)
    if not scale > 0:
        raise RuntimeError("its steps move nothing")
    for rows in (slice(0, 1), slice(1, 4)):
        part = _moved(optimizer, group, [start[0][rows], start[1]])
        expected = (whole[0][rows], whole[1])
        if any(float((a - b).abs().max()) > 1e-3 * scale for a, b in zip(part, expected, strict=True)):
            return False
    return True


def _moved(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], start: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """By how much some steps of a new optimizer of the same kind and settings move parameters that start here."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    settings = {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", ROWS)}
    if isinstance(settings.get("lr"), (float, torch.Tensor)):
        settings["lr"] = settings["lr"] * 0 + 0.1  # of a size that shows, whatever a schedule has made of it
    known = {name: value for name, value in {**optimizer.defaults, **settings}.items() if name in accepted}
    with torch.random.fork_rng(devices=[start[0].device] if start[0].is_cuda else []):
        parameters = [torch.nn.Parameter(value.clone()) for value in start]
        tried = kind([{"params": parameters, **settings}], **known)
        for step in range(_STEPS):
            closure = functools.partial(_set_gradients, parameters, 1 + 4 * step)
            closure()
            tried.step(closure)
    return [parameter.detach() - value for parameter, value in zip(parameters, start, strict=True)]


def _set_gradients(parameters: Sequence[torch.nn.Parameter], factor: float) -> Any:
    for parameter in parameters:
        parameter.grad = torch.cos(7 * parameter.detach()) * factor
    return parameters[0].new_ones(())
