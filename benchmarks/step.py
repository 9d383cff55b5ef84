"""The same as ``autosp bench step``, for a checkout that is not installed."""

import sys

from autosp.cli.main import main

if __name__ == "__main__":
    main(["bench", "step", *sys.argv[1:]])
