"""`autosp.check`: does this model, compiled for this group, do what one process with the whole sequence does?

Runs the plain model and the compiled one from the same weights on the same batch, for one or several optimizer steps,
and compares loss, outputs and the gradient of every parameter. The plain model runs whole on each rank, so a length
that one device can hold is the longest to check with; what is right at a short even and a short uneven length is
right at a long one, since sizes are symbols in the compiled program.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autosp import mesh
from autosp.backend import autosp_backend
from autosp.comparison import Comparison, tolerance
from autosp.errors import AutoSPError, InputError
from autosp.inputs import prepare_batch
from autosp.randomness import draws_in_training
from autosp.sharded_copy import ShardedCopy, check_whole

LossOf = Callable[[Any], torch.Tensor]

_NOT_COMPILED = (
    "no part of the model ran compiled in some step, so that each rank computed the whole sequence: Dynamo skipped its "
    "forward (torch.compiler.disable), or gave up after too many recompilations; "
    "TORCH_LOGS=graph_breaks,recompiles tells why"
)


@dataclass
class CheckResult:
    """What `check` found, the worst over all ranks; the same on every rank.

    Errors are relative: the loss to the loss in one process, a gradient or an output to its own largest value.
    """

    ok: bool
    """Loss, outputs and every gradient agree within `tolerance`."""
    tolerance: float
    loss: float = float("nan")
    """Loss of the last step over the group."""
    reference: float = float("nan")
    """Loss of the last step in one process."""
    loss_error: float = float("nan")
    worst_gradient: str = ""
    """Name of the parameter whose gradient differs most."""
    gradient_error: float = float("nan")
    output_error: float = float("nan")
    """Of the output ``logits``, where the model gives it; 0 where it does not."""
    missing: list[str] = field(default_factory=list)
    """Parameters that got a gradient on one side only."""
    refused: str = ""
    """Why the model cannot be compiled for the group, or empty."""
    compilations: int = 0
    """Graphs that were compiled for this batch; 0 when earlier programs served."""
    seconds: float = 0.0
    steps: int = 1
    dropout_off: bool = False
    """The model draws random numbers in training, so both sides ran in evaluation mode."""

    @property
    def verdict(self) -> str:
        """ "ok", "MISMATCH" or "refused"."""
        return "refused" if self.refused else "ok" if self.ok else "MISMATCH"

    def as_dict(self) -> dict[str, Any]:
        """The fields and the verdict, for JSON."""
        return {**asdict(self), "verdict": self.verdict}

    def __str__(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        text = (
            f"{self.verdict}: loss {self.loss:.7g} over the group, {self.reference:.7g} in one process (error "
            f"{self.loss_error:.1e}); worst gradient {self.worst_gradient} (error {self.gradient_error:.1e}); "
            f"allowed {self.tolerance:.0e}"
        )
        return text + (f"; gradients on one side only: {', '.join(self.missing)}" if self.missing else "")


def check(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    *,
    steps: int = 1,
    lr: float = 0.1,
    rtol: float | None = None,
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = prepare_batch,
    loss_of: LossOf | None = None,
    options: Mapping[str, Any] | None = None,
) -> CheckResult:
    """Compare `model` compiled for the current mesh with the same model in one process. Collective over the world.

    Weights, buffers, gradients, training mode and random state are as before when it returns. Where the settings shard
    the LM head over the vocabulary, a copy of the model is sharded and compiled, and `model` stays whole: each rank
    compares its rows of a gradient with those rows of the whole one.

    Args:
        model: the plain model, whole on every rank and with the same weights within a sequence group; not compiled, not
            wrapped by an engine.
        batch: keyword arguments of its forward, whole, the same on every rank of a sequence group.
        steps: optimizer steps (plain SGD); each step's loss and gradients are compared.
        lr: learning rate of those steps.
        rtol: allowed relative error; by default 1e-5 in fp32, 2e-2 with half precision or autocast.
        prepare: tags the inputs of the compiled model, `prepare_batch` or one's own.
        loss_of: the scalar loss in what the model returns; by default see `loss_in`.
        options: as for ``torch.compile(..., options=...)``. In a check `gradient_reduction` is "graph"
            and `outputs` is "dtensor".

    Raises:
        InputError: nothing is initialised, the model is compiled or sharded already, its LM head cannot be sharded as
            the settings say, the batch is no mapping, or the plain model fails on some rank; raised on every rank.
    """
    return Checker(model, lr=lr, rtol=rtol, prepare=prepare, loss_of=loss_of, options=options).run(batch, steps=steps)


def loss_in(out: Any) -> Any:
    """The loss in what a model returns: the attribute or the item "loss", or the whole where it is a tensor."""
    if isinstance(out, Mapping) and "loss" in out:
        return out["loss"]
    return getattr(out, "loss", out)


class Checker:
    """`check` for several batches, so that one compilation serves all that it can. Arguments as for `check`."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        lr: float = 0.1,
        rtol: float | None = None,
        prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = prepare_batch,
        loss_of: LossOf | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        state = _check_model(model)
        self.model, self.lr, self.rtol = model, lr, rtol
        self.copy = ShardedCopy(state, model) if state.has_vocabulary_axis else None
        self.parallel = self.copy.module if self.copy is not None else model
        self.prepare, self.loss_of = prepare, loss_of or loss_in
        self.compilations = self.calls = 0
        # The whole outputs are compared, and the gradients before an engine has seen them.
        settings = {**(options or {}), "gradient_reduction": "graph", "outputs": "dtensor"}

        def counting(gm: Any, inputs: Any, **kwargs: Any) -> Any:
            self.compilations += 1
            program = autosp_backend(gm, inputs, **kwargs)

            def run(*arguments: Any) -> Any:
                self.calls += 1
                return program(*arguments)

            return run

        self.compiled = torch.compile(self.parallel, backend=counting, options=settings)

    def run(self, batch: Mapping[str, Any], *, steps: int = 1) -> CheckResult:
        """Compare on one batch; see `check`."""
        if not isinstance(batch, Mapping):
            raise InputError(f"a batch is a mapping from argument names to tensors, not {type(batch).__name__}")
        if steps < 1:
            raise InputError(f"steps is {steps}; at least 1 is needed")
        begin, before, self.calls = time.perf_counter(), self.compilations, 0
        result = CheckResult(ok=False, tolerance=self.rtol or tolerance(self.model), steps=steps)
        result.dropout_off = self.model.training and draws_in_training(self.model)
        comparison = Comparison(self.copy.rows if self.copy is not None else None)
        with _kept(self.model, eval_mode=result.dropout_off) as saved:
            self._together(lambda: self._train(self.model, self.model, batch, steps, comparison.expect), "plain model")
            _restore(self.model, saved)
            if self.copy is not None:
                self.copy.take(saved, self.model)
            try:
                self._train(self.compiled, self.parallel, batch, steps, comparison.compare, prepare=self.prepare)
            except Exception as error:
                if (refusal := _refusal(error)) is None:
                    raise
                result.refused = str(refusal)
        # Dynamo runs what it skips as it is: each rank the whole sequence, which agrees and shares nothing
        if not result.refused and self.calls < steps:
            result.refused = _NOT_COMPILED
        if not result.refused and comparison.not_finite:
            result.refused = (
                f"the loss of the plain model is {comparison.not_finite} in one process already: what is NaN or "
                "infinite on both sides agrees and proves nothing; give weights and a batch with a finite loss"
            )
        result.compilations, result.seconds = self.compilations - before, time.perf_counter() - begin
        if not result.refused:
            comparison.fill(result)
        return _worst_over_ranks(result)

    def _train(
        self,
        call: Callable[..., Any],
        model: torch.nn.Module,
        batch: Mapping[str, Any],
        steps: int,
        take: Callable[..., None],
        prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    ) -> None:
        for step in range(steps):
            model.zero_grad(set_to_none=True)
            # clones: a tag of an earlier run must not stay on the user's tensors, nor a write into them
            inputs = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            out = call(**prepare(inputs))
            loss = self.loss_of(out)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise InputError(
                    f"loss_of gave a {type(loss).__name__}; a scalar tensor is needed: give labels in the batch, or "
                    "loss_of=a function that takes what the model returns"
                )
            loss.backward()
            take(step, loss.detach(), model, out)
            if step + 1 < steps:
                self._descend(model)

    def _descend(self, model: torch.nn.Module) -> None:
        # SGD: an adaptive optimizer divides by the gradient's size, and so makes rounding noise as large as a gradient
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self.lr)

    def _together(self, run: Callable[[], None], what: str) -> None:
        """Run on every rank; where it fails on one, raise on all instead of leaving the others in a collective."""
        failure = ""
        try:
            run()
        except Exception as error:
            failure = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            cause = error
        failures = _gather(failure)
        for rank, text in enumerate(failures):
            if text:
                message = f"the {what} fails on rank {rank} with the whole sequence: {text}"
                raise InputError(message) from (cause if failure else None)


