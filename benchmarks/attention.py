"""The same as ``autosp bench attention``, for a checkout that is not installed."""

import sys

from autosp.cli.main import main

if __name__ == "__main__":
    main(["bench", "attention", *sys.argv[1:]])
