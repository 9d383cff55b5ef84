"""Entry of one rank, ``python -m autosp.cli.rank run.json``: imports little, so that it can say that it imports."""

from __future__ import annotations

import os
import sys

from autosp.cli.progress import reporter


def main() -> None:
    """Import the heavy libraries under a sign of life, then run the rank."""
    try:
        with reporter(os.environ.get("RANK") == "0").stage("Importing torch and transformers"):
            from autosp.cli import worker
    except KeyboardInterrupt:
        # as a rank that is interrupted later, before its first step: no traceback, there is nothing to save
        os._exit(130)
    worker.main(sys.argv[1])


if __name__ == "__main__":
    main()
