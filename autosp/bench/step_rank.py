"""One rank of ``autosp bench step``: ``python -m autosp.bench.step_rank settings.json``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path


def main(path: str) -> None:
    """Measure; the launcher reads the error file where a rank fails."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from autosp.bench.step import StepSettings, run

    handler = get_error_handler()
    handler.initialize()
    settings = json.loads(Path(path).read_text())
    debug = settings.pop("debug", False)
    try:
        run(StepSettings(**settings))
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        handler.record_exception(error)
        sys.stdout.flush()
        # not an exception: the interpreter's end would wait for collectives that the other ranks no longer join
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
