"""The command of a lesson: measures its parts, keeps their numbers in one file, writes its tables and plots.

The module of a command has a `LESSON`. Beside it are the template of its tables and, in a package, `plots.py` with
`PLOTS`, `trace.py` with `traced_steps` and `pictures.py` with `draw_pictures`. Results go to a folder of the caller;
`--record` replaces those of the repository, which the pages include.
"""

import argparse
import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import ASSETS, OUTPUT, RESULTS, BenchmarkError, Row as Row, check_positive
from benchmarks.engines import TEXT_MODEL
from benchmarks.machine import LoadMeter, environment
from benchmarks.report import sections

SEED = 1
TRACE = "trace"
"""The part that writes the traced example of the page and its pictures; it has no numbers."""
Parts = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class Size:
    """Size of a measurement: the number of rounds, and whether it only has to show that everything works."""

    rounds: int
    quick: bool

    @property
    def few(self) -> int:
        """Rounds of a measurement that takes minutes."""
        return min(self.rounds, 3)


@dataclass(frozen=True)
class Lesson:
    """Everything that one lesson measures."""

    name: str
    """Name of its files in `results/`."""
    parts: Callable[[Size], Parts]
    """Everything that is measured, by name, in this order."""
    environment: Callable[[bool], dict[str, Any]] = lambda quick: {}
    """Further entries of the environment."""
    model: Path = TEXT_MODEL
    rounds: int = 5
    threads: int = 2
    is_fine: Callable[[Mapping[str, Any]], bool] = lambda parts: True
    """Whether the numbers are acceptable; else the exit status is 1."""


def backend(quick: bool = False) -> dict[str, Any]:
    """Return the attention backend of the CPU, for an environment."""
    from m3_paged_attention.attention.registry import choose

    return {"backend": choose("auto", torch.device("cpu"))}


def drawn(draw: Callable[[], object], console: Console) -> None:
    """Call something that draws; without matplotlib, print that nothing was drawn."""
    try:
        draw()
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        console.print("matplotlib is not installed: nothing was drawn")


