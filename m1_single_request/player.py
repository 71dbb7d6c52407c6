"""A page that replays trace files: `python -m m1_single_request.player TRACE.jsonl -o run.html`.

Two files are shown side by side: the same requests with a cache and without, for example. The page is one file, and
needs neither a server nor a network. `--trace-file` of a demo writes a trace, of any milestone. Files may be gzipped.
"""

import argparse
from collections.abc import Sequence
from os.path import realpath
from pathlib import Path

from stepwise_player import page

MOST_RUNS = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m m1_single_request.player", description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="TRACE.jsonl", help="one trace, or two to compare")
    parser.add_argument("-o", "--output", default="run.html", help="the page (default: run.html)")
    args = parser.parse_args(argv)
    if len(args.traces) > MOST_RUNS:
        parser.error(f"{len(args.traces)} traces: a page shows one, or compares {MOST_RUNS}")
    if realpath(args.output) in map(realpath, args.traces):
        parser.error(f"{args.output} is a trace, which the page would replace")
    try:
        runs = [(Path(trace).stem, Path(trace).read_bytes()) for trace in args.traces]
        Path(args.output).write_text(page(runs), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        parser.exit(1, f"{type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
