"""`python -m benchmarks.device`: the same as `python -m benchmarks device`."""

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["device", *sys.argv[1:]]))
