"""Measures what the lesson of milestone 3 quotes: `python -m benchmarks.m3_paged_attention`.

Two models (`m3_models`), and three questions: how fast against transformers (`m3_speed`), what becomes of the memory
(`m3_memory`), and what the machine would allow (`m3_roofline`); besides, what the scheduler alone costs
(`m3_scheduling`). Writes `results/m3_paged_attention.json` after every part, then `results/m3_paged_attention.md` (the
tables that the page includes) and the plots `docs/assets/m3_*.png`. Times are medians of rounds in which the sides take
turns. A part during which other processes took more than a tenth of a core is marked `disturbed`.

    python -m benchmarks.m3_paged_attention                    all of it, about 15 minutes on two quiet cores
    python -m benchmarks.m3_paged_attention --only roofline    one part again; the others stay as they were
    python -m benchmarks.m3_paged_attention --quick            a small version of everything; its numbers are no results
    python -m benchmarks.m3_paged_attention --redraw           tables and plots again, from the numbers that are there
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import ASSETS, RESULTS, environment
from benchmarks.m3_machine import LoadMeter
from benchmarks.m3_memory import fragmentation, parallel_sampling, preemption
from benchmarks.m3_models import SHAPE_0_6B, TestedModel, embedded_model, random_model
from benchmarks.m3_plots import draw_plots
from benchmarks.m3_roofline import roofline
from benchmarks.m3_scheduling import scheduling
from benchmarks.m3_speed import ragged_embedded, ragged_random, single_stream, single_text
from benchmarks.m3_tables import PROMISES, promises, tables
from benchmarks.m3_workload import Ragged
from m3_paged_attention import DEFAULT_MODEL
from m3_paged_attention.attention.registry import choose

SEED = 1
NAME = "m3_paged_attention"
QUICK_LAYERS = {"num_hidden_layers": 4, "vocab_size": 16384}
Parts = dict[str, Callable[[], Any]]


def parts(random: TestedModel, embedded: TestedModel, rounds: int, quick: bool) -> Parts:
    """Everything that is measured, by name, in this order. The random model comes first and is dropped then."""
    lens: dict[str, Any] = {"prompts": (32, 512), "outputs": (16, 256), "seed": SEED}
    if quick:
        lens |= {"prompts": (32, 64), "outputs": (4, 16)}
    batch, burst = Ragged.drawn(16, **lens), Ragged.drawn(64, **lens)
    growing = Ragged.drawn(
        64, prompts=(8, 16) if quick else (16, 64), outputs=(48, 96) if quick else (128, 256), seed=SEED
    )
    few = min(rounds, 3)  # of what takes minutes
    length = 16 if quick else 64
    return {
        "single_0_6b": lambda: single_stream(
            random, prompt_len=2 * length, num_tokens=length, rounds=rounds, seed=SEED
        ),
        "ragged_0_6b": lambda: ragged_random(random, batch, rounds=few),
        "roofline_0_6b": lambda: roofline(random, context=length, num_decodes=8, seed=SEED),
        "single_embedded": lambda: single_text(embedded, num_tokens=2 * length, rounds=2 * rounds),
        "ragged_embedded": lambda: ragged_embedded(embedded, burst, rounds=rounds),
        "roofline_embedded": lambda: roofline(embedded, context=2 * length, num_decodes=32, seed=SEED),
        "scheduling": lambda: scheduling(num_steps=50 if quick else 400),
        "fragmentation_16": lambda: fragmentation(embedded, batch, max_num_seqs=16),
        "fragmentation_64": lambda: fragmentation(embedded, burst, max_num_seqs=64),
        "preemption": lambda: preemption(embedded, growing, max_num_seqs=64, rounds=few),
        "parallel_sampling": lambda: parallel_sampling(
            embedded, prompt_len=8 * length, num_tokens=length, rounds=rounds, seed=SEED
        ),
    }


def measure(
    results: dict[str, Any], chosen: Sequence[str], todo: Parts, save: Callable[[], None], console: Console
) -> None:
    """Run the chosen parts; each is saved as soon as it is there."""
    for name in chosen:
        console.print(f"{time.strftime('%H:%M:%S')} {name}")
        with LoadMeter() as meter:
            found = todo[name]()
        load = results["load"][name] = meter.report()
        results["parts"][name] = found
        results["disturbed"] = any(load["disturbed"] for load in results["load"].values())
        save()
        others = "unknown" if load["other_cores"] is None else f"{load['other_cores']:.2f} cores"
        mark = ", DISTURBED" if load["disturbed"] else ""
        console.print(f"         {load['seconds']:.0f} s, taken by others: {others}{mark}")


def start(path: Path, env: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Results to fill. Those of an earlier run stay if it was the same machine, versions and seed."""
    fresh: dict[str, Any] = {"environment": env, "quick": quick, "disturbed": False, "load": {}, "parts": {}}
    if not path.exists():
        return fresh
    earlier = json.loads(path.read_text(encoding="utf-8"))
    return earlier if (earlier["environment"], earlier["quick"]) == (env, quick) else fresh


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
    results = start(path, env, args.quick)

    def save() -> None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        random, embedded = random_model(SEED, Path(folder), **shape), embedded_model(SEED)
        todo = parts(random, embedded, args.rounds, args.quick)
        chosen = args.only.split(",") if args.only else list(todo)
        if unknown := [name for name in chosen if name not in todo]:
            parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(todo)}")
        of_random = [name for name in chosen if name.endswith("0_6b")]
        measure(results, of_random, todo, save, console)
        random.close()
        measure(results, [name for name in chosen if name not in of_random], todo, save, console)
        embedded.close()
    if missing := [name for name in todo if name not in results["parts"]]:
        console.print(f"no tables and plots yet: {', '.join(missing)} not measured")
        return 0
    write_up(results, texts, plots)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
