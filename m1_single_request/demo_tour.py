"""Tour of the demo: four requests that show prefill, decode, sampling and the stops, then the cost of one of them.

Part of `python -m m1_single_request.demo`; no part of the engine depends on it.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.errors import EngineError
from m1_single_request.events import size
from m1_single_request.llm_engine import LLMEngine
from m1_single_request.outputs import RequestMetrics, RequestOutput
from m1_single_request.sampling_params import SamplingParams

T = TypeVar("T")

FULL_STEPS = 2  # at the start of each request
QUESTION = "What is a KV cache?"
FACTS = "The code of zebra is 4821. The code of lamp is 0937. The code of otter is 6650."

STATIONS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (
        "1. A question, answered greedily",
        "The prefill takes the whole prompt in one step, every decode step just one token.",
        QUESTION,
        {},
    ),
    (
        "2. A fact from the prompt",
        "A decode step feeds in one token: the fact reaches it only through the KV cache.",
        f"{FACTS} What is the code of lamp?",
        {},
    ),
    (
        "3. A vague question, drawn instead of taken",
        "Many answers are likely here. The one that comes depends on the seed and the place in the answer alone.",
        "Explain.",
        {"temperature": 1.0, "top_p": 0.9, "seed": 0, "max_tokens": 48},
    ),
    (
        "4. A stop string",
        "The text has ' so far' before ' so each': the possible beginning of the stop string is held back until then.",
        QUESTION,
        {"stop": " so each", "max_tokens": 64},
    ),
)
"""Title, remark, question, and changes of the sampling parameters."""


def tour(engine: LLMEngine, params: SamplingParams, console: Console, reader: Any) -> None:
    """Run the stations, then measure question 1 without a trace.

    `reader`: a console reader that is to print the first steps of each request in full, the others in a line; or None.
    """
    for title, remark, question, changes in STATIONS:
        headline(console, title, remark)
        for output in engine.stream(chat_prompt(engine, question), replace(params, **changes)):
            if reader is not None:
                reader.verbose = output.finished or len(output.token_ids) < FULL_STEPS
        show_answer(console, output, question)
    engine.tracer.close()
    headline(console, "5. The cost of question 1", f"The fastest of three repeats, and one recorded on {RECORDED_ON}.")
    at_least_two = replace(params, max_tokens=max(2, params.max_tokens), min_tokens=2)
    runs = [checked(engine.generate(chat_prompt(engine, QUESTION), at_least_two)).metrics for _ in range(3)]
    costs = costs_of(engine, min(runs, key=tpot))
    console.print(cost_table(costs))
    bullets(console, conclusions(costs, slowest=max(map(tpot, runs))))


def chat_prompt(engine: LLMEngine, question: str) -> list[int]:
    """Return the prompt of a conversation of one question."""
    return engine.chat_prompt([{"role": "user", "content": question}])


# --- printed by the demos of all milestones ---------------------------------------------------------------------------


def headline(console: Console, title: str, remark: str) -> None:
    """Print the title of a part of the tour, and a remark on what to look at."""
    console.print()
    console.rule(Text(title, style="bold"))
    console.print(Text(f"{remark}\n", style="italic"))


def bullets(console: Console, sentences: Iterable[str]) -> None:
    """Print a list with a dash before each item."""
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row("-", Text(sentence))
    console.print(table)


def compared(columns: Mapping[str, T], rows: Mapping[str, Callable[[T], str]]) -> Table:
    """Return a table with a column for each of these things, and a row for each number of them."""
    table = Table("")
    for name in columns:
        table.add_column(name, justify="right")
    for label, shown in rows.items():
        table.add_row(label, *map(shown, columns.values()))
    return table


def checked(output: RequestOutput) -> RequestOutput:
    """Return `output`. Raises `EngineError` if the request failed."""
    if output.error is not None:
        raise EngineError(f"{output.request_id} failed: {output.error}") from output.error
    return output


def show_answer(console: Console, output: RequestOutput, question: str | None = None) -> None:
    """Print the question, the answers, and why each ended. Raises `EngineError` if the request failed."""
    if question is not None:
        console.print(Text.assemble(("\nquestion  ", "bold"), question))
    for answer in checked(output).outputs:
        label = "answer" if len(output.outputs) == 1 else f"answer {answer.index}"
        stop = "" if answer.stop_reason is None else f" {answer.stop_reason!r}"
        console.print(Text.assemble((f"{label:<10}", "bold"), answer.text))
        console.print(Text(f"{answer.finish_reason}{stop}, {len(answer.token_ids)} tokens\n", style="dim"))


# --- the costs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Costs of one request, in seconds and bytes, and the limits of its machine."""

    ttft: float
    tpot: float
    num_bytes: int
    """Read by a decode step: all weights, and the KV."""
    operations: float
    """Of a decode step: about two per parameter."""
    bandwidth: float
    """Bytes per second of a large read."""
    flops: float
    """Operations per second of a matrix product."""

    @property
    def intensity(self) -> float:
        """Operations of a decode step per byte that it reads."""
        return self.operations / self.num_bytes

    @property
    def ridge(self) -> float:
        """Operations that the machine can do while it reads one byte."""
        return self.flops / self.bandwidth

    @property
    def read_ms(self) -> float:
        """Milliseconds of reading alone in a decode step."""
        return self.num_bytes / self.bandwidth * 1e3


