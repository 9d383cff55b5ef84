"""Checkpoints: folders that are complete or not there, loadable by transformers' ``from_pretrained``."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autosp.errors import InputError

KEPT = 2
_NAME = re.compile(r"checkpoint-(\d+)")
_STATE = "training_state.json"


@dataclass(frozen=True)
class Position:
    """How far a run is."""

    step: int
    """Optimizer steps done."""
    samples: int
    """Sequences seen, over all data-parallel groups."""
    digest: str
    """Of the token file: a resume with other data would be another run."""


def save(
    folder: Path, position: Position, *, model: Any, tokenizer: Any, optimizer: Any, rng: list[dict[str, Any]]
) -> Path:
    """Write ``folder/checkpoint-<step>``, whole or not at all, then drop all but the last two.

    Everything is written and synced under another name, then renamed; a crash at any moment leaves the older ones.

    Args:
        folder: the run folder.
        position: how far the run is.
        model: the transformers model, not the compiled wrapper, so that weights have their plain names.
        tokenizer: a transformers tokenizer to put beside it, or ``None``.
        optimizer: its state goes to ``optimizer.pt``.
        rng: `rng_state` of each rank, to ``rng.pt``.

    Returns:
        The checkpoint's folder.
    """
    target = folder / f"checkpoint-{position.step:06d}"
    if (target / _STATE).exists():
        # a resume that was interrupted before its first step: what it would write is there
        return target
    temporary = folder / f".{target.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.save_pretrained(temporary)
    if tokenizer is not None:
        tokenizer.save_pretrained(temporary)
    torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
    torch.save(rng, temporary / "rng.pt")
    (temporary / _STATE).write_text(json.dumps(asdict(position), indent=2) + "\n")
    for path in [*temporary.iterdir(), temporary]:
        _sync(path)
    temporary.rename(target)
    _sync(folder)
    for old in _all(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _all(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and (path / _STATE).exists()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run folder, or ``None``."""
    found = _all(folder)
    return found[-1] if found else None


def read_position(checkpoint: Path) -> Position:
    """Return how far `checkpoint` is, or raise an InputError where it is none."""
    try:
        return Position(**json.loads((checkpoint / _STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--resume {checkpoint}: {_STATE} cannot be read: {error}") from None


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Put the saved state into `optimizer`, whose parameters are those of the loaded model."""
    state = torch.load(checkpoint / "optimizer.pt", map_location=device, weights_only=True)
    optimizer.load_state_dict(state)


def rng_state() -> dict[str, Any]:
    """Return the state of this process's random number generators."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def load_rng(checkpoint: Path, rank: int, world: int) -> bool:
    """Restore this rank's generators; ``False`` where the checkpoint is from another number of processes."""
    states = torch.load(checkpoint / "rng.pt", map_location="cpu", weights_only=True)
    if len(states) != world:
        return False
    torch.set_rng_state(states[rank]["cpu"])
    if states[rank]["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[rank]["cuda"])
    return True
