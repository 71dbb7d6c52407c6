"""Measures what the lesson of milestone 1 quotes: `python -m benchmarks.m1_single_request`.

Writes into `results/`: `m1_single_request.json` (every number, with machine, versions and seed), `m1_single_request.md`
(the tables that the page includes) and `m1_single_request_trace.txt` (the trace that the page explains); and the plots
`docs/assets/m1_*.png`. Numbers are medians; where two sides are compared, they take turns.
"""

import argparse
import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import DynamicCache

from benchmarks import ASSETS, RESULTS, describe, environment, interleaved, markdown_table
from m1_single_request import DEFAULT_MODEL, ConsoleReader, LLMEngine, SamplingParams
from m1_single_request.demo_tour import measure_machine
from m1_single_request.events import Event, StepDone, size
from m1_single_request.model_loader import head_dim
from m1_single_request.tracer import TraceRecord

SEED = 1
LENGTHS = (16, 64, 256, 512, 1024, 2048)
NUM_QUEUED = 8
TRACED_QUESTION = "What is a KV cache?"
Row = dict[str, float]


class Bench:
    """An engine, its bare model, and prompts that are the same on every run."""

    def __init__(self, engine: LLMEngine, rounds: int) -> None:
        self.engine = engine
        self.rounds = rounds
        self.runner = engine.engine_core.model_runner
        self.model = self.runner.model
        self.rng = Random(SEED)

    def prompt(self, length: int) -> list[int]:
        """Random ordinary tokens: what they say does not matter to the time they take."""
        return [self.rng.randrange(256, 4000) for _ in range(length)]

    def alone(self, call: Callable[[], float]) -> float:
        """Median seconds of a call that has no other side."""
        return interleaved({"only": call}, rounds=self.rounds)["only"]

    # --- the wall: recomputing against remembering --------------------------------------------------------------------

    @torch.inference_mode()
    def token_at(self, length: int) -> Row:
        """The time of one token when `length` tokens are there: all read again, or only the newest."""
        ids = torch.tensor([self.prompt(length)])
        cache = DynamicCache(config=self.model.config)
        self.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        cache.crop(-1)

        def recompute() -> float:
            begin = time.perf_counter()
            self.model(input_ids=ids, use_cache=False, logits_to_keep=1)
            return time.perf_counter() - begin

        def remember() -> float:
            begin = time.perf_counter()
            self.model(input_ids=ids[:, -1:], cache=cache, use_cache=True, logits_to_keep=1)
            seconds = time.perf_counter() - begin
            cache.crop(-1)
            return seconds

        return {"tokens": length} | interleaved({"recompute": recompute, "cache": remember}, rounds=self.rounds)

    @torch.inference_mode()
    def answer(self, prompt_len: int, output_len: int) -> Row:
        """The time of a whole answer: the loop without a cache against the engine."""
        prompt = self.prompt(prompt_len)
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        made: dict[str, list[int]] = {}

        def recompute() -> float:
            begin, ids = time.perf_counter(), list(prompt)
            for _ in range(output_len):
                logits = self.model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits
                ids.append(int(logits[0, -1].argmax()))
            made["recompute"] = ids[prompt_len:]
            return time.perf_counter() - begin

        def remember() -> float:
            begin = time.perf_counter()
            made["cache"] = list(self.engine.generate(prompt, params).token_ids)
            return time.perf_counter() - begin

        row: Row = {"prompt": prompt_len, "output": output_len}
        row |= interleaved({"recompute": recompute, "cache": remember}, rounds=min(self.rounds, 3))
        return row | {"same_tokens": float(made["recompute"] == made["cache"])}

    # --- one request --------------------------------------------------------------------------------------------------

    def first_token(self, length: int) -> Row:
        """Time to first token of a prompt of `length` tokens."""
        prompt, params = self.prompt(length), SamplingParams(max_tokens=1)
        ttft = self.alone(lambda: self.engine.generate(prompt, params).metrics.time_to_first_token or 0.0)
        return {"tokens": length, "ttft": ttft}

    def next_token(self, context: int) -> Row:
        """Time per output token with `context` tokens in the cache, and the bytes of that cache."""
        prompt, params = self.prompt(context), SamplingParams(max_tokens=17, ignore_eos=True)
        held: list[int] = []

        def measure() -> float:
            with self.engine.stream(prompt, params) as outputs:
                next(outputs)
                held.append(self._cache_bytes())
                for output in outputs:
                    last = output
            return last.metrics.time_per_output_token or 0.0

        tpot = self.alone(measure)
        formula = context * self.runner.kv_bytes_per_token
        return {"tokens": context, "tpot": tpot, "kv_formula": formula, "kv_measured": held[-1]}

    def _cache_bytes(self) -> int:
        (cache,) = self.runner.request_caches.values()
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    def step_phases(self, context: int) -> Row:
        """Where the time of a decode step goes: medians in seconds per phase, from the trace."""
        reader = Steps()
        self.engine.tracer.attach(reader)
        self.engine.generate(self.prompt(context), SamplingParams(max_tokens=33, ignore_eos=True))
        self.engine.tracer.detach(reader)
        decodes = reader.steps[1:]
        phases = ("schedule", "execute", "sample", "update")
        return {p: sorted(getattr(s, f"{p}_ms") for s in decodes)[len(decodes) // 2] / 1e3 for p in phases}

    # --- many requests ------------------------------------------------------------------------------------------------

    def queue(self) -> list[Row]:
        """Requests that arrive together and are served one after another: when does each see its first token?"""
        prompts = [self.prompt(64) for _ in range(NUM_QUEUED)]
        params = SamplingParams(max_tokens=32, ignore_eos=True)
        outputs = list(self.engine.generate_batch(prompts, params).values())
        rows, before = [], 0.0
        for number, output in enumerate(outputs, start=1):
            metrics = output.metrics
            ttft, latency = metrics.time_to_first_token or 0.0, metrics.latency or 0.0
            own = latency - (rows[-1]["latency"] if rows else 0.0)
            rows.append({"request": number, "ttft": ttft, "waited": before, "latency": latency, "own": own})
            before = latency
        return rows


class Steps:
    """A trace reader that keeps the ends of the steps."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []

    def read(self, record: TraceRecord) -> None:
        """Keep what matters."""
        if isinstance(record.event, StepDone):
            self.steps.append(record.event)

    def close(self) -> None:
        """Nothing to release."""


# --- the roofline -----------------------------------------------------------------------------------------------------


def forward_cost(model: Any, new: int, context: int) -> tuple[float, float]:
    """Operations and bytes of one forward: `new` tokens go in, `context` tokens are in the cache already.

    Counted: every weight, read once and used once per new token (the logits only for the last one), attention, and the
    KV that is read and written. Activations are left out: they stay in the processor's caches.
    """
    config = model.config
    head = config.vocab_size * config.hidden_size  # tied: the embedding is read as the output matrix
    body = sum(p.numel() for p in model.parameters()) - head
    seen = new * context + new * (new + 1) / 2  # query-key pairs
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim(config) * seen
    itemsize = next(model.parameters()).itemsize
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * (context + new)
    return 2 * body * new + 2 * head + attention, (body + head + kv) * itemsize


def roofline(bench: Bench, prefills: Sequence[Row], decodes: Sequence[Row]) -> dict[str, Any]:
    """What the machine can do, and what prefill and decode make of it."""
    flops, bandwidth = measure_machine(next(bench.model.parameters()))
    points = []
    for kind, rows, key in (("prefill", prefills, "ttft"), ("decode", decodes, "tpot")):
        for row in rows:
            tokens = int(row["tokens"])
            new, context = (tokens, 0) if kind == "prefill" else (1, tokens)
            work, moved = forward_cost(bench.model, new, context)
            points.append(
                {
                    "kind": kind,
                    "tokens": tokens,
                    "flop": work,
                    "bytes": moved,
                    "intensity": work / moved,
                    "bound": max(work / flops, moved / bandwidth),
                    "seconds": row[key],
                }
            )
    return {"flops": flops, "bandwidth": bandwidth, "ridge": flops / bandwidth, "points": points}


# --- what is written --------------------------------------------------------------------------------------------------


def traced_steps(engine: LLMEngine) -> str:
    """The verbose trace of a short answer, without the times: what the page explains line by line."""
    text = io.StringIO()
    reader = ConsoleReader(console=Console(file=text, width=96, highlight=False))

    class WithoutTimes:
        def read(self, record: TraceRecord) -> None:
            event: Event = record.event
            if not isinstance(event, StepDone):
                reader.read(record)

        def close(self) -> None:
            reader.close()

    fresh = WithoutTimes()
    engine.tracer.attach(fresh)
    engine.engine_core.iteration = 0
    engine.chat([{"role": "user", "content": TRACED_QUESTION}], SamplingParams(max_tokens=3), request_id="req-0")
    engine.tracer.detach(fresh)
    return "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines()) + "\n"


def ms(seconds: float) -> str:
    """Milliseconds with about three digits."""
    return f"{seconds * 1e3:,.2f} ms" if seconds < 0.02 else f"{seconds * 1e3:,.0f} ms"


def faster(row: Row) -> str:
    """How many times faster the cache is."""
    return f"{row['recompute'] / row['cache']:.1f}"


def tables(results: dict[str, Any]) -> str:
    """What the page includes, piece by piece, each between two marks by which the page names it."""
    roof, phases = results["roofline"], results["step_phases"]
    lengths = [
        first | following for first, following in zip(results["first_token"], results["next_token"], strict=True)
    ]
    two_sides = {
        "read all again": lambda r: ms(r["recompute"]),
        "KV cache": lambda r: ms(r["cache"]),
        "times faster": faster,
    }
    pieces = {
        "token": markdown_table(results["token_at"], {"tokens so far": lambda r: f"{r['tokens']:,}"} | two_sides),
        "answer": markdown_table(
            results["answer"],
            {"prompt + answer": lambda r: f"{r['prompt']:,} + {r['output']}"}
            | two_sides
            | {"same tokens": lambda r: "yes" if r["same_tokens"] else "no"},
        ),
        "request": markdown_table(
            lengths,
            {
                "tokens": lambda r: f"{r['tokens']:,}",
                "TTFT as a prompt": lambda r: ms(r["ttft"]),
                "TPOT with them as context": lambda r: ms(r["tpot"]),
                "KV by the formula": lambda r: size(r["kv_formula"]),
                "KV in memory": lambda r: size(r["kv_measured"]),
            },
        ),
        "roofline": markdown_table(
            roof["points"],
            {
                "forward": lambda p: f"{p['kind']}, {p['tokens']:,} tokens",
                "FLOP": lambda p: f"{p['flop'] / 1e6:,.0f} M",
                "bytes": lambda p: size(int(p["bytes"])),
                "FLOP per byte": lambda p: f"{p['intensity']:,.1f}",
                "at least": lambda p: ms(p["bound"]),
                "measured": lambda p: ms(p["seconds"]),
            },
        ),
        "machine": f"This machine reached {roof['flops'] / 1e9:,.0f} GFLOP/s in a matrix product and "
        f"{roof['bandwidth'] / 1e9:,.1f} GB/s in a read from memory: {roof['ridge']:,.1f} operations in the time of "
        "one byte.",
        "phases": markdown_table(
            phases.items(),
            {
                "phase of a decode step": lambda item: item[0],
                "median": lambda item: f"{item[1] * 1e3:.3f} ms",
                "share": lambda item: f"{item[1] / sum(phases.values()):.0%}",
            },
        ),
        "queue": markdown_table(
            results["queue"],
            {
                "request": lambda r: f"{r['request']}",
                "spent on those before": lambda r: ms(r["waited"]),
                "TTFT": lambda r: ms(r["ttft"]),
                "spent on it": lambda r: ms(r["own"]),
            },
        ),
        "environment": f"*Measured with {describe(results['environment'])}*",
    }
    return "\n".join(
        f"<!-- --8<-- [start:{name}] -->\n{text}\n<!-- --8<-- [end:{name}] -->\n" for name, text in pieces.items()
    )


def plots(results: dict[str, Any]) -> None:
    """The plots of the page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = results["token_at"]
    tokens = [r["tokens"] for r in rows]
    for side, label in (("recompute", "read all again"), ("cache", "KV cache")):
        left.plot(tokens, [r[side] * 1e3 for r in rows], "o-", label=label)
    left.set(xlabel="tokens so far", ylabel="ms for the next token", title="One more token")
    left.legend()
    queued = results["queue"]
    numbers = [r["request"] for r in queued]
    right.bar(numbers, [r["waited"] * 1e3 for r in queued], color="0.75", label="waiting for those before")
    own = [(r["ttft"] - r["waited"]) * 1e3 for r in queued]
    right.bar(numbers, own, bottom=[r["waited"] * 1e3 for r in queued], color="C1", label="own prefill")
    right.set(xlabel="request", ylabel="TTFT in ms", title=f"{len(queued)} requests, one at a time")
    right.legend()
    figure.savefig(ASSETS / "m1_walls.png", dpi=110)

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    first, following = results["first_token"], results["next_token"]
    left.plot([r["tokens"] for r in first], [r["ttft"] * 1e3 for r in first], "o-", label="TTFT, prompt of n tokens")
    left.plot([r["tokens"] for r in following], [r["tpot"] * 1e3 for r in following], "s-", label="TPOT, context of n")
    left.set(xlabel="n tokens", ylabel="ms", xscale="log", yscale="log", title="Prefill and decode")
    left.legend()
    roof = results["roofline"]
    intensities = [0.1, roof["ridge"], 2000]
    heights = [min(roof["flops"], x * roof["bandwidth"]) / 1e9 for x in intensities]
    right.plot(intensities, heights, "k-", linewidth=1)
    for kind, mark in (("prefill", "o"), ("decode", "s")):
        points = [p for p in roof["points"] if p["kind"] == kind]
        right.plot([p["intensity"] for p in points], [p["flop"] / p["seconds"] / 1e9 for p in points], mark, label=kind)
    right.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s", title="Roofline of this machine")
    right.legend()
    figure.savefig(ASSETS / "m1_measured.png", dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.m1_single_request", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a model directory")
    parser.add_argument("--rounds", type=int, default=9, help="measurements per number, of which the median counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    with LLMEngine(args.model) as engine:
        trace = traced_steps(engine)
        bench = Bench(engine, args.rounds)
        results: dict[str, Any] = {"environment": environment(model=args.model, seed=SEED)}
        results["token_at"] = [bench.token_at(n) for n in track(LENGTHS, "one token")]
        pairs = ((256, 1), (16, 32), (256, 32), (1024, 32))
        results["answer"] = [bench.answer(prompt, output) for prompt, output in track(pairs, "answers")]
        results["first_token"] = [bench.first_token(n) for n in track(LENGTHS, "TTFT")]
        results["next_token"] = [bench.next_token(n) for n in track(LENGTHS, "TPOT")]
        results["step_phases"] = bench.step_phases(256)
        results["queue"] = bench.queue()
        results["roofline"] = roofline(bench, results["first_token"], results["next_token"])
    for folder in (RESULTS, ASSETS):
        folder.mkdir(exist_ok=True)
    text = tables(results)
    (RESULTS / "m1_single_request.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "m1_single_request.md").write_text(text, encoding="utf-8")
    (RESULTS / "m1_single_request_trace.txt").write_text(trace, encoding="utf-8")
    plots(results)
    Console().print(text, markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
