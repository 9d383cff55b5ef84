"""Settings of Dynamo's own that keep transformers models in one graph."""

from __future__ import annotations

import logging
import sys

import torch


def ignore_transformers_warnings() -> None:
    """Let Dynamo skip ``logger.warning_once`` of transformers, which would break the graph of a model that warns.

    Uses the setting that torch has for this since 2.13, ``ignore_logging_functions``. Only when transformers is loaded
    already: it is never imported for this.
    """
    if "transformers" not in sys.modules:
        return
    function = getattr(logging.Logger, "warning_once", None)
    ignored = getattr(torch._dynamo.config, "ignore_logging_functions", None)
    if function is not None and ignored is not None:
        ignored.add(function)
