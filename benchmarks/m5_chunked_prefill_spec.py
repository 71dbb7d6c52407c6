"""Measures what the lesson of milestone 5 quotes: `python -m benchmarks.m5_chunked_prefill_spec`.

What pieces of prompts do to the gaps between tokens (`m5_gaps`), what guesses are worth (`m5_speculation`), and what
deciding about both costs (`m5_scheduling`); and two recordings for the plots (`m5_recording`). Writes
`results/m5_chunked_prefill_spec.json` after every part, then `results/m5_chunked_prefill_spec.md` (the tables that the
page includes) and the plots `docs/assets/m5_*.png`. Times are medians of rounds in which the sides take turns. A part
during which other processes took more than a tenth of a core is marked `disturbed`.

    python -m benchmarks.m5_chunked_prefill_spec                       all of it, in some minutes
    python -m benchmarks.m5_chunked_prefill_spec --parts scheduling    one part again; the others stay as they were
    python -m benchmarks.m5_chunked_prefill_spec --quick               a small version; its numbers are no results
    python -m benchmarks.m5_chunked_prefill_spec --redraw              tables and plots again, from the same numbers
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
from benchmarks.m3_models import embedded_model
from benchmarks.m3_paged_attention import measure, start
from benchmarks.m3_tables import promises
from benchmarks.m5_gaps import Traffic, gaps
from benchmarks.m5_models import Engines
from benchmarks.m5_plots import draw_plots
from benchmarks.m5_recording import origins, steps
from benchmarks.m5_scheduling import scheduling
from benchmarks.m5_speculation import speculation
from benchmarks.m5_tables import PROMISES, tables
from m3_paged_attention.attention.registry import choose
from m5_chunked_prefill_spec import DEFAULT_MODEL, SpeculativeConfig
from m5_chunked_prefill_spec.config import DEFAULT_DRAFT_MODEL

SEED = 1
NAME = "m5_chunked_prefill_spec"
MAX_MODEL_LEN = 2048
BUDGETS, TARGETS_MS = (32, 64, 92, 96, 128, 256, 512, 1024), (6.0, 8.0, 9.0, 10.0, 11.0, 12.0, 24.0)
Parts = dict[str, Callable[[], Any]]


def parts(rounds: int, quick: bool, draft: Path | None) -> Parts:
    """Everything that is measured, by name, in this order. `draft`: the draft model; None leaves its sides out."""

    def on_engines(run: Callable[[Engines], Any]) -> Any:
        with closing(Engines(embedded_model(SEED), max_model_len=MAX_MODEL_LEN)) as engines:
            return run(engines)

    traffic = Traffic(stream_tokens=36, prompt_tokens=200, seed=SEED) if quick else Traffic(seed=SEED)
    budgets, targets = ((32, 128), (12.0,)) if quick else (BUDGETS, TARGETS_MS)
    methods = {"ngram": SpeculativeConfig(method="ngram")}
    if draft is not None:
        methods["draft_model"] = SpeculativeConfig(method="draft_model", model=draft)
    return {
        "gaps": lambda: on_engines(
            lambda e: gaps(e, traffic=traffic, budgets=budgets, targets=targets, rounds=2 * rounds - 1)
        ),
        "speculation": lambda: on_engines(
            lambda e: speculation(e, number=8, batches=(1, 8), rounds=rounds, seed=SEED, draft=draft)
        ),
        "scheduling": lambda: scheduling(num_steps=50 if quick else 400),
        "steps": lambda: on_engines(lambda e: steps(e, seed=SEED)),
        "origins": lambda: on_engines(lambda e: origins(e, methods, seed=SEED)),
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
    parser.add_argument("--draft", type=Path, default=DEFAULT_DRAFT_MODEL, help="the draft model's checkpoint")
    parser.add_argument("--quick", action="store_true", help="little of everything: to see that all of it works")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: tables and plots from the last numbers")
    parser.add_argument("--output", type=Path, help="a folder for everything that is written")
    args = parser.parse_args(argv)
    known = parts(1, quick=True, draft=None)
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
    draft: Path | None = args.draft if args.draft.is_dir() else None
    if draft is None:
        console.print(f"there is no draft model in {args.draft}: whatever needs one is left out")
    env = environment(model=Path(DEFAULT_MODEL), seed=SEED)
    env |= {"backend": choose("auto", torch.device("cpu")), "draft_model": draft and draft.name}
    results = start(path, env, args.quick)

    def save() -> None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    measure(results, args.chosen, parts(args.rounds, args.quick, draft), save, console)
    write_up(results, args.texts, args.plots)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
