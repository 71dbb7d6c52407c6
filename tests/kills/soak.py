"""Use engines at random, with faults, for an hour: `python -m tests.kills.soak`.

Each episode (`episode.py`) is a process of its own with a seed. A violation is: a token that one engine alone does not
give, an error that is no `EngineError`, a call or a request beyond its time, a process or a segment of shared memory
that is left. The same seed does the same again, as far as the machine's timing allows.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import OUTPUT, RESULTS
from benchmarks.engines import SEEING_MODEL
from benchmarks.machine import environment
from m6_multimodal_pd import DisaggregationConfig, LLMEngine
from m6_multimodal_pd.disaggregation.runtime.shared_memory import remove_abandoned
from tests.kills.episode import Episode
from tests.m6_multimodal_pd.processes import eventually, segments

NAME, SEED = "soak", 1
MARK = "STEPWISE_SOAK"
"""Environment variable that all processes of an episode inherit."""
EPISODE_LIMIT_S, EXIT_LIMIT_S = 240.0, 5.0
LEFT_OPEN: list[LLMEngine] = []
"""Engines of this process that nobody closes."""
Row = dict[str, Any]


def episode(seed: int) -> int:
    """Run one episode in this process and print its report as a line of JSON."""
    torch.set_num_threads(1)
    own = Episode(seed)
    kind = own.random.choices(["alone", "group", "by hand"], [2, 6, 2])[0]
    own.run(kind)
    if kind == "group" and own.random.random() < 0.3:
        own.actions["exit with an open group"] += 1
        LEFT_OPEN.append(LLMEngine(disaggregation_config=DisaggregationConfig()))
        LEFT_OPEN[0].add_request(*own.asked[0][:2])
    print(json.dumps(own.report(kind)), flush=True)
    return 0


def marked(mark: str) -> list[int]:
    """Return the processes that inherited this mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += [int(path.parent.name)] if f"{MARK}={mark}\0".encode() in path.read_bytes() else []
    return found


def outside(seed: int) -> Row:
    """Run an episode in a process of its own; look at how it exits and what is left."""
    mark, before, began = f"{os.getpid()}-{seed}", set(segments("")), time.monotonic()
    found = reported(seed, mark)

    def left() -> set[str]:
        return set(segments("")) - before

    eventually(lambda: not marked(mark) and not left(), 5.0)
    if pids := marked(mark):
        found["violations"].append(f"{len(pids)} processes left")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    remove_abandoned()  # as the next engine that is started by hand does
    if left():
        found["violations"].append(f"shared memory left: {sorted(left())}")
    return found | {"seconds_in_all": round(time.monotonic() - began, 1)}


def reported(seed: int, mark: str) -> Row:
    """Run an episode, and return its report; an episode that hangs, in its work or at its exit, is ended."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.kills.soak", "--episode", str(seed)]
    env, pipe = os.environ | {MARK: mark}, subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=env, stdout=pipe, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        limit = threading.Timer(EPISODE_LIMIT_S, process.send_signal, [signal.SIGABRT])  # faulthandler writes where
        limit.start()
        line = process.stdout.readline()
        limit.cancel()
        found: Row = json.loads(line) if line else {"seed": seed, "violations": ["it has not reported"]}
        try:
            process.wait(EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            found["violations"].append("hangs at its exit")
            process.send_signal(signal.SIGABRT)
            process.wait()
        errors.seek(0)
        if process.returncode != 0 or found["violations"]:
            found["violations"].append(f"status {process.returncode}: {errors.read()[-3000:]}")
    return found


def summed(episodes: Sequence[Row]) -> Row:
    """Return the sums over all episodes."""
    counts = {name: Counter[str]() for name in ("actions", "ends", "kinds")}
    longest: dict[str, float] = defaultdict(float)
    for found in episodes:
        counts["actions"].update(found.get("actions", {}))
        counts["ends"].update(found.get("ends", {}))
        counts["kinds"][found.get("kind", "?")] += 1
        for name, (_, _, most) in found.get("seconds", {}).items():
            longest[name] = round(max(longest[name], most), 2)
    violations = [{key: found[key] for key in ("seed", "violations")} for found in episodes if found["violations"]]
    sums = counts | {"longest_seconds": longest}
    return {name: dict(sorted(own.items())) for name, own in sums.items()} | {"violations": violations}


def main(argv: Sequence[str] | None = None) -> int:
    """Run episodes until the time is over. Returns 1 if there was a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.kills.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--episode", type=int, help="run the episode of this seed in this process")
    parser.add_argument("--first", type=int, default=SEED, help="seed of the first episode")
    parser.add_argument("--record", action="store_true", help="replace the results of the repository")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results")
    args = parser.parse_args(argv)
    if args.episode is not None:
        return episode(args.episode)
    console, folder = Console(stderr=True), RESULTS if args.record else args.output
    folder.mkdir(exist_ok=True, parents=True)
    env, episodes, minutes, began = environment(model=SEEING_MODEL, seed=args.first), list[Row](), 0.0, time.monotonic()
    while minutes < args.minutes:
        found = outside(args.first + len(episodes))
        minutes = (time.monotonic() - began) / 60
        episodes.append(found)
        line = f"{found['seed']}: {found.get('kind')}, {found['seconds_in_all']:.0f} s, {found['violations'] or 'ok'}"
        console.print(line, highlight=False, markup=False, style="bold red" if found["violations"] else None)
        results = {"environment": env, "minutes": round(minutes, 1), "episodes": len(episodes)} | summed(episodes)
        (folder / f"{NAME}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(found["violations"] for found in episodes))


if __name__ == "__main__":
    raise SystemExit(main())
