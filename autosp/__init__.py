"""Sequence parallelism for unmodified PyTorch models through ``torch.compile(model, backend="autosp")``.

Public names are imported when they are first used, so that ``import autosp`` costs nothing and works without triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosp.config import AutoSPConfig
    from autosp.errors import (
        AutoSPError,
        ConfigError,
        InputError,
        InternalError,
        RankMismatchError,
        UnsupportedGraphError,
    )
    from autosp.inputs import prepare_autosp_inputs, prepare_batch
    from autosp.layout.call import Refusal, Strategy
    from autosp.layout.registry import register_rule
    from autosp.mesh import initialize

__version__ = "0.1.0"

_HOME = {
    "AutoSPConfig": "autosp.config",
    "AutoSPError": "autosp.errors",
    "ConfigError": "autosp.errors",
    "InputError": "autosp.errors",
    "InternalError": "autosp.errors",
    "RankMismatchError": "autosp.errors",
    "Refusal": "autosp.layout.call",
    "Strategy": "autosp.layout.call",
    "UnsupportedGraphError": "autosp.errors",
    "initialize": "autosp.mesh",
    "prepare_autosp_inputs": "autosp.inputs",
    "prepare_batch": "autosp.inputs",
    "register_rule": "autosp.layout.registry",
}

__all__ = [
    "AutoSPConfig",
    "AutoSPError",
    "ConfigError",
    "InputError",
    "InternalError",
    "RankMismatchError",
    "Refusal",
    "Strategy",
    "UnsupportedGraphError",
    "initialize",
    "prepare_autosp_inputs",
    "prepare_batch",
    "register_rule",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autosp' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
