"""The training loop of one rank: forward, backward, average over data parallelism, step, say so."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from autosp.cli.batches import Batches
from autosp.cli.checkpoint import Position
from autosp.cli.parallel import Parallel
from autosp.cli.progress import StepReport
from autosp.cli.settings import TrainSettings
from autosp.errors import InputError, InternalError
from autosp.randomness import draws_in_training

# The same sums in another order: far above what rounding does to a mean over a sequence, far below any real mistake.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
_RECENT = 20


class Trainer:
    """One rank's model, optimizer and place in the data.

    Args:
        settings: of the run.
        parallel: this rank's place.
        model: the transformers model, on the device.
        compiled: the same model as ``torch.compile(model, backend="autosp")`` gives it; shares the parameters.
        optimizer: over the model's parameters.
        batches: the data.
        position: where the run starts or goes on.
    """

    def __init__(
        self,
        settings: TrainSettings,
        parallel: Parallel,
        *,
        model: Any,
        compiled: Any,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        position: Position,
    ) -> None:
        self.settings = settings
        self.parallel = parallel
        self.model = model
        self.compiled = compiled
        self.optimizer = optimizer
        self.batches = batches
        self.position = position
        self._seconds: list[float] = []
        self._described = 0

    @property
    def samples_per_step(self) -> int:
        """Sequences that one step sees, over all data-parallel groups."""
        return self.parallel.dp_size * self.settings.batch_size * self.settings.accumulation

    def batch(self, micro: int) -> dict[str, torch.Tensor]:
        """Return the next step's micro-batch `micro`: ids and labels, int64 (batch_size, seq_len).

        Every rank of a sequence-parallel group gets the same one, each data-parallel group another.
        """
        size, dp = self.settings.batch_size, self.parallel.dp_size
        start = self.position.samples + (micro * dp + self.parallel.dp_rank) * size
        ids = self.batches.at(start, size).to(self.parallel.device)
        # a tensor of its own: one tensor under two names would be one graph input
        return {"input_ids": ids, "labels": ids.clone()}

    def _loss(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        bf16 = self.settings.dtype == "bf16"
        with torch.autocast(self.parallel.device.type, dtype=torch.bfloat16) if bf16 else nullcontext():
            return model(**batch, use_cache=False).loss

    def _compiled_loss(self, micro: int) -> torch.Tensor:
        import autosp

        return self._loss(self.compiled, autosp.prepare_batch(self.batch(micro)))

    def reference_loss(self) -> float | None:
        """Return the loss of the next batch in one process, the model as it is and the whole sequence.

        Returns:
            The loss on rank 0 and ``None`` on the others; ``None`` on rank 0 too where this does not fit into memory.
        """
        if not self.parallel.first or not self._reference_fits():
            return None
        training = self.model.training
        try:
            with torch.no_grad():
                self.model.train(training and not draws_in_training(self.model))
                return float(self._loss(self.model, self.batch(0)))
        except torch.OutOfMemoryError:
            return None
        finally:
            self.model.train(training)

    def _reference_fits(self) -> bool:
        """Whether one process can hold the logits, in fp32 and with the copies that a cross entropy makes.

        On a GPU a failed allocation tells; on a CPU the process would be killed.
        """
        if self.parallel.device.type != "cpu" or not hasattr(os, "sysconf"):
            return True
        vocab = self.model.config.get_text_config().vocab_size
        needed = 4 * 4 * self.settings.batch_size * self.settings.seq_len * vocab
        return needed < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def evaluated_loss(self) -> float:
        """Return the loss of the next batch over the ranks with dropout off; compiles the forward for it."""
        self.model.eval()
        with torch.no_grad():
            loss = float(self._compiled_loss(0))
        self.model.train()
        return loss

    def compare(self, reference: float, loss: float) -> str:
        """Say how far the loss over the ranks is from the loss in one process.

        Raises:
            InternalError: further than rounding explains, on every rank.
        """
        difference = abs(loss - reference)
        wrong = not difference <= TOLERANCE[self.settings.dtype] * max(abs(reference), 1e-6)
        ranks = self.parallel.sp_size
        split = f"over {ranks} ranks" if ranks > 1 else "compiled"
        text = (
            f"loss of the first batch: {reference:.7f} in one process, {loss:.7f} {split}, difference {difference:.1e}"
        )
        if self.parallel.from_first(wrong):
            raise InternalError(f"{text}: more than rounding explains. Nothing was trained; please report the model")
        return text

    def step(self, on_first_loss: Any = None) -> dict[str, Any]:
        """Do one optimizer step.

        Args:
            on_first_loss: called with the loss of the first micro-batch before its backward.

        Returns:
            The row for the metrics file, the same on every rank.

        Raises:
            InputError: the loss is not finite; raised on every rank, before the optimizer has used it.
        """
        begin = time.perf_counter()
        total = 0.0
        for micro in range(self.settings.accumulation):
            loss = self._compiled_loss(micro)
            if on_first_loss is not None and micro == 0:
                on_first_loss(float(loss.detach()))
            (loss / self.settings.accumulation).backward()
            total += float(loss.detach()) / self.settings.accumulation
        losses = self.parallel.exchange([total])[:, 0]
        self._check_losses(losses)
        self.parallel.average_gradients(self.model)
        limit = self.settings.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        lr = self.settings.lr * min(1.0, (self.position.step + 1) / max(self.settings.warmup, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        samples = self.position.samples + self.samples_per_step
        self.position = replace(self.position, step=self.position.step + 1, samples=samples)
        seconds = time.perf_counter() - begin
        return {
            "step": self.position.step,
            "loss": float(losses.mean()),
            "grad_norm": float(norm),
            "lr": lr,
            "seconds": round(seconds, 4),
            "tokens_per_s": round(self.samples_per_step * self.settings.seq_len / seconds, 1),
            "samples": samples,
        }

    def _check_losses(self, losses: torch.Tensor) -> None:
        step = self.position.step + 1
        if not bool(torch.isfinite(losses).all()):
            raise InputError(
                f"the loss is {float(losses.mean())} at step {step}: lower --lr, or look at the data there"
            )
        self.parallel.check_same_loss(losses)

    def describe(self, row: dict[str, Any], peak: int) -> StepReport:
        """Return `row` as the progress bar shows it: speed and time left from recent steps, the first left out."""
        # the first step compiled: it counts only while there is no other
        earlier = self._seconds if self._described > 1 else []
        self._seconds = [*earlier, row["seconds"]][-_RECENT:]
        self._described += 1
        each = sum(self._seconds) / len(self._seconds)
        return StepReport(
            step=row["step"],
            loss=row["loss"],
            tokens_per_s=self.samples_per_step * self.settings.seq_len / each,
            peak_bytes=peak,
            seconds_left=each * (self.settings.steps - row["step"]),
            compiled_in=row["seconds"] if self._described == 1 else None,
        )


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process has held: on the GPU by torch, on the CPU all of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
