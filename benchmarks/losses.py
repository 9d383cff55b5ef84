"""The same as ``autosp bench losses``, for a checkout that is not installed."""

import sys

from autosp.cli.main import main

if __name__ == "__main__":
    main(["bench", "losses", *sys.argv[1:]])