class Command:
    """The command of one lesson, and the modules beside its own."""

    def __init__(self, command: str, module: Any, argv: Sequence[str] | None) -> None:
        """`command`: the name in its help, such as `python -m benchmarks m1`."""
        self.module, self.lesson = module, module.LESSON
        self.args = args = self._parser(command).parse_args(argv)
        check_positive(vars(args), "rounds", "threads")
        if args.record and args.quick:
            raise BenchmarkError("--quick gives no results, so that --record cannot keep them")
        folder = args.output / "quick" if args.quick else args.output
        self.texts, self.pictures = (RESULTS, ASSETS) if args.record else (folder, folder)
        self.path = self.texts / f"{self.lesson.name}.json"
        self.console = Console(stderr=True)

    def _parser(self, command: str) -> argparse.ArgumentParser:
        lesson, summary = self.lesson, self.module.__doc__.splitlines()[0]
        names = ", ".join([*lesson.parts(Size(1, True)), *([TRACE] if self._beside(TRACE) else [])])
        parser = argparse.ArgumentParser(prog=command, description=f"{summary} Parts: {names}.")
        parser.add_argument("--only", default="", help="parts, with commas between them; others keep their numbers")
        parser.add_argument("--missing", action="store_true", help="only parts that have no numbers yet")
        parser.add_argument("--rounds", type=int, default=lesson.rounds, help="measurements per number")
        parser.add_argument("--threads", type=int, default=lesson.threads, help="CPU threads")
        parser.add_argument("--quick", action="store_true", help="little of everything: its numbers are no results")
        parser.add_argument("--redraw", action="store_true", help="measure nothing: tables and plots of stored numbers")
        parser.add_argument("--record", action="store_true", help="replace the results of the repository")
        parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results; ./benchmark-results")
        return parser

    def _beside(self, name: str) -> Any:
        """Return a module of the lesson's package, or None."""
        full = f"{self.module.__name__}.{name}"
        exists = hasattr(self.module, "__path__") and importlib.util.find_spec(full)
        return importlib.import_module(full) if exists else None

    def run(self) -> int:
        """Measure, write and print; returns the exit status."""
        args, todo = self.args, dict(self.lesson.parts(Size(self.args.rounds, self.args.quick)))
        named = [args.only] if args.only in todo else args.only.split(",")  # a name may have a comma
        known = [*todo, *([TRACE] if self._beside(TRACE) else [])]
        chosen = named if args.only else known
        if unknown := [name for name in chosen if name not in known]:
            raise BenchmarkError(f"unknown parts {', '.join(unknown)}; there are {', '.join(known)}")
        torch.set_num_threads(args.threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.texts.mkdir(exist_ok=True, parents=True)
        if args.redraw:
            stored = self.path if self.path.exists() else RESULTS / self.path.name
            results = json.loads(stored.read_text(encoding="utf-8"))
        else:
            if TRACE in chosen:
                self._trace()
                chosen.remove(TRACE)
            results = self._measured({name: todo[name] for name in chosen})
        if results["parts"]:
            self._write_up(results)
        self.console.print(f"written to {self.texts}", highlight=False)
        return int(not self.lesson.is_fine(results["parts"]))

    def _trace(self) -> None:
        """Write the traced example, and draw its pictures."""
        path = self.texts / f"{self.lesson.name}_trace.txt"
        path.write_text(self._beside(TRACE).traced_steps(), encoding="utf-8")
        drawn(self._pictures, self.console)

    def _pictures(self) -> None:
        """Draw the pictures of the traced example."""
        if beside := self._beside("pictures"):
            beside.draw_pictures(self.pictures)

    def _measured(self, todo: Parts) -> dict[str, Any]:
        """Measure parts, and return all results; they are written after each part."""
        results = self._earlier()
        for name, part in todo.items():
            if self.args.missing and name in results["parts"]:
                continue
            self.console.print(f"{time.strftime('%H:%M:%S')} {name}", highlight=False)
            with LoadMeter() as meter:
                results["parts"][name] = part()
            load = results["load"][name] = meter.report()
            results["disturbed"] = any(own["disturbed"] for own in results["load"].values())
            self.path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            mark = ", DISTURBED by other processes" if load["disturbed"] else ""
            self.console.print(f"         {load['seconds']:.0f} s{mark}", highlight=False)
        return results

    def _earlier(self) -> dict[str, Any]:
        """Return the results of an earlier run with the same machine, versions and seed, or empty ones.

        Raises `BenchmarkError` where `--record` of some parts would drop all others.
        """
        quick = self.args.quick
        env = environment(model=self.lesson.model, seed=SEED) | self.lesson.environment(quick)
        with suppress(FileNotFoundError):
            earlier: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            if (earlier["environment"], earlier["quick"]) == (env, quick):
                return earlier
            if self.args.record and (self.args.only or self.args.missing):
                raise BenchmarkError(
                    f"{self.path.name} has numbers of another machine or of other versions: record all parts, not some"
                )
        return {"environment": env, "quick": quick, "disturbed": False, "load": {}, "parts": {}}

    def _write_up(self, results: dict[str, Any]) -> None:
        """Write tables and plots of the parts that were measured, and print the tables."""
        own = Path(self.module.__file__)
        template = own.with_name("tables.md.jinja") if own.stem == "__init__" else own.with_suffix(".md.jinja")
        text = sections(template, results)
        (self.texts / f"{self.lesson.name}.md").write_text(text, encoding="utf-8")
        drawn(lambda: self._plots(results["parts"]), self.console)
        Console().print(text, markup=False, highlight=False, soft_wrap=True)

    def _plots(self, parts: Mapping[str, Any]) -> None:
        """Draw the plots whose parts were measured."""
        if beside := self._beside("plots"):
            from benchmarks.plots import save

            for name, (needed, draw) in beside.PLOTS.items():
                if all(part in parts for part in needed.split()):
                    save(draw(*[parts[part] for part in needed.split()]), self.pictures / f"{name}.svg")
