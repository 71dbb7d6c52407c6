"""The engine in action: `python -m m1_single_request.demo`.

Without flags: a short tour on the checkpoint that ships with the course, every decision explained, then a table of what
it cost. `--prompt` answers one prompt, `--chat` is a conversation in the terminal. Later milestones keep these flags
and add their own.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from m1_single_request.config import DTYPES, ModelConfig, TraceConfig
from m1_single_request.errors import EngineError
from m1_single_request.events import EngineStarted, Finish, RequestAdded, Result, StepDone, TextHeld, size
from m1_single_request.llm_engine import LLMEngine
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import ConsoleReader
from m1_single_request.tracer import TraceRecord
from m1_single_request.wiring import describe_model

TOUR_QUESTION = "What is a KV cache?"
TOUR_FACTS = "The code of zebra is 4821. The code of lamp is 0937. The code of otter is 6650."


def make_parser(prog: str = "python -m m1_single_request.demo") -> argparse.ArgumentParser:
    """The flags that every milestone's demo has."""
    parser = argparse.ArgumentParser(prog=prog, description="Watch the engine answer and explain every step.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", help="answer this and stop (without the chat template)")
    what.add_argument("--chat", action="store_true", help="talk to the model; /reset forgets, /quit leaves")
    parser.add_argument("--model", help="a Hugging Face directory or hub id; default: the embedded checkpoint")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument(
        "--trace",
        choices=("verbose", "summary", "off"),
        help="default: verbose; in the tour, the first and last steps of each request; in a chat, off",
    )
    parser.add_argument("--trace-file", metavar="OUT.jsonl", help="also write every event to this file")
    parser.add_argument("--max-tokens", type=int, default=128)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0)
    sampling.add_argument("--top-k", type=int, default=-1)
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--presence-penalty", type=float, default=0.0)
    sampling.add_argument("--frequency-penalty", type=float, default=0.0)
    sampling.add_argument("--repetition-penalty", type=float, default=1.0)
    sampling.add_argument("--stop", action="append", default=[], help="a stop string; may be repeated")
    sampling.add_argument("--seed", type=int)
    return parser


SAMPLING_FLAGS = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop", "seed",
)  # fmt: skip


def main(argv: Sequence[str] | None = None, *, engine_type: type[LLMEngine] = LLMEngine) -> int:
    """Run the demo; returns the exit status."""
    args = make_parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        params = SamplingParams(**{flag: getattr(args, flag) for flag in SAMPLING_FLAGS})
        is_tour = not args.chat and args.prompt is None
        level: Any = args.trace or ("off" if args.chat or is_tour else "verbose")
        model = ModelConfig(model=args.model or engine_type.default_model, device=args.device, dtype=args.dtype)
        trace = TraceConfig(console=level, jsonl=args.trace_file)
        with engine_type(model_config=model, trace_config=trace) as engine:
            if is_tour and args.trace is None:
                engine.tracer.attach(TourReader(console))
                if engine.tracer:
                    engine.tracer.emit(describe_model(engine.engine_core.model_runner.loaded_model))
            if args.chat:
                chat(engine, params, console)
            elif args.prompt is not None:
                show_answer(console, engine.generate(args.prompt, params))
            else:
                tour(engine, params, console)
    except EngineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


class TourReader:
    """A console trace for a first look: each request's first steps and its last in full, the others a line each."""

    def __init__(self, console: Console, *, full_steps: int = 3) -> None:
        self.full_steps = full_steps
        self._full = ConsoleReader(verbose=True, console=console)
        self._short = ConsoleReader(verbose=False, console=console)
        self._step: list[TraceRecord] = []

    def read(self, record: TraceRecord) -> None:
        """Keep a step's records until it is over, then print them one way or the other."""
        self._step.append(record)
        if isinstance(record.event, EngineStarted | RequestAdded | StepDone):
            events = [kept.event for kept in self._step]
            late = any(isinstance(e, Result) and e.out_len > self.full_steps for e in events)
            held = any(isinstance(e, Finish | TextHeld) for e in events)
            for kept in self._step:
                (self._short if late and not held else self._full).read(kept)
            self._step.clear()

    def close(self) -> None:
        """Nothing is left between steps."""


