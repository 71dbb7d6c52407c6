"""Tour of the demo: a long prompt arrives among streams; two ways to draft tokens, on three kinds of text.

Part of `python -m m5_chunked_prefill_spec.demo`; no part of the engine depends on it. The texts are made of what the
model that ships can do: it explains terms, repeats texts, and restates codes from its prompt.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.demo_tour import bullets, checked, headline
from m1_single_request.events import some
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import readers_of
from m1_single_request.tracer import TraceReader
from m4_radix_cache.demo_tour import (
    NOUNS,
    TERMS,
    Records,
    as_tokens,
    codes,
    compared,
    kept_open,
    several,
    sized,
    take_turns,
)
from m5_chunked_prefill_spec.config import SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.events import Batch
from m5_chunked_prefill_spec.llm_engine import LLMEngine
from m5_chunked_prefill_spec.views.token_origins import TokenOrigins, coloured, legend

ROOM = 8192  # tokens of KV memory
TOUR_BUDGET = 64  # tokens of a step: few, so that the long prompt has many pieces
BEFORE, STREAMED = 6, 48  # tokens of each stream, before the long prompt arrives and in all
WIDTH = 60  # columns of a timeline
RECORDED_GAPS, RECORDED_WAITS = {"in pieces": 0.008, "whole": 0.030}, {"whole": 0.031, "in pieces": 0.07}
"""Seconds in part 1: the longest gap of a stream, and the time to first token of the long prompt."""
RECORDED_SPEEDS = {
    ("repeat", "ngram"): 2.0,
    ("repeat", "draft_model"): 1.2,
    ("explain", "ngram"): 1.1,
    ("explain", "draft_model"): 1.2,
    ("recall", "ngram"): 1.5,
    ("recall", "draft_model"): 1.2,
}
"""Speed in part 2, in times the speed without drafts."""
NO_DRAFTS = "no drafts"
TEXT = (
    "Seven boats cross under the bridge; people wave, 37 of them. ship lemon sugar paper 48 kite lamp, garden table "
    "warm winter jacket! river stone 905 forest candle: clock window / little green bird song"
)
DRAFTS = (
    "A text to repeat, a term to explain, a code to look up. Without drafts every token takes a step. ngram drafts the "
    "tokens that followed an earlier occurrence of the last ones; draft_model drafts with a small model. One step of the "
    "model verifies all drafts, and drops those that it would not have generated itself."
)


class Run(NamedTuple):
    """Streams, and a long prompt that arrives among them, on one engine. All times are in seconds."""

    streams: list[list[float]]
    """Times of the tokens of each stream, since the start."""
    longest_gap: float
    """Longest time between two tokens of a stream after the arrival of the long prompt."""
    output: RequestOutput
    """Answer to the long prompt."""


class Tour:
    """The engines and the requests of the tour have these settings in common. Each model is loaded once."""

    def __init__(
        self, configs: Mapping[str, Any], params: SamplingParams, options: Mapping[str, Any], console: Console
    ) -> None:
        self.params, self.options, self.console = params, options, console
        memory, load = sized(configs["cache_config"], ROOM), cache(LLMEngine.parts["model_loader"])
        self.configs = {**configs, "cache_config": memory, "parts": {"model_loader": load}}

    def run(self, drafts: Mapping[str, SpeculativeConfig], num_streams: int) -> None:
        """Run both parts; each engine has a memory of its own."""
        with ExitStack() as stack:
            readers = [stack.enter_context(kept_open(reader)) for reader in readers_of(self.configs["trace_config"])]

            def engine(*own: TraceReader, **changes: Any) -> LLMEngine:
                trace = TraceConfig(readers=own)
                return stack.enter_context(LLMEngine(**{**self.configs, "trace_config": trace, **changes}))

            records, views = Records(), {name: TokenOrigins() for name in drafts}
            whole = engine(scheduler_config=in_one_piece(self.configs["scheduler_config"]))
            self.show_streams({"in pieces": engine(*readers, records), "whole": whole}, records, num_streams)
            if drafts:
                engines = {n: engine(*readers, views[n], speculative_config=own) for n, own in drafts.items()}
                self.show_drafts({NO_DRAFTS: engine(), **engines}, views)

    # --- 1. a long prompt among streams -------------------------------------------------------------------------------

    def show_streams(self, engines: Mapping[str, LLMEngine], records: Records, num_streams: int) -> None:
        """Print the steps of the long prompt, and the gaps of the streams when it runs in pieces and whole."""
        first = engines["in pieces"]
        prompt, budget = long_question(first), first.engine_core.scheduler.max_num_batched_tokens
        headline(
            self.console,
            "1. A long prompt arrives among streams",
            f"{some(num_streams, 'answer')} being streamed; when each has {BEFORE} tokens, a prompt of "
            f"{some(len(prompt), 'token')} arrives. One engine computes it whole, as m4, and the streams wait. The other "
            f"gives each stream a token in every step, and cuts the prompt so that a step has at most "
            f"{some(budget, 'token')}.",
        )
        output = self.run_streams(first, prompt, num_streams).output
        bullets(self.console, steps_of(records, output.request_id))
        self.console.print(Text(f"\n{output.request_id}: {output.text}\n", style="green"))
        first.tracer.close()  # what follows is measured without a trace
        with self.console.status("measuring", refresh_per_second=2):
            runs = take_turns(engines, lambda engine: self.run_streams(engine, prompt, num_streams))
        self.console.print("[bold]The first stream: a mark for each token, time from left to right")
        self.console.print(timelines({name: own[-1].streams[0] for name, own in runs.items()}))
        gaps = {name: [run.longest_gap for run in own] for name, own in runs.items()}
        waits = {name: [run.output.metrics.time_to_first_token or 0.0 for run in runs[name]] for name in RECORDED_WAITS}
        bullets(
            self.console,
            [
                f"The longest gap of a stream is {compared(gaps, RECORDED_GAPS)}",
                f"The price: the first token of the long prompt comes after {compared(waits, RECORDED_WAITS)}",
            ],
        )

    def run_streams(self, engine: LLMEngine, prompt: list[int], num_streams: int) -> Run:
        """Start the streams, add the long prompt when each has `BEFORE` tokens, and step until all have ended."""
        params, began = replace(self.params, n=1, max_tokens=STREAMED, min_tokens=STREAMED), time.perf_counter()
        questions = [f"What is {TERMS[i % len(TERMS)]}?" for i in range(num_streams)]
        times = {engine.add_request(ask(engine, text), params, **self.options): list[float]() for text in questions}
        outputs, late, arrival = dict[str, RequestOutput](), "", 0.0
        while engine.has_unfinished_requests():
            if not late and all(len(own) >= BEFORE for own in times.values()):
                arrival = time.perf_counter() - began
                late = engine.add_request(prompt, several(self.params, self.params.n), **self.options)
            for rid, output in engine.step().items():
                outputs[rid] = checked(output)
                times.get(rid, []).append(time.perf_counter() - began)
        gaps = (after - before for own in times.values() for before, after in pairwise(own) if after > arrival)
        return Run(list(times.values()), max(gaps), outputs[late])

    # --- 2. drafts ----------------------------------------------------------------------------------------------------

    def show_drafts(self, engines: Mapping[str, LLMEngine], views: Mapping[str, TokenOrigins]) -> None:
        """Print each answer with the origins of its tokens, and the steps and the speed of each way to draft."""
        headline(self.console, "2. Two ways to draft, on three kinds of text", DRAFTS)
        marks = self.console.no_color or not self.console.is_terminal
        self.console.print(legend(with_marks=marks))
        prompts, outputs = kinds_of_text(engines[NO_DRAFTS]), dict[tuple[str, str], RequestOutput]()
        for kind, prompt in prompts.items():
            for name, engine in engines.items():
                outputs[kind, name] = output = self.answer(engine, prompt)
                if name in views:
                    decode = partial(engine.engine_core.input_processor.tokenizer.decode, skip_special_tokens=True)
                    text = coloured(views[name].tokens[output.request_id], decode, with_marks=marks)
                    self.console.print(Text(f"\n{kind}, {name}: ", style="bold").append(text))
        for engine in engines.values():
            engine.tracer.close()  # what follows is measured without a trace
        with self.console.status("measuring", refresh_per_second=2):
            seconds = {
                kind: take_turns(engines, lambda engine, prompt=prompt: self.seconds(engine, prompt))  # type: ignore[misc]
                for kind, prompt in prompts.items()
            }
        self.console.print(speed_table(outputs, seconds))
        same = [outputs[kind, name].token_ids == outputs[kind, NO_DRAFTS].token_ids for kind in prompts for name in views]
        bullets(
            self.console,
            [
                "",
                "An accepted draft saves a step, and a rejected one costs time: a draft model runs for both.",
                f"{sum(same)} of {some(len(same), 'answer')} are the same as without drafts, token for token.",
            ],
        )

    def answer(self, engine: LLMEngine, prompt: list[int]) -> RequestOutput:
        """Answer one prompt."""
        return checked(engine.generate(prompt, replace(self.params, n=1), **self.options))

    def seconds(self, engine: LLMEngine, prompt: list[int]) -> float:
        """Return the time of one answer."""
        began = time.perf_counter()
        self.answer(engine, prompt)
        return time.perf_counter() - began


def in_one_piece(config: SchedulerConfig) -> SchedulerConfig:
    """Return `config` without pieces of prompts, as in m4."""
    off: dict[str, Any] = {"chunked_prefill_size": None, "target_gap_ms": None, "max_num_batched_tokens": None}
    return replace(config, schedule="prefill_first", enable_chunked_prefill=False, **off)


def steps_of(records: Records, rid: str) -> Iterator[str]:
    """Yield the batches with this prompt, or with a piece of it."""
    for record in records:
        event = record.event
        if isinstance(event, Batch) and any(each.partition("/")[0] == rid for each in event.rids[: event.num_prompts]):
            yield f"step {record.step}: {event.explain()}"


def timelines(streams: Mapping[str, Sequence[float]]) -> Table:
    """Return a line for each stream, on one scale, with a mark for each token."""
    table, end = Table.grid(padding=(0, 2, 0, 0)), max(times[-1] for times in streams.values())
    for name, times in streams.items():
        places = {int(WIDTH * moment / end) for moment in times}
        table.add_row(name, "".join("|" if place in places else " " for place in range(WIDTH + 1)))
    return table


def speed_table(
    outputs: Mapping[tuple[str, str], RequestOutput], seconds: Mapping[str, Mapping[str, Sequence[float]]]
) -> Table:
    """Return a line for each text and way to draft: tokens, drafts, and the speed in times that without drafts."""
    table = Table("text", "drafts by", "tokens", "drafts", "accepted", "tokens/s", "speed", "recorded", box=None)
    for (kind, name), output in outputs.items():
        metrics, own = output.metrics, {name: median(each) for name, each in seconds[kind].items()}
        counts = (metrics.num_output_tokens, metrics.num_draft_tokens, metrics.num_accepted_tokens)
        speed, recorded = own[NO_DRAFTS] / own[name], RECORDED_SPEEDS.get((kind, name), 1.0)
        per_second = metrics.num_output_tokens / own[name]
        table.add_row(kind, name, *(f"{count:,}" for count in counts), f"{per_second:,.0f}", f"x {speed:.1f}", f"x {recorded:.1f}")
    return table


def ask(engine: LLMEngine, text: str) -> list[int]:
    """Return the prompt of a user's message."""
    return as_tokens(engine, [{"role": "user", "content": text}])


def long_question(engine: LLMEngine) -> list[int]:
    """Return a list of all codes, and a question about one of them."""
    return ask(engine, f"{codes(range(len(NOUNS)))} What is the code of {NOUNS[len(NOUNS) // 2]}?")


def kinds_of_text(engine: LLMEngine) -> dict[str, list[int]]:
    """Return the prompts of part 2: a text to repeat, a term to explain, a code to look up."""
    return {
        "repeat": ask(engine, f"Repeat this text:\n{TEXT}"),
        "explain": ask(engine, "Why does multi-turn chat benefit from cached KV?"),
        "recall": ask(engine, f"{codes(range(12))} What is the code of {NOUNS[5]}?"),
    }
