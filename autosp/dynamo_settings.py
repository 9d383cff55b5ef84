"""Settings of Dynamo's own that keep models in one graph."""

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
        logging.getLogger("torch._dynamo.metrics_context").addFilter(_tells_news)


def _tells_news(record: logging.LogRecord) -> bool:
    """Torch 2.11 writes its settings as JSON after each compilation, fails at this one, and logs a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return "_lru_cache_wrapper is not JSON serializable" not in str(error)


def keep_graphs_whole_under_ddp() -> None:
    """Turn off ``optimize_ddp``, which cuts the graph of a model under DistributedDataParallel at its gradient buckets.

    Between the parts it hands plain tensors on, so the layouts of autosp could not follow.
    """
    torch._dynamo.config.optimize_ddp = False
