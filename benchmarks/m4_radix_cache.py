"""Measures what the lesson of milestone 4 quotes: `python -m benchmarks.m4_radix_cache`.

What a cache saves an engine (`m4_reuse`, two models), what it costs (`m4_control_plane`, `m4_scheduling`), what should
stay in it, and how tree and hashes compare (`m4_eviction`), and what prefill-or-decode does to a stream (`m4_gaps`).
Writes `results/m4_radix_cache.json` after every part, then `results/m4_radix_cache.md` (the tables that the page
includes) and the plots `docs/assets/m4_*.png`; `benchmarks.m4_trace` writes the trace and the pictures. Times are
medians of rounds in which the sides take turns. A part during which other processes took more than a tenth of a core is
marked `disturbed`.

    python -m benchmarks.m4_radix_cache                        all of it
    python -m benchmarks.m4_radix_cache --only control_plane   one part again; the others stay as they were
    python -m benchmarks.m4_radix_cache --quick                a small version of everything; its numbers are no results
    python -m benchmarks.m4_radix_cache --redraw               tables and plots again, from the numbers that are there
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
from benchmarks.m3_models import MAX_MODEL_LEN, SHAPE_0_6B, embedded_model, random_model
from benchmarks.m3_paged_attention import QUICK_LAYERS, measure, start
from benchmarks.m3_tables import promises
from benchmarks.m4_control_plane import control_plane
from benchmarks.m4_eviction import designs, eviction
from benchmarks.m4_gaps import gaps
from benchmarks.m4_models import Engines
from benchmarks.m4_plots import draw_plots
from benchmarks.m4_reuse import SharedPrefix, reuse
from benchmarks.m4_scheduling import scheduling
from benchmarks.m4_tables import PROMISES, tables
from m3_paged_attention.attention.registry import choose
from m4_radix_cache import DEFAULT_MODEL

SEED = 1
NAME = "m4_radix_cache"
LONG_MODEL_LEN = 4096
GAP_KV_BYTES = 2**28
CAPACITY = 2**17  # of the comparison of designs, tokens
Parts = dict[str, Callable[[], Any]]


def parts(rounds: int, quick: bool) -> Parts:
    """Everything that is measured, by name, in this order. Each part builds what it needs, and lets go of it."""
    few = min(rounds, 3)  # of what takes minutes
    work = SharedPrefix.made(4 if quick else 32, prefix=64 if quick else 512, own=32, outputs=32, seed=SEED)

    def reuse_random() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            model = random_model(SEED, Path(folder), **(QUICK_LAYERS if quick else {}))
            with closing(Engines(model, max_model_len=MAX_MODEL_LEN)) as engines:
                return reuse(engines, work, rounds=min(rounds, 2))

    def reuse_embedded() -> Any:
        with closing(Engines(embedded_model(SEED), max_model_len=MAX_MODEL_LEN, kv_bytes=2**28)) as engines:
            return reuse(engines, work, rounds=rounds)

    def decode_gaps() -> Any:
        lengths, counts = ([64, 128, 256], [1, 4]) if quick else ([128, 256, 512, 1024, 2048], [1, 2, 4, 8, 16, 32])
        model, size = embedded_model(SEED), 120 if quick else 300
        with closing(Engines(model, max_model_len=LONG_MODEL_LEN, kv_bytes=GAP_KV_BYTES)) as engines:
            return gaps(engines, num_tokens=size, lengths=lengths, counts=counts, rounds=few, seed=SEED)

    requests = 100 if quick else None
    return {
        "reuse_0_6b": reuse_random,
        "reuse_embedded": reuse_embedded,
        "control_plane": lambda: control_plane(num_sequences=200 if quick else 2000, rounds=3 * rounds, seed=SEED),
        "scheduling": lambda: scheduling(num_steps=50 if quick else 400),
        "eviction": lambda: eviction(num_requests=requests),
        "designs": lambda: designs(capacity=CAPACITY, rounds=few, num_requests=requests),
        "decode_gaps": decode_gaps,
    }


def write_up(results: dict[str, Any], texts: Path, plots: Path) -> None:
    """The tables and plots of these results, and the tables once more on the screen."""
    text = tables(results)
    (texts / f"{NAME}.md").write_text(text, encoding="utf-8")
    draw_plots(results["parts"], plots)
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    Console().print(promises(results["parts"], PROMISES), markup=False, highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, and print the tables."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements per number, of which the median counts")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--only", default="", help="parts to measure, with commas between them; the others are kept")
    parser.add_argument("--quick", action="store_true", help="small models, few tokens: to see that all of it works")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: tables and plots from the last numbers")
    parser.add_argument("--output", type=Path, help="a folder for everything that is written")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if args.quick and args.output is None:
        args.output = Path(tempfile.gettempdir()) / NAME
    texts, plots = (args.output, args.output) if args.output else (RESULTS, ASSETS)
    for folder in (texts, plots):
        folder.mkdir(exist_ok=True, parents=True)
    path, console = texts / f"{NAME}.json", Console(stderr=True)
    if args.redraw:
        if not path.exists():
            parser.error(f"there is no {path} to draw from")
        write_up(json.loads(path.read_text(encoding="utf-8")), texts, plots)
        return 0
    shape = SHAPE_0_6B | (QUICK_LAYERS if args.quick else {})
    env = environment(model=Path(DEFAULT_MODEL), seed=SEED)
    env |= {"random_model": shape, "backend": choose("auto", torch.device("cpu"))}
    results, todo = start(path, env, args.quick), parts(args.rounds, args.quick)
    chosen = args.only.split(",") if args.only else list(todo)
    if unknown := [name for name in chosen if name not in todo]:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(todo)}")

    def save() -> None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    measure(results, chosen, todo, save, console)
    if missing := [name for name in todo if name not in results["parts"]]:
        draw_plots(results["parts"], plots)
        console.print(f"no tables yet, and not all plots: {', '.join(missing)} not measured")
        return 0
    write_up(results, texts, plots)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
