"""The same as ``autosp bench linear-loss``, for a checkout that is not installed."""

import sys

from autosp.cli.main import main

if __name__ == "__main__":
    main(["bench", "linear-loss", *sys.argv[1:]])