RECORDED = Costs(0.00586, 0.00358, 16_858_112, 8.46e6, 18.5e9, 102.4e9)
RECORDED_ON = "an AMD EPYC with tiny-qwen3 and 16 prompt tokens"
"""From `benchmarks/results/m1_single_request.json`."""


def tpot(metrics: RequestMetrics) -> float:
    """Return the time per output token in seconds."""
    return metrics.time_per_output_token or 0.0


def costs_of(engine: LLMEngine, metrics: RequestMetrics) -> Costs:
    """Measure this machine, and return the costs of a finished request of at least two output tokens."""
    runner = engine.engine_core.model_runner
    parameters = list(runner.model.parameters())
    kv_bytes = (metrics.num_prompt_tokens + metrics.num_output_tokens - 1) * runner.kv_bytes_per_token
    flops, bandwidth = measure_machine(parameters[0])
    num_bytes, operations = sum(each.nbytes for each in parameters), 2 * sum(each.numel() for each in parameters)
    return Costs(
        metrics.time_to_first_token or 0.0, tpot(metrics), num_bytes + kv_bytes, operations, bandwidth, flops
    )  # fmt: skip


def cost_table(costs: Costs) -> Table:
    """Return a table of the costs of this run and the recorded ones."""
    rows: dict[str, Callable[[Costs], str]] = {
        "time to first token (TTFT)": lambda own: f"{own.ttft * 1e3:.1f} ms",
        "time per output token (TPOT)": lambda own: f"{own.tpot * 1e3:.2f} ms",
        "a decode step reads weights and KV": lambda own: f"{size(own.num_bytes)}, in {own.read_ms:.2f} ms",
        "a decode step does, per byte read": lambda own: f"{own.intensity:.2f} operations",
        "the machine reads": lambda own: f"{own.bandwidth / 1e9:.1f} GB/s",
        "the machine does": lambda own: f"{own.flops / 1e9:,.0f} GFLOP/s",
        "while it reads one byte, it can do": lambda own: f"{own.ridge:.1f} operations",
    }
    return compared({"this run": costs, "recorded": RECORDED}, rows)


def conclusions(costs: Costs, slowest: float) -> list[str]:
    """Return the meaning of the numbers, of the recorded ones if this run was disturbed. `slowest`: its worst TPOT."""
    disturbed = slowest > 1.5 * costs.tpot or costs.ridge < 2 * costs.intensity or costs.read_ms > costs.tpot * 1e3
    shown = RECORDED if disturbed else costs
    share = shown.read_ms / (shown.tpot * 1e3)
    notice = ["This run was disturbed, or the machine is an unusual one. The recorded numbers show the rule:"]
    rest = (
        "the rest is Python and the start of some hundred small operations, as many as in a model of billions of "
        "parameters, where reading takes a thousand times as long"
        if share < 0.5
        else "reading is most of a step"
    )
    return notice * disturbed + [
        f"A decode step does {shown.intensity:.2f} operations per byte, and the machine could do {shown.ridge:.1f}: it "
        f"waits for memory. A prefill of 100 tokens does 100 times as many, with the same read of the weights.",
        f"Reading takes {shown.read_ms:.2f} ms of the {shown.tpot * 1e3:.2f} ms of a step ({share:.0%}): {rest}.",
    ]


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
