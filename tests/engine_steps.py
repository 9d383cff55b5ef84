"""Training in one process on the whole sequence, and what a run under an engine has to equal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import toys

import autosp

DOCS = Path(__file__).resolve().parent.parent / "docs" / "integrations"

Batch = dict[str, torch.Tensor]
BatchOf = Callable[[int, int, int], Batch]


@dataclass
class Run:
    """Losses by step, gradients of the first step by name, and by how much each parameter moved in all steps."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    moved: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)

    def check(self, expected: Run, rtol: float = 1e-5) -> None:
        assert self.losses and len(self.losses) == len(expected.losses)
        for found, loss in zip(self.losses, expected.losses, strict=True):
            assert abs(found - loss) <= rtol * abs(loss), (self.losses, expected.losses)
        for found, norm in zip(self.norms, expected.norms, strict=bool(self.norms)):
            assert abs(found - norm) <= rtol * norm, (self.norms, expected.norms)
        check_tensors(self.gradients, expected.gradients, rtol, "gradients")
        # The later steps' gradients are taken where rounding of the first step has led, and the difference of two
        # weights is exact to a rounding step of the weights only.
        check_tensors(self.moved, expected.moved, 10 * rtol, "moved", noise=2.0**-22 * LARGEST_WEIGHT)


# Of the toys and of the zoo, whose layer norms start at one.
LARGEST_WEIGHT = 4.0


def check_tensors(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float, kind: str, noise: float = 0.0
) -> None:
    assert set(found) == set(expected), (kind, set(found) ^ set(expected))
    # Some gradients are zero but for rounding (a key bias under softmax).
    floor = 1e-3 * max(value.abs().max().item() for value in expected.values())
    for name, value in expected.items():
        difference = (found[name].float() - value.float()).abs().max().item()
        allowed = rtol * max(value.abs().max().item(), floor) + noise
        assert difference <= allowed, (kind, name, difference, allowed)


def batch_of(step: int, micro: int, replica: int, length: int = 17) -> Batch:
    """The batch that data-parallel group `replica` sees; without ignored labels, so that mean losses average."""
    return toys.batch(length, seed=100 * step + 10 * micro + replica, ignored=0.0)


def one_process(
    model: torch.nn.Module,
    *,
    steps: int = 2,
    replicas: int = 1,
    accumulation: int = 1,
    clip: float | None = None,
    lr: float = 0.5,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    batches: BatchOf = batch_of,
) -> Run:
    """Train on the batches of all replicas: the loss is the mean over replicas and micro-batches."""
    run = Run()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    stepper = optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        total = 0.0
        for micro in range(accumulation):
            for replica in range(replicas):
                loss = model(**batches(step, micro, replica)).loss / (accumulation * replicas)
                loss.backward()
                total += loss.item()
        if clip is not None:
            run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        if step == 0:
            run.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        stepper.step()
        stepper.zero_grad()
        run.losses.append(total)
    run.moved = {n: p.detach() - before[n] for n, p in model.named_parameters() if n in before}
    return run


def recorder(found: dict[str, str]) -> Callable[[str, Callable[[], Any]], None]:
    """``record(name, call)`` keeps under ``name`` which of our errors a call raises; nothing when it raises none."""

    def record(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except autosp.AutoSPError as error:
            found[name] = f"{type(error).__name__}: {error}"

    return record


def script_of(page: str) -> str:
    """The complete script of a page in docs/integrations: its only Python block that starts with a comment line."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    (script,) = [b for b in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if b.startswith("#")]
    return script


def run_script(rank_info: Any, path: str) -> dict[str, Any]:
    """Body of a rank: run a script as ``python path`` would in its own folder, and give its plain results."""
    import os
    import runpy
    import sys

    if "accelerate" in sys.modules:  # its state outlives the process group of an earlier call
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    before = os.getcwd()
    os.chdir(Path(path).parent)
    try:
        found = runpy.run_path(path, run_name="__main__")
    finally:
        os.chdir(before)
    return {name: value for name, value in found.items() if isinstance(value, (int, float, list)) and name[0] != "_"}


def json_of(page: str) -> str:
    """The JSON of a page in docs/integrations."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)
    return found