# --- the tour ---------------------------------------------------------------------------------------------------------


def tour(engine: LLMEngine, params: SamplingParams, console: Console) -> None:
    """Four requests that show prefill, decode, sampling and the stops; then what the first one cost."""
    stations: list[tuple[str, str, list[dict[str, str]], dict[str, Any]]] = [
        (
            "1. A question, answered greedily",
            "Watch the prefill take the whole prompt in one step, and every decode step just one token.",
            [{"role": "user", "content": TOUR_QUESTION}],
            {},
        ),
        (
            "2. A fact from the prompt",
            "The answer stands in the prompt: only the KV cache can carry it to the end.",
            [{"role": "user", "content": f"{TOUR_FACTS} What is the code of lamp?"}],
            {},
        ),
        (
            "3. The same question, drawn instead of taken",
            "Each token is drawn at a number that depends on seed and position alone.",
            [{"role": "user", "content": TOUR_QUESTION}],
            {"temperature": 1.5, "top_k": 20, "seed": 7, "max_tokens": 8},
        ),
        (
            "4. A stop string",
            "The text says 'so far' first: what may be the beginning of 'so each' is held back until that is decided.",
            [{"role": "user", "content": TOUR_QUESTION}],
            {"stop": "so each", "max_tokens": 64},
        ),
    ]
    outputs = []
    for title, remark, messages, changes in stations:
        console.rule(f"[bold]{title}")
        console.print(f"[italic]{remark}[/italic]\n")
        values = {flag: getattr(params, flag) for flag in SAMPLING_FLAGS}
        output = engine.chat(messages, SamplingParams(**values | changes))
        console.print()
        show_answer(console, output, question=messages[-1]["content"])
        outputs.append(output)
    console.rule("[bold]What the first answer cost")
    console.print(cost_table(engine, outputs[0]))
    console.print(why_memory_bound(engine, outputs[0]))


def show_answer(console: Console, output: RequestOutput, question: str | None = None) -> None:
    """Question and answer, and why it ended."""
    if question is not None:
        console.print(f"[bold]question[/bold]  {escape(question)}")
    if output.error is not None:
        raise EngineError(f"{output.request_id} failed: {output.error}") from output.error
    console.print(f"[bold]answer[/bold]    {escape(output.text)}")
    stop = output.outputs[0].stop_reason
    console.print(
        f"[dim]{output.finish_reason}{'' if stop is None else f' {stop!r}'}, {len(output.token_ids)} tokens[/dim]\n"
    )


def cost_table(engine: LLMEngine, output: RequestOutput) -> Table:
    """Times, rates and bytes of one finished request."""
    metrics, loaded = output.metrics, engine.engine_core.model_runner
    table = Table(show_header=False)
    ttft, tpot = metrics.time_to_first_token or 0.0, metrics.time_per_output_token
    kv_tokens = metrics.num_prompt_tokens + metrics.num_output_tokens - 1
    table.add_row("prompt", f"{metrics.num_prompt_tokens} tokens")
    table.add_row("output", f"{metrics.num_output_tokens} tokens")
    table.add_row(
        "time to first token (TTFT)", f"{ttft * 1e3:.1f} ms: {metrics.num_prompt_tokens / ttft:,.0f} prompt tokens/s"
    )
    if tpot is not None:
        table.add_row("time per output token (TPOT)", f"{tpot * 1e3:.2f} ms: {1 / tpot:,.0f} tokens/s")
    table.add_row(
        "KV cache at the end",
        f"{kv_tokens} tokens x {loaded.kv_bytes_per_token:,} bytes = {size(kv_tokens * loaded.kv_bytes_per_token)}",
    )
    return table


