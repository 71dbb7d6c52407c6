"""The tour of the demo: four requests that show prefill, decode, sampling and the stops, then what one of them cost.

Part of `python -m m1_single_request.demo`; nothing in the engine depends on it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.errors import EngineError
from m1_single_request.events import RequestAdded, size
from m1_single_request.llm_engine import LLMEngine
from m1_single_request.output_events import Finish, Result, TextHeld
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import ConsoleReader
from m1_single_request.tracer import TraceReader, TraceRecord

FULL_STEPS = 2  # at the start of each request
QUESTION = "What is a KV cache?"
FACTS = "The code of zebra is 4821. The code of lamp is 0937. The code of otter is 6650."


@dataclass(frozen=True)
class Station:
    """One stop of the tour."""

    title: str
    remark: str
    question: str
    changes: dict[str, Any]


STATIONS = (
    Station(
        "1. A question, answered greedily",
        "The prefill takes the whole prompt in one step, every decode step just one token.",
        QUESTION,
        {},
    ),
    Station(
        "2. A fact from the prompt",
        "A decode step feeds in one token: the fact reaches it only through the KV cache.",
        f"{FACTS} What is the code of lamp?",
        {},
    ),
    Station(
        "3. A vague question, drawn instead of taken",
        "The model could say many things here. What it says depends on the seed and the place in the answer alone.",
        "Explain.",
        {"temperature": 1.0, "top_p": 0.9, "seed": 0, "max_tokens": 48},
    ),
    Station(
        "4. A stop string",
        "The text says ' so far' before ' so each': what may be the beginning of the stop is held back until then.",
        QUESTION,
        {"stop": " so each", "max_tokens": 64},
    ),
)


class TourReader:
    """A console trace for a first look: the first steps of each request and its last in full, most others in a line.

    A step that holds text back, and the one after it, are shown in full, too. What a step shows is decided for all
    requests in it together.
    """

    def __init__(self, console: Console) -> None:
        self._console = ConsoleReader(console=console)
        self._step: list[TraceRecord] = []
        self._held = False

    def read(self, record: TraceRecord) -> None:
        """Keep a step's records until it is over, then print them one way or the other."""
        self._step.append(record)
        event = record.event
        if event.headline or event.ends_step or isinstance(event, RequestAdded):
            events = [kept.event for kept in self._step]
            lengths = [e.out_len for e in events if isinstance(e, Result)]
            early = not lengths or min(lengths) <= FULL_STEPS
            held = any(isinstance(e, TextHeld) for e in events)
            self._console.verbose = early or held or self._held or any(isinstance(e, Finish) for e in events)
            for kept in self._step:
                self._console.read(kept)
            self._held = held
            self._step.clear()

    def close(self) -> None:
        """Do nothing: no text is kept after the end of a step."""


def tour(engine: LLMEngine, params: SamplingParams, console: Console, reader: TraceReader | None) -> None:
    """Run the stations; `reader`, which prints the trace, is detached before the costs are measured."""
    for station in STATIONS:
        console.rule(f"[bold]{station.title}")
        console.print(f"[italic]{station.remark}[/italic]\n")
        output = ask(engine, station.question, replace(params, **station.changes))
        console.print()
        show_answer(console, output, question=station.question)
    if reader is not None:
        engine.tracer.detach(reader)
    console.rule("[bold]What question 1 costs")
    output = min((ask(engine, QUESTION, params) for _ in range(3)), key=lambda output: output.metrics.latency or 0.0)
    console.print(cost_table(engine, output))
    console.print(why_memory_bound(engine, output))


def ask(engine: LLMEngine, question: str, params: SamplingParams) -> RequestOutput:
    """One question as a conversation of its own."""
    return engine.chat([{"role": "user", "content": question}], params)


def show_answer(console: Console, output: RequestOutput, question: str | None = None) -> None:
    """Question and answer, and why it ended. Raises `EngineError` if it failed."""
    if output.error is not None:
        raise EngineError(f"{output.request_id} failed: {output.error}") from output.error
    if question is not None:
        console.print(Text.assemble(("question  ", "bold"), question))
    for answer in output.outputs:  # of later milestones' n; here there is one
        label = "answer" if len(output.outputs) == 1 else f"answer {answer.index}"
        console.print(Text.assemble((f"{label:<10}", "bold"), answer.text))
        stop = "" if answer.stop_reason is None else f" {answer.stop_reason!r}"
        console.print(Text(f"{answer.finish_reason}{stop}, {len(answer.token_ids)} tokens\n", style="dim"))


