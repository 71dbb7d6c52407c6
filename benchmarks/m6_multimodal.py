"""Measures what the lesson of milestone 6 quotes of images: `python -m benchmarks.m6_multimodal`.

What a first token about a picture takes when nothing, its prefix, or its embeddings are known, the tower by how many
share a pass, and what a picture takes of memory (`m6_answers`); what the encoder's budget does to streams (`m6_gaps`);
and what a step of texts costs beside m5's (`m6_steps`). Writes `results/m6_multimodal.json` after every part, then
`results/m6_multimodal.md` (the tables that the page includes) and the plots `docs/assets/m6_*.png`. Times are medians
of rounds in which the sides take turns. A part during which other processes took more than a tenth of a core is marked
`disturbed`.

    python -m benchmarks.m6_multimodal                  all of it, in some minutes
    python -m benchmarks.m6_multimodal --parts steps    one part again; the others stay as they were
    python -m benchmarks.m6_multimodal --quick          a small version; its numbers are no results
    python -m benchmarks.m6_multimodal --redraw         tables and plots again, from the same numbers
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import ASSETS, RESULTS, environment
from benchmarks.m3_paged_attention import measure, start
from benchmarks.m3_tables import promises
from benchmarks.m6_answers import answers, memory, tower
from benchmarks.m6_gaps import UNLIMITED, gaps
from benchmarks.m6_models import Engines
from benchmarks.m6_plots import draw_plots
from benchmarks.m6_steps import steps
from benchmarks.m6_tables import PROMISES, tables
from m3_paged_attention.attention.registry import choose
from m6_multimodal_pd import DEFAULT_MODEL

SEED = 1
NAME = "m6_multimodal"
NUMBERS, BUDGETS = (1, 2, 4, 8, 16), (64, 128, 256, 512, UNLIMITED)
Parts = dict[str, Callable[[], Any]]


def parts(rounds: int, quick: bool) -> Parts:
    """Everything that is measured, by name, in this order."""

    def on_engines(run: Callable[[Engines], Any]) -> Any:
        with closing(Engines(seed=SEED)) as engines:
            return run(engines)

    numbers, budgets = ((1, 4), (64, UNLIMITED)) if quick else (NUMBERS, BUDGETS)
    num_requests, num_steps, stream_tokens = (4, 20, 40) if quick else (16, 200, 100)
    return {
        "memory": lambda: on_engines(memory),
        "answers": lambda: on_engines(lambda e: answers(e, rounds=4 * rounds - 1)),
        "tower": lambda: on_engines(lambda e: tower(e, numbers=numbers, rounds=2 * rounds - 1)),
        "gaps": lambda: on_engines(lambda e: gaps(e, budgets=budgets, rounds=rounds, stream_tokens=stream_tokens)),
        "steps": lambda: on_engines(lambda e: steps(e, num_requests=num_requests, num_steps=num_steps, seed=SEED)),
    }


def write_up(results: dict[str, Any], texts: Path, plots: Path) -> None:
    """Tables and plots of the parts that are there, and the tables once more on the screen."""
    text = tables(results)
    (texts / f"{NAME}.md").write_text(text, encoding="utf-8")
    draw_plots(results["parts"], plots)
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    Console().print(promises(results["parts"], PROMISES), markup=False, highlight=False, soft_wrap=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements per number, of which the median counts")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--parts", default="", help="parts to measure, with commas between them; the others are kept")
    parser.add_argument("--quick", action="store_true", help="little of everything: to see that all of it works")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: tables and plots from the last numbers")
    parser.add_argument("--output", type=Path, help="a folder for everything that is written")
    args = parser.parse_args(argv)
    known = parts(1, quick=True)
    args.chosen = args.parts.split(",") if args.parts else list(known)
    if unknown := [name for name in args.chosen if name not in known]:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(known)}")
    if args.quick and args.output is None:
        args.output = Path(tempfile.gettempdir()) / NAME
    args.texts, args.plots = (args.output, args.output) if args.output else (RESULTS, ASSETS)
    if args.redraw and not (args.texts / f"{NAME}.json").exists():
        parser.error(f"there is no {args.texts / f'{NAME}.json'} to draw from")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, and print the tables."""
    args, console = arguments(argv), Console(stderr=True)
    torch.set_num_threads(args.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for folder in (args.texts, args.plots):
        folder.mkdir(exist_ok=True, parents=True)
    path: Path = args.texts / f"{NAME}.json"
    if args.redraw:
        write_up(json.loads(path.read_text(encoding="utf-8")), args.texts, args.plots)
        return 0
    env = environment(model=Path(DEFAULT_MODEL), seed=SEED) | {"backend": choose("auto", torch.device("cpu"))}
    results = start(path, env, args.quick)

    def save() -> None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    measure(results, args.chosen, parts(args.rounds, args.quick), save, console)
    write_up(results, args.texts, args.plots)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