def _check_model(model: torch.nn.Module) -> mesh.AutoSPState:
    state = mesh.current()
    if state is None:
        raise InputError("autosp.check compares with a group: call autosp.initialize(...) first, under torchrun")
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise InputError("the model is compiled already; give autosp.check the plain model, before torch.compile")
    sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    if sharded:
        raise InputError(
            f"{sharded[0]} and {len(sharded) - 1} more parameters are DTensors; check the model before it is sharded"
        )
    check_whole(model)
    return state


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from ((f"buffer {name}", tensor) for name, tensor in model.named_buffers())


def _restore(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in _tensors(model):
            if name in saved:
                tensor.copy_(saved[name])


@contextmanager
def _kept(model: torch.nn.Module, *, eval_mode: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Put weights, buffers, gradients, training mode and the random state back at the end; gives the copies."""
    saved = {name: tensor.detach().clone() for name, tensor in _tensors(model)}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    modes = {module: module.training for module in model.modules()}
    random = torch.get_rng_state()
    on_gpu = copy.copy(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None
    if eval_mode:
        model.eval()
    try:
        yield saved
    finally:
        _restore(model, saved)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        for module, training in modes.items():
            module.training = training
        torch.set_rng_state(random)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)


def _refusal(error: BaseException | None) -> AutoSPError | None:
    """The error of autosp behind what Dynamo raised."""
    while error is not None:
        if isinstance(error, AutoSPError) and not isinstance(error, InputError):
            return error
        error = getattr(error, "inner_exception", None) or error.__cause__
    return None


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _worst_over_ranks(result: CheckResult) -> CheckResult:
    """The result that is furthest from right; one that is refused or not a number is further than any other."""

    def badness(one: CheckResult) -> tuple[bool, bool, bool, float]:
        errors = (one.loss_error, one.gradient_error, one.output_error)
        unknown = any(error != error for error in errors)
        return bool(one.refused), not one.ok, unknown, 0.0 if unknown else max(errors)

    results = _gather(result)
    worst = max(results, key=badness)
    # another rank's refusal reaches the others as "at different points": the one that refused knows why
    reasons = [one.refused for one in results if one.refused and "different points of the program" not in one.refused]
    if reasons:
        worst.refused = reasons[0]
    return worst
