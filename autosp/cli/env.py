"""``autosp env``: versions, devices, and what is usable here and why not, for a bug report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from typing import Annotated, Any

import typer

# What autosp stands on, then peers and engines that some command can use where they are there.
_PACKAGES = ("autosp", "torch", "transformers", "accelerate", "triton", "pydantic", "rich", "typer", "numpy")
_OPTIONAL = ("deepspeed", "peft", "liger_kernel", "cut_cross_entropy", "matplotlib", "gguf")
_SETTINGS = (
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG",
    "TORCH_LOGS",
    "TORCH_TRACE",
    "TORCHDYNAMO_DISABLE",
)


def env(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Versions, devices, and what is usable here and why not: paste it into a bug report."""
    found = gather()
    if json_output:
        print(json.dumps(found, indent=2))
        return
    for title, rows in found.items():
        print(f"{title}:")
        width = max((len(name) for name in rows), default=0)
        for name, value in rows.items():
            print(f"  {name.ljust(width)}  {value}")


def gather() -> dict[str, dict[str, str]]:
    """Return what `autosp env` prints: title -> name -> value."""
    return {
        "system": _system(),
        "packages": {name: _version(name) for name in (*_PACKAGES, *_OPTIONAL)},
        "devices": _devices(),
        "usable": _usable(),
        "environment": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
    }


def _system() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = "unknown"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    return {
        "platform": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "cores": str(cores),
        "memory": memory,
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _source_version(name) if importlib.util.find_spec(name) is not None else "not installed"


def _source_version(name: str) -> str:
    version = getattr(importlib.import_module(name), "__version__", "of unknown version")
    return f"{version} (not installed, imported from a folder)"


def _devices() -> dict[str, str]:
    import torch

    rows = {"cuda built into torch": torch.version.cuda or "no"}
    if not torch.cuda.is_available():
        return {**rows, "GPUs": "none that torch sees"}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        rows[f"cuda:{index}"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, sm_{about.major}{about.minor}"
    return rows


def _usable() -> dict[str, str]:
    """What a command may want, each "yes" or the reason why not."""
    import torch
    import torch.distributed as dist
    from torch._dynamo import list_backends

    cuda = torch.cuda.is_available()
    no_gpu = "no: torch sees no GPU"
    registered = "autosp" in list_backends(exclude_tags=())
    return {
        'torch.compile(backend="autosp")': "yes"
        if registered
        else "no: the package is imported from a folder; pip install -e . registers it, or pass autosp_backend itself",
        "gloo": "yes" if dist.is_available() and dist.is_gloo_available() else "no: torch was built without it",
        "nccl": _either(cuda and dist.is_nccl_available(), no_gpu if not cuda else "no: torch was built without it"),
        "triton kernels": _triton(cuda, no_gpu),
        "inductor on the CPU": _either(_compiler() is not None, "no: no C++ compiler (g++ or clang++) on the PATH"),
        "transformers": _within("transformers", (5, 17), (6, 0)),
        "torch version": _within("torch", (2, 11), (2, 15)),
        "deepspeed": _importable("deepspeed", "its rows of autosp bench step"),
        "liger_kernel": _importable("liger_kernel", "its rows of autosp bench"),
        "cut_cross_entropy": _importable("cut_cross_entropy", "its row of autosp bench linear-loss"),
    }


def _either(usable: bool, reason: str) -> str:
    return "yes" if usable else reason


def _triton(cuda: bool, no_gpu: str) -> str:
    if importlib.util.find_spec("triton") is None:
        return "no: triton is not installed; the losses use plain PyTorch"
    return "yes" if cuda else f"{no_gpu}; the losses use plain PyTorch"


def _compiler() -> str | None:
    return next(
        (path for name in ("g++", "clang++", os.environ.get("CXX", "")) if name and (path := shutil.which(name))), None
    )


def _within(name: str, least: tuple[int, int], below: tuple[int, int]) -> str:
    text = _version(name)
    parts: list[Any] = text.split(".")[:2]
    if len(parts) < 2 or not all(part.isdigit() for part in parts):
        return f"no: {text}"
    allowed = f">= {least[0]}.{least[1]}, < {below[0]}.{below[1]}"
    return f"yes: {text}" if least <= (int(parts[0]), int(parts[1])) < below else f"no: {text}; needed is {allowed}"


def _importable(name: str, what: str) -> str:
    return "yes" if importlib.util.find_spec(name) is not None else f"no: not installed; {what} would be skipped"
