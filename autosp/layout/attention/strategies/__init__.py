"""How a group shares one attention: a strategy a file, found by its file's name, which is the setting's value too.

A file has three functions: ``refusal(form) -> str`` (why it cannot serve this call, or ""), ``estimate(form) ->
Estimate`` and ``build(form) -> Strategy``.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

STRATEGIES: dict[str, ModuleType] = {
    info.name: importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)
}
