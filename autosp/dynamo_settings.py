"""Settings of Dynamo's own that keep transformers models in one graph."""

from __future__ import annotations

import logging
import sys

import torch


def ignore_transformers_warnings() -> None:
    """Let Dynamo skip ``logger.warning_once`` of transformers, which would break the graph of a model that warns.

    Uses the setting that torch has for this (``ignore_logging_functions``, before 2.13 ``ignore_logger_methods``).
    Only when
    transformers is loaded already: it is never imported for this.
    """
    if "transformers" not in sys.modules:
        return
    function = getattr(logging.Logger, "warning_once", None)
    config = torch._dynamo.config
    for name in ("ignore_logging_functions", "ignore_logger_methods"):
        if function is not None and hasattr(config, name):
            getattr(config, name).add(function)
            return
