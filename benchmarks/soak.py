"""Use engines at random, with faults, for an hour: `python -m benchmarks soak`.

Each episode (`episode.py`) is a process of its own with a seed. A violation is: a token that one engine alone does not
give, an error that is no `EngineError`, a call or a request beyond its time, a process or a segment of shared memory
that is left. The same seed does the same again, as far as the machine's timing allows.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
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
from benchmarks.episode import Episode
from benchmarks.machine import environment
from benchmarks.processes import processes, segments
from m6_multimodal_pd import DisaggregationConfig, LLMEngine
from m6_multimodal_pd.disaggregation.runtime.shared_memory import remove_abandoned

NAME = "soak"
SEED = 1
MARK = "STEPWISE_SOAK"
"""Environment variable that all processes of an episode inherit."""
EPISODE_LIMIT_S = 240.0
EXIT_LIMIT_S = 5.0


def marked(mark: str) -> list[int]:
    """Return the processes that inherited this mark."""
    return processes(lambda folder: f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes())


def episode(seed: int) -> int:
    """Run one episode in this process and print its report as a line of JSON."""
    torch.set_num_threads(1)
    own = Episode(seed)
    kind = own.random.choices(["alone", "group", "by hand"], [2, 6, 2])[0]
    own.run(kind)
    if kind == "group" and own.random.random() < 0.3:  # exit with an open group
        own.actions["exit with an open group"] += 1
        own.left_open = LLMEngine(disaggregation_config=DisaggregationConfig())  # type: ignore[attr-defined]
        own.left_open.add_request(*own.asked[0][:2])  # type: ignore[attr-defined]
    print(json.dumps(own.report(kind)), flush=True)
    return 0


def outside(seed: int) -> dict[str, Any]:
    """Run an episode in a process of its own; look at how it exits and what is left."""
    mark, before = f"{os.getpid()}-{seed}", segments()
    command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks", "soak", "--episode", str(seed)]
    found: dict[str, Any] = {"seed": seed, "violations": []}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, errors = Path(folder) / "out", Path(folder) / "err"
        with report.open("wb") as out, errors.open("wb") as err:
            process = subprocess.Popen(command, env=os.environ | {MARK: mark}, stdout=out, stderr=err)
        hangs = None
        reported_at = math.inf
        while process.poll() is None:
            time.sleep(0.1)
            now = time.monotonic()
            if reported_at == math.inf and report.read_bytes().endswith(b"\n"):
                reported_at = now
            if hangs is None and (now - began > EPISODE_LIMIT_S or now - reported_at > EXIT_LIMIT_S):
                hangs = "in its episode" if reported_at == math.inf else "at its exit"
                process.send_signal(signal.SIGABRT)  # faulthandler writes where it hangs
        if lines := report.read_text().splitlines():
            found = json.loads(lines[-1])
        found["violations"] += [f"hangs {hangs}"] if hangs else []
        if process.returncode != 0 or found["violations"]:
            found["violations"].append(f"status {process.returncode}: {errors.read_text()[-3000:]}")
    deadline = time.monotonic() + 5
    while (marked(mark) or segments() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left := marked(mark):
        found["violations"].append(f"{len(left)} processes left")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    remove_abandoned()  # as the next engine that is started by hand does
    if names := segments() - before:
        found["violations"].append(f"shared memory left: {sorted(names)}")
    return found | {"seconds_in_all": round(time.monotonic() - began, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run episodes until the time is over. Returns 1 if there was a violation."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--episode", type=int, help="run the episode of this seed in this process")
    parser.add_argument("--first", type=int, default=SEED, help="seed of the first episode")
    parser.add_argument("--record", action="store_true", help="replace the results of the repository")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of results")
    args = parser.parse_args(argv)
    if args.episode is not None:
        return episode(args.episode)
    console = Console(stderr=True)
    folder = RESULTS if args.record else args.output
    folder.mkdir(exist_ok=True, parents=True)
    results: dict[str, Any] = {"environment": environment(model=SEEING_MODEL, seed=args.first)}
    total: dict[str, Counter[str]] = {"actions": Counter(), "ends": Counter(), "kinds": Counter()}
    longest: dict[str, float] = defaultdict(float)
    violations: list[dict[str, Any]] = []
    began = time.monotonic()
    seed = args.first
    while time.monotonic() - began < 60 * args.minutes:
        found = outside(seed)
        for name in ("actions", "ends"):
            total[name].update(found.get(name, {}))
        total["kinds"][found.get("kind", "?")] += 1
        for name, (_, _, most) in found.get("seconds", {}).items():
            longest[name] = round(max(longest[name], most), 2)
        violations += [{"seed": seed, "violations": found["violations"]}] if found["violations"] else []
        line = f"{seed}: {found.get('kind')}, {found['seconds_in_all']:.0f} s, {found['violations'] or 'ok'}"
        console.print(line, highlight=False, markup=False, style="bold red" if found["violations"] else None)
        results |= {"minutes": round((time.monotonic() - began) / 60, 1), "episodes": seed - args.first + 1}
        results |= {name: dict(sorted(counter.items())) for name, counter in total.items()}
        results |= {"longest_seconds": dict(sorted(longest.items())), "violations": violations}
        (folder / f"{NAME}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        seed += 1
    return int(bool(violations))