def cost_table(engine: LLMEngine, output: RequestOutput) -> Table:
    """Times, rates and bytes of one finished request."""
    metrics, runner = output.metrics, engine.engine_core.model_runner
    ttft, tpot = metrics.time_to_first_token or 0.0, metrics.time_per_output_token
    kv_tokens = metrics.num_prompt_tokens + metrics.num_output_tokens - 1
    table = Table(show_header=False, caption="the fastest of three repeats, without a trace")
    table.add_row("prompt", f"{metrics.num_prompt_tokens} tokens")
    table.add_row("output", f"{metrics.num_output_tokens} tokens")
    table.add_row(
        "time to first token (TTFT)", f"{ttft * 1e3:.1f} ms: {metrics.num_prompt_tokens / ttft:,.0f} prompt tokens/s"
    )
    if tpot is not None:
        table.add_row("time per output token (TPOT)", f"{tpot * 1e3:.2f} ms: {1 / tpot:,.0f} tokens/s")
    table.add_row(
        "KV cache at the end",
        f"{kv_tokens} tokens x {runner.kv_bytes_per_token:,} bytes = {size(kv_tokens * runner.kv_bytes_per_token)}",
    )
    return table


def why_memory_bound(engine: LLMEngine, output: RequestOutput) -> str:
    """The arithmetic of a decode step on this machine: bytes that must be read, operations done with them."""
    runner, metrics = engine.engine_core.model_runner, output.metrics
    parameters = list(runner.model.parameters())
    weight_bytes = sum(p.nbytes for p in parameters)
    operations = 2 * sum(p.numel() for p in parameters)
    kv_bytes = (metrics.num_prompt_tokens + metrics.num_output_tokens - 1) * runner.kv_bytes_per_token
    flops, bandwidth = measure_machine(next(iter(parameters)))
    read_ms, compute_ms = (weight_bytes + kv_bytes) / bandwidth * 1e3, operations / flops * 1e3
    prompt = metrics.num_prompt_tokens
    lines = [
        "\n[bold]Why decode waits for memory[/bold]",
        f"A decode step reads every weight and the KV once: {size(weight_bytes)} + {size(kv_bytes)}.",
        f"It does about 2 operations per parameter, {operations / 1e6:.1f} million: "
        f"{operations / (weight_bytes + kv_bytes):.2f} per byte read.",
        f"This machine was just measured at {bandwidth / 1e9:.1f} GB/s and {flops / 1e9:.0f} GFLOP/s: it can do "
        f"{flops / bandwidth:.0f} operations in the time of reading one byte.",
        f"By this count reading takes {read_ms:.2f} ms and computing {compute_ms:.2f} ms, so the step would wait for "
        f"{'memory' if read_ms > compute_ms else 'the processor'}.",
        f"The prefill did {prompt} tokens with one read of the weights: {prompt} times as many operations per byte.",
    ]
    if tpot := metrics.time_per_output_token:
        share = max(read_ms, compute_ms) / (tpot * 1e3)
        lines.append(
            f"A step really took {tpot * 1e3:.2f} ms, and this bound is {share:.0%} of that. The rest is Python and "
            f"the start of some hundred small operations. A model of billions of parameters does the same number of "
            f"operations on a thousand times the bytes: there the bound is what counts."
        )
    return "\n".join(lines)


def measure_machine(like: torch.Tensor) -> tuple[float, float]:
    """Return FLOP per second of a matrix product and bytes per second of a large read, on the device of `like`."""
    square = torch.randn(512, 512, device=like.device, dtype=like.dtype)
    large = torch.ones(64 * 2**20, device=like.device)  # 256 MiB: larger than any cache

    def seconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            call()
            if like.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times[1:])

    with torch.inference_mode():
        return 2 * 512**3 / seconds(lambda: square @ square), large.nbytes / seconds(large.sum)
