"""Tour of the demo: four requests that show prefill, decode, sampling and the stops, then the cost of one of them.

Part of `python -m m1_single_request.demo`; no part of the engine depends on it.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.utils.benchmark import Timer

from m1_single_request.errors import EngineError
from m1_single_request.events import EngineStarted, size
from m1_single_request.input_processor import Message
from m1_single_request.llm_engine import LLMEngine
from m1_single_request.outputs import RequestMetrics, RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import ConsoleReader, Records

FULL_STEPS = 2  # at the start of each request
QUESTION = "What is a KV cache?"
FACTS = "The code of zebra is 4821. The code of lamp is 0937. The code of otter is 6650."
DRAWN = {"temperature": 1.0, "top_p": 0.9, "seed": 0, "max_tokens": 48}


def tour(configs: dict[str, Any], params: SamplingParams, console: Console, *, is_explained: bool) -> None:
    """Run four requests; then measure the first one again, without a trace.

    `is_explained`: print the first steps of each request in full, the others in a line.
    """
    records, reader, trace = Records(), ConsoleReader(console=console), configs["trace_config"]
    own = (records, reader) if is_explained else (records,)
    with LLMEngine(**{**configs, "trace_config": replace(trace, readers=(*trace.readers, *own))}) as engine:

        def show(title: str, remark: str, question: str, **changes: Any) -> None:
            headline(console, title, remark)
            for output in engine.stream(prompt_of(engine, question), replace(params, **changes)):
                reader.verbose = output.finished or len(output.token_ids) < FULL_STEPS
            show_answer(console, output, question)

        remark = "The prefill takes the whole prompt in one step, every decode step just one token."
        show("1. A question, answered greedily", remark, QUESTION)
        remark = "A decode step feeds in one token: the fact reaches it only through the KV cache."
        show("2. A fact from the prompt", remark, f"{FACTS} What is the code of lamp?")
        remark = (
            "Many answers are likely here. The one that is drawn depends only on the seed and each token's position."
        )
        show("3. A vague question, drawn instead of taken", remark, "Explain.", **DRAWN)
        remark = "' so far' comes before ' so each': ' so' may begin the stop string, and is held back for a step."
        show("4. A stop string", remark, QUESTION, stop=" so each", max_tokens=64)

        engine.tracer.close()
        headline(console, "5. The cost of question 1", f"The fastest of three repeats; in brackets: {RECORDED_ON}.")
        two_or_more = replace(params, max_tokens=max(2, params.max_tokens), min_tokens=2)
        began, cpu_began = time.perf_counter(), time.process_time()
        outputs = [checked(engine.generate(prompt_of(engine, QUESTION), two_or_more)) for _ in range(3)]
        cpu_share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
        ((_, started),) = records.of(EngineStarted)
        like = torch.empty(0, device=started.device, dtype=getattr(torch, started.dtype))
        bullets(console, costs(started, [output.metrics for output in outputs], cpu_share, *measure_machine(like)))


# --- used by the demos of all milestones ------------------------------------------------------------------------------


def prompt_of(engine: Any, content: Any, past: Sequence[Message] = ()) -> list[int]:
    """Return the prompt of a user's message after others; of a model without a chat template, their texts alone."""
    messages, intake = [*past, {"role": "user", "content": content}], engine.engine_core.input_processor
    if intake.tokenizer.chat_template is None:
        return intake.encode("\n".join(str(message["content"]) for message in messages))
    return engine.chat_prompt(messages)


def text_of(doc: str | None) -> str:
    """Return a docstring without its first line, in one line."""
    return " ".join((doc or "").partition("\n\n")[2].split())


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


RECORDED_ON = "recorded on an AMD EPYC, with tiny-qwen3, a prompt of 16 tokens, 1 thread"
"""Source of the recorded numbers: `benchmarks/results/m1_single_request.json`."""


def costs(
    started: EngineStarted, runs: Sequence[RequestMetrics], cpu_share: float, flops: float, bandwidth: float
) -> list[str]:
    """Return the costs of a request and their reason: numbers of this run, and recorded ones in brackets.

    `runs`: repeats of the request. `cpu_share`: their CPU time divided by their wall time, less than 1 beside other
    programs. `flops`, `bandwidth`: operations and bytes per second of this machine.
    """
    num_kv_tokens = runs[0].num_prompt_tokens + runs[0].num_output_tokens - 1
    num_bytes = started.weight_bytes + num_kv_tokens * started.kv_bytes_per_token
    first = min(run.time_to_first_token or 0.0 for run in runs)
    step, *_, slowest = sorted(run.time_per_output_token or 0.0 for run in runs)
    read, intensity, ridge = num_bytes / bandwidth, 2 * started.num_parameters / num_bytes, flops / bandwidth
    numbers = [
        f"The first token (TTFT) took {first * 1e3:.1f} ms [5.2], each later one (TPOT) {step * 1e3:.2f} ms [3.46].",
        f"Such a decode step reads every weight and the KV, {size(num_bytes)} [16.1 MiB]. This machine reads "
        f"{bandwidth / 1e9:.1f} GB/s [27.9]: reading alone takes {read * 1e3:.2f} ms [0.60].",
        f"The step does {intensity:.2f} [0.50] operations per byte. This machine does {flops / 1e9:,.0f} GFLOP/s "
        f"[113]: {ridge:.1f} [4.1] in the time of reading one byte.",
    ]
    rule = "decode waits for memory. A prefill of 100 tokens does 100 times as many operations with the same read."
    if cpu_share < 0.8 or slowest > 1.5 * step or ridge < 2 * intensity or read > step:
        return [*numbers, f"This run was disturbed, or the machine is unusual. The numbers in brackets show it: {rule}"]
    rest = (
        " The rest of a step is Python and the start of some hundred small operations: as many as in a model of "
        "billions of parameters, where reading takes a thousand times as long."
    )
    return [*numbers, f"So {rule}{rest if read < step / 2 else ''}"]


def measure_machine(like: torch.Tensor) -> tuple[float, float]:
    """Return FLOP per second of a matrix product and bytes per second of a large read, on the device of `like`."""
    square = torch.randn(512, 512, device=like.device, dtype=like.dtype)
    large = torch.ones(64 * 2**20, device=like.device)  # 256 MiB: larger than any cache

    def seconds(statement: str) -> float:
        timer = Timer(statement, globals={"square": square, "large": large}, num_threads=torch.get_num_threads())
        return float(min(timer.blocked_autorange(min_run_time=0.1).times))

    return 2 * 512**3 / seconds("square @ square"), large.nbytes / seconds("large.sum()")
