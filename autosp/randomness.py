"""Whether a model draws random numbers in training, so that two runs of one batch differ."""

from __future__ import annotations

import json
from typing import Any

import torch


def draws_in_training(model: torch.nn.Module) -> bool:
    """Whether the model has dropout, as a module or as a number of its transformers configuration."""
    if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return False
    values = json.loads(config.to_json_string(use_diff=False))
    return any(isinstance(value, float) and value > 0 for key, value in values.items() if _names_dropout(key))


def _names_dropout(key: str) -> bool:
    return "dropout" in key or key.endswith("pdrop")
