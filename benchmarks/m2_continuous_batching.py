"""Measures what the lesson of milestone 2 quotes: `python -m benchmarks.m2_continuous_batching`.

64 requests of different lengths, given to every side at once: `padded` and `per_request` execution, and transformers'
`generate` in static batches. Then what the two limits do, and where the padding goes. Writes into `results/`
`m2_continuous_batching.json` (every number, with machine, versions and seed) and `m2_continuous_batching.md` (the
tables that the page includes); and the plots `docs/assets/m2_*.png`. Times are medians of rounds in which the sides
take turns. Everything that is counted (steps, tokens, bytes) is the same on every machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console

from benchmarks import ASSETS, RESULTS, environment, interleaved
from benchmarks.m2_plots import draw_plots
from benchmarks.m2_tables import tables
from m1_single_request import LLMEngine as SingleRequestEngine
from m1_single_request.events import Event, StepDone
from m1_single_request.output_events import Finish
from m1_single_request.tracer import TraceRecord
from m2_continuous_batching import DEFAULT_MODEL, LLMEngine, ModelConfig, RequestOutput, SamplingParams, SchedulerConfig
from m2_continuous_batching.events import Batch, Forward, KVUsage

SEED = 1
NUM_REQUESTS = 64
PROMPT_LENS, OUTPUT_LENS = (16, 256), (16, 128)
SEQS = (1, 2, 4, 8, 16, 32, 64)
BUDGETS = (256, 512, 1024, 4096)
FIVE = ((6, 4), (4, 14), (8, 3), (5, 8), (3, 5))  # prompt and output tokens of the five requests of the picture
NUM_QUEUED = 16
Row = dict[str, Any]


class Workload:
    """The same requests for every side: random ordinary tokens, and outputs of a fixed length."""

    def __init__(self, model: Path) -> None:
        rng = Random(SEED)
        sizes = [(rng.randint(*PROMPT_LENS), rng.randint(*OUTPUT_LENS)) for _ in range(NUM_REQUESTS)]
        self.model = model
        self.prompts = [[rng.randrange(256, 4000) for _ in range(length)] for length, _ in sizes]
        self.output_lens = [length for _, length in sizes]
        self.params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in self.output_lens]
        self.num_output_tokens = sum(self.output_lens)

    def engine(self, *, execution: str = "padded", **limits: int) -> LLMEngine:
        """An engine in float32 on the CPU."""
        config = SchedulerConfig(execution=execution, **limits)  # type: ignore[arg-type]
        return LLMEngine(
            model_config=ModelConfig(model=self.model, device="cpu", dtype="float32"), scheduler_config=config
        )

    def run(self, engine: Any, count: int = NUM_REQUESTS) -> list[RequestOutput]:
        """All requests at once."""
        outputs = engine.generate_batch(self.prompts[:count], self.params[:count], progress=False)
        return list(outputs.values())


# --- the sides --------------------------------------------------------------------------------------------------------


class EngineSide:
    """Our engine on the whole workload."""

    def __init__(self, work: Workload, execution: str, max_num_seqs: int) -> None:
        self.work, self.engine = work, work.engine(execution=execution, max_num_seqs=max_num_seqs)
        self.tokens: list[tuple[int, ...]] = []
        self.latencies: list[float] = []
        self.steps = 0

    def __call__(self) -> float:
        """Seconds for all requests."""
        before, begin = self.engine.stats().num_steps, time.perf_counter()
        outputs = self.work.run(self.engine)
        seconds = time.perf_counter() - begin
        self.steps = self.engine.stats().num_steps - before
        self.tokens = [output.token_ids for output in outputs]
        self.latencies = [output.metrics.latency or 0.0 for output in outputs]
        return seconds


class StaticSide:
    """transformers' `generate` in batches of `max_num_seqs`, padded on the left, in the order of arrival.

    A batch runs until its longest answer is complete; the surplus tokens of the others are thrown away.
    """

    def __init__(self, work: Workload, model: Any, max_num_seqs: int) -> None:
        self.work, self.model, self.max_num_seqs = work, model, max_num_seqs
        self.tokens: list[tuple[int, ...]] = []
        self.latencies: list[float] = []
        self.steps = 0

    @torch.inference_mode()
    def __call__(self) -> float:
        """Seconds for all requests."""
        self.tokens, self.latencies, self.steps = [], [], 0
        begin = time.perf_counter()
        for first in range(0, NUM_REQUESTS, self.max_num_seqs):
            prompts = self.work.prompts[first : first + self.max_num_seqs]
            lengths = self.work.output_lens[first : first + self.max_num_seqs]
            longest, num_steps = max(map(len, prompts)), max(lengths)
            ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(prompts):
                ids[row, longest - len(prompt) :] = torch.tensor(prompt)
                mask[row, longest - len(prompt) :] = 1
            out = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_steps,
                min_new_tokens=num_steps,
                eos_token_id=None,
                pad_token_id=0,
            )
            for row, length in zip(out[:, longest:].tolist(), lengths, strict=True):
                self.tokens.append(tuple(row[:length]))
                self.latencies.append(time.perf_counter() - begin)
            self.steps += num_steps
        return time.perf_counter() - begin


def throughput(work: Workload, rounds: int) -> list[Row]:
    """Tokens per second of all sides, and whether they say the same."""
    reference = work.engine(execution="per_request")  # its model is transformers' own, untouched
    model = reference.engine_core.executor.worker.model_runner.model
    sides: dict[str, EngineSide | StaticSide] = {}
    for seqs in (16, 64):
        sides[f"per_request {seqs}"] = EngineSide(work, "per_request", seqs)
        sides[f"static {seqs}"] = StaticSide(work, model, seqs)
        sides[f"padded {seqs}"] = EngineSide(work, "padded", seqs)
    seconds = interleaved(sides, rounds=rounds)
    rows: list[Row] = []
    for name, side in sides.items():
        kind, seqs = name.split()
        rows.append(
            {
                "side": kind,
                "max_num_seqs": int(seqs),
                "seconds": seconds[name],
                "tokens_per_second": work.num_output_tokens / seconds[name],
                "steps": side.steps,
                "rows_used": work.num_output_tokens / (side.steps * int(seqs)),
                "mean_latency": statistics.mean(side.latencies),
                "p95_latency": quantile(side.latencies, 0.95),
                "same_answers": sum(a == b for a, b in zip(side.tokens, sides["per_request 16"].tokens, strict=True)),
            }
        )
    by_name = {f"{row['side']} {row['max_num_seqs']}": row for row in rows}
    for row in rows:
        for other in ("per_request", "static"):
            row[f"times_{other}"] = (
                row["tokens_per_second"] / by_name[f"{other} {row['max_num_seqs']}"]["tokens_per_second"]
            )
    return rows


# --- one run, looked into ---------------------------------------------------------------------------------------------


class Watch:
    """A trace reader that keeps what the tables need."""

    def __init__(self) -> None:
        self.events: dict[type[Event], list[Any]] = {cls: [] for cls in (Batch, Forward, KVUsage, StepDone, Finish)}
        self.steps_of: list[tuple[int, Batch]] = []

    def read(self, record: TraceRecord) -> None:
        """Keep an event if it is of a kind that is asked for."""
        if type(record.event) in self.events:
            self.events[type(record.event)].append(record.event)
        if isinstance(record.event, Batch):
            self.steps_of.append((record.step, record.event))

    def close(self) -> None:
        """Nothing to release."""


def watched(engine: Any, run: Callable[[], object]) -> Watch:
    """Run something with a `Watch` attached."""
    watch = Watch()
    engine.tracer.attach(watch)
    run()
    engine.tracer.detach(watch)
    return watch


def phases(work: Workload) -> dict[str, float]:
    """Median seconds of the phases of a decode step with 16 requests."""
    engine = work.engine(max_num_seqs=16)
    watch = watched(engine, lambda: work.run(engine))
    modes = zip(watch.events[Batch], watch.events[StepDone], strict=True)
    full = [step for batch, step in modes if batch.mode == "decode" and len(batch.rids) == 16]
    names = ("schedule", "execute", "sample", "update")
    return {name: statistics.median(getattr(step, f"{name}_ms") for step in full) / 1e3 for name in names}


def limits(work: Workload, rounds: int) -> dict[str, list[Row]]:
    """What `max_num_seqs` and `max_num_batched_tokens` do to throughput and waiting."""

    def measure(settings: Sequence[dict[str, int]]) -> list[Row]:
        sides = [EngineSideWithTimes(work, setting) for setting in settings]
        seconds = interleaved({str(i): side for i, side in enumerate(sides)}, rounds=rounds)
        return [
            setting
            | {
                "seconds": seconds[str(i)],
                "tokens_per_second": work.num_output_tokens / seconds[str(i)],
                "steps": side.steps,
                "mean_ttft": side.mean_ttft,
                "mean_tpot": side.mean_tpot,
                "mean_latency": side.mean_latency,
                "longest_gap": side.longest_gap(),
            }
            for i, (setting, side) in enumerate(zip(settings, sides, strict=True))
        ]

    return {
        "max_num_seqs": measure([{"max_num_seqs": seqs} for seqs in SEQS]),
        "max_num_batched_tokens": measure([{"max_num_seqs": 16, "max_num_batched_tokens": n} for n in BUDGETS]),
    }


class EngineSideWithTimes:
    """Our engine under some limits, and what its requests felt."""

    def __init__(self, work: Workload, setting: dict[str, int]) -> None:
        self.work, self.engine = work, work.engine(**setting)
        self.steps = 0
        self.mean_ttft = self.mean_tpot = self.mean_latency = 0.0

    def __call__(self) -> float:
        """Seconds for all requests."""
        before, begin = self.engine.stats().num_steps, time.perf_counter()
        metrics = [output.metrics for output in self.work.run(self.engine)]
        seconds = time.perf_counter() - begin
        self.steps = self.engine.stats().num_steps - before
        self.mean_ttft = statistics.mean(m.time_to_first_token or 0.0 for m in metrics)
        self.mean_tpot = statistics.mean(m.time_per_output_token or 0.0 for m in metrics)
        self.mean_latency = statistics.mean(m.latency or 0.0 for m in metrics)
        return seconds

    def longest_gap(self) -> float:
        """The longest step in which somebody decodes beside a prefill: so long does a running answer stand still."""
        watch = watched(self.engine, lambda: self.work.run(self.engine))
        steps = zip(watch.events[Batch], watch.events[StepDone], strict=True)
        return max((step.total_ms for batch, step in steps if batch.mode == "mixed"), default=0.0) / 1e3


def padding(work: Workload) -> list[Row]:
    """Where the padding goes: counted, not timed."""
    rows: list[Row] = []
    for seqs in (4, 16, 64):
        engine = work.engine(max_num_seqs=seqs)
        watch = watched(engine, lambda engine=engine: work.run(engine))
        forwards: list[Forward] = watch.events[Forward]
        memory: list[KVUsage] = watch.events[KVUsage]
        row: Row = {"max_num_seqs": seqs, "steps": len(memory)}
        for mode in ("prefill", "decode"):
            own = [forward for forward in forwards if forward.mode == mode]
            row[mode] = {
                "forwards": len(own),
                "useful": sum(f.useful_tokens for f in own),
                "padded": sum(f.padded_tokens for f in own),
                "kv_read": sum(f.kv_read for f in own),
                "kv_needed": sum(f.kv_needed for f in own),
            }
        row["kv_reserved"] = memory[0].kv_bytes_reserved
        row["kv_peak"] = max(m.kv_bytes_used for m in memory)
        row["kv_mean"] = statistics.mean(m.kv_bytes_used for m in memory)
        if seqs == 16:
            row["per_step"] = [
                {"useful": m.useful_tokens, "padded": m.padded_tokens, "kv_used": m.kv_bytes_used} for m in memory
            ]
        rows.append(row)
    return rows


def walls(work: Workload) -> list[Row]:
    """When each of several requests that come together sees its first token: in m1 and here."""
    model_config = ModelConfig(model=work.model, device="cpu", dtype="float32")
    rows: list[Row] = [{"request": number} for number in range(1, NUM_QUEUED + 1)]
    engines = {"m1": SingleRequestEngine(model_config=model_config), "m2": work.engine()}
    for name, engine in engines.items():
        work.run(engine, 2)  # warm
        for row, output in zip(rows, work.run(engine, NUM_QUEUED), strict=True):
            row[f"{name}_ttft"] = output.metrics.time_to_first_token
            row[f"{name}_latency"] = output.metrics.latency
    return rows


def timeline(work: Workload) -> dict[str, Any]:
    """Five requests in three places, static and continuous: what each request does in each step."""
    lanes: dict[str, Any] = {}
    prompts = [work.prompts[i][:1] * length for i, (length, _) in enumerate(FIVE)]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for _, length in FIVE]
    for kind, groups in {"static": (slice(3), slice(3, 5)), "continuous": (slice(5),)}.items():
        engine = work.engine(max_num_seqs=3)

        def run(engine: LLMEngine = engine, groups: Sequence[slice] = groups) -> None:
            for group in groups:
                engine.generate_batch(prompts[group], params[group], progress=False)

        watch = watched(engine, run)
        cells: list[list[str]] = [[] for _ in FIVE]
        for step, batch in watch.steps_of:
            for rid, prefix in zip(batch.rids, batch.prefix_lens, strict=True):
                lane = cells[int(rid.removeprefix("req-"))]
                lane += ["wait"] * (step - 1 - len(lane)) + ["decode" if prefix else "prefill"]
        steps = watch.steps_of[-1][0]
        lanes[kind] = {"steps": steps, "cells": cells, "rows_used": sum(length for _, length in FIVE) / (3 * steps)}
    return lanes


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -int(-share * len(ranked) // 1) - 1))]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.m2_continuous_batching", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a model directory")
    parser.add_argument("--rounds", type=int, default=5, help="measurements per number, of which the median counts")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    work = Workload(args.model)
    results: dict[str, Any] = {
        "environment": environment(model=args.model, seed=SEED),
        "num_requests": NUM_REQUESTS,
        "num_output_tokens": work.num_output_tokens,
    }
    parts: dict[str, Callable[[], Any]] = {
        "throughput": lambda: throughput(work, args.rounds),
        "phases": lambda: phases(work),
        "limits": lambda: limits(work, min(args.rounds, 3)),
        "padding": lambda: padding(work),
        "walls": lambda: walls(work),
        "timeline": lambda: timeline(work),
    }
    progress = Console(stderr=True)
    for name, part in parts.items():
        progress.print(f"{time.strftime('%H:%M:%S')} {name}")
        results[name] = part()
    for folder in (RESULTS, ASSETS):
        folder.mkdir(exist_ok=True)
    text = tables(results)
    (RESULTS / "m2_continuous_batching.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "m2_continuous_batching.md").write_text(text, encoding="utf-8")
    draw_plots(results)
    Console().print(text, markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