def why_memory_bound(engine: LLMEngine, output: RequestOutput) -> str:
    """The arithmetic of a decode step on this machine: bytes that must be read, operations done with them."""
    runner, metrics = engine.engine_core.model_runner, output.metrics
    parameters = list(runner.model.parameters())
    weight_bytes = sum(p.nbytes for p in parameters)
    operations = 2 * sum(p.numel() for p in parameters)
    kv_bytes = (metrics.num_prompt_tokens + metrics.num_output_tokens - 1) * runner.kv_bytes_per_token
    flops, bandwidth = measure_machine(runner.model)
    read_ms = (weight_bytes + kv_bytes) / bandwidth * 1e3
    compute_ms = operations / flops * 1e3
    prompt = metrics.num_prompt_tokens
    lines = [
        "\n[bold]Why decode is memory-bound here[/bold]",
        f"One decode step reads every weight and the KV once: {size(weight_bytes)} + {size(kv_bytes)}.",
        f"It does about 2 operations per parameter: {operations / 1e6:.1f} MFLOP, "
        f"{operations / (weight_bytes + kv_bytes):.2f} per byte read.",
        f"This machine was just measured at {bandwidth / 1e9:.1f} GB/s and {flops / 1e9:.0f} GFLOP/s: "
        f"{flops / bandwidth:.0f} operations in the time of one byte.",
        f"So reading takes {read_ms:.2f} ms, computing {compute_ms:.2f} ms: the step waits for "
        f"{'memory' if read_ms > compute_ms else 'the processor'}. "
        "What stays in the processor's caches is read faster.",
        f"The prefill did {prompt} tokens with one read of the weights, {prompt} times the operations per byte.",
    ]
    if tpot := metrics.time_per_output_token:
        share = max(read_ms, compute_ms) / (tpot * 1e3)
        lines.append(
            f"A measured step took {tpot * 1e3:.2f} ms, so this bound explains {share:.0%} of it; the rest is Python "
            f"and kernel launches, which weigh heavily on a model this small and little on a large one."
        )
    return "\n".join(lines)


def measure_machine(model: Any) -> tuple[float, float]:
    """Operations per second of a matrix product, bytes per second of a large read, on the model's device and dtype."""
    import torch

    parameter = next(model.parameters())
    square = torch.randn(512, 512, device=parameter.device, dtype=parameter.dtype)
    large = torch.ones(64 * 2**20, device=parameter.device)  # 256 MiB: larger than any cache

    def seconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            call()
            if parameter.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times[1:])

    with torch.inference_mode():
        return 2 * 512**3 / seconds(lambda: square @ square), large.nbytes / seconds(large.sum)


# --- the conversation -------------------------------------------------------------------------------------------------


def chat(engine: LLMEngine, params: SamplingParams, console: Console) -> None:
    """A conversation with history, streamed; ends with /quit or end of input."""
    console.print("[dim]/reset forgets the conversation, /quit leaves[/dim]")
    history: list[dict[str, str]] = []
    while True:
        try:
            line = input("you    > ").strip()
        except EOFError:
            console.print()
            return
        if line == "/quit":
            return
        if line == "/reset":
            history.clear()
            console.print("[dim]forgotten[/dim]")
        elif line.startswith("/"):
            console.print("[dim]there is /reset and /quit[/dim]")
        elif line:
            history.append({"role": "user", "content": line})
            answer = _stream_answer(engine, history, params, console)
            if answer is None:
                history.pop()
            else:
                history.append({"role": "assistant", "content": answer})


def _stream_answer(
    engine: LLMEngine, history: list[dict[str, str]], params: SamplingParams, console: Console
) -> str | None:
    """Print the answer as it comes; None if there was none. Ctrl-C ends the answer, not the conversation."""
    shown = ""
    try:
        console.print("model  > ", end="")
        for output in engine.stream(engine.chat_prompt(history), params):
            console.print(output.text[len(shown) :], end="", markup=False, soft_wrap=True)
            shown = output.text
            if output.error is not None:
                console.print(f"{type(output.error).__name__}: {output.error}", style="red", markup=False)
                return None
    except KeyboardInterrupt:
        console.print(" [dim](interrupted)[/dim]", end="")
    except EngineError as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return None
    console.print()
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
