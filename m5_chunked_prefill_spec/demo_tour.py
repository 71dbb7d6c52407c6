"""Tour of the demo: a long prompt arrives among streams; two ways to draft tokens, on three kinds of text.

Part of `python -m m5_chunked_prefill_spec.demo`; no part of the engine depends on it. The texts are made of what the
model that ships can do: it explains terms, repeats texts, and restates codes from its prompt.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from m1_single_request.demo_tour import bullets, checked, headline
from m1_single_request.events import some
from m4_radix_cache.demo_tour import NOUNS, TERMS, Records, Stage, as_tokens, codes, compared, sized, take_turns
from m5_chunked_prefill_spec import LLMEngine, RequestOutput, SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.events import Batch
from m5_chunked_prefill_spec.views.token_origins import TokenOrigins, coloured, legend

ROOM = 8192  # tokens of KV memory
TOUR_BUDGET = 64  # tokens of a step: few, so that the long prompt has many pieces
BEFORE, STREAMED = 6, 48  # tokens of each stream, before the long prompt arrives and in all
WIDTH = 60  # columns of a timeline
RECORDED_GAPS, RECORDED_WAITS = {"in pieces": 0.0068, "whole": 0.0636}, {"whole": 0.057, "in pieces": 0.315}
"""Seconds: the longest gap of a stream, and the time to first token of long prompts. These and `RECORDED_SPEEDS` are
from `benchmarks/results/m5_chunked_prefill_spec.md`."""
LARGER, RECORDED_ON = "with 8 streams and prompts of 1,000 tokens", "2 cores of an AMD EPYC"
NO_DRAFTS = "no drafts"
RECORDED_SPEEDS = {
    "repeat": {"ngram": 2.54, "draft_model": 1.13},
    "explain": {"ngram": 0.99, "draft_model": 1.36},
    "recall": {"ngram": 1.33, "draft_model": 0.81},
}
"""Speed with drafts, in times that without."""
TEXT = (
    "Seven boats cross under the bridge; people wave, 37 of them. ship lemon sugar paper 48 kite lamp, garden table "
    "warm winter jacket! river stone 905 forest candle: clock window / little green bird song"
)
DRAFTS = (
    "A text to repeat, a term to explain, a code to look up. Without drafts every token takes a step. ngram drafts the "
    "tokens that followed an earlier occurrence of the last ones; draft_model drafts with a small model. One step of "
    "the model verifies all drafts, and drops those that it would not have generated itself."
)


class Run(NamedTuple):
    """Streams, and a long prompt that arrives among them, on one engine. All times are in seconds."""

    stream: list[float]
    """Times of the tokens of the first stream, since the start."""
    longest_gap: float
    """Longest time between two tokens of a stream after the arrival of the long prompt."""
    output: RequestOutput
    """Answer to the long prompt."""


class Tour(Stage):
    """The parts of m5's tour."""

    engine_class = LLMEngine

    def run(self, drafts: Mapping[str, SpeculativeConfig], num_streams: int) -> None:
        """Run both parts; each engine has a memory of its own."""
        self.configs["cache_config"] = sized(self.configs["cache_config"], ROOM)
        with self.stack:
            records, views = Records(), {name: TokenOrigins() for name in drafts}
            whole = self.engine(scheduler_config=in_one_piece(self.configs["scheduler_config"]))
            self.show_streams({"in pieces": self.engine(*self.readers, records), "whole": whole}, records, num_streams)
            if drafts:
                self.params = replace(self.params, n=1)
                engines = {n: self.engine(*self.readers, views[n], speculative_config=own) for n, own in drafts.items()}
                self.show_drafts({NO_DRAFTS: self.engine(), **engines}, views)

    def show_streams(self, engines: Mapping[str, LLMEngine], records: Records, num_streams: int) -> None:
        """Print the steps of the long prompt, and the gaps of the streams when it runs in pieces and whole."""
        first = engines["in pieces"]
        prompt = ask(first, f"{codes(range(len(NOUNS)))} What is the code of {NOUNS[len(NOUNS) // 2]}?")
        intro = (
            f"{some(num_streams, 'answer')} being streamed; when each has {BEFORE} tokens, a prompt of "
            f"{some(len(prompt), 'token')} arrives. One engine computes it whole, as m4, and the streams wait. The "
            f"other gives each stream a token in every step, and cuts the prompt so that a step has at most "
            f"{some(first.engine_core.scheduler.max_num_batched_tokens, 'token')}."
        )
        headline(self.console, "1. A long prompt arrives among streams", intro)
        late = self.run_streams(first, prompt, num_streams).output
        first.tracer.close()  # what follows is measured without a trace
        steps = records.told(lambda event: isinstance(event, Batch) and has_prompt(event, late.request_id))
        middle = steps[2:-1] if len(steps) < 5 else [f"{len(steps) - 3} more steps like these"]
        bullets(self.console, [*steps[:2], *middle, *steps[2:][-1:]])
        self.console.print(Text(f"\n{late.request_id}: {late.text}\n", style="green"))
        with self.console.status("measuring", refresh_per_second=2):
            runs = take_turns(engines, lambda engine: self.run_streams(engine, prompt, num_streams))
        self.console.print("[bold]The first stream: a mark for each token, time from left to right")
        self.console.print(timelines({name: own[-1].stream for name, own in runs.items()}))
        gaps = {name: [run.longest_gap for run in own] for name, own in runs.items()}
        waits = {name: [run.output.metrics.time_to_first_token or 0.0 for run in runs[name]] for name in RECORDED_WAITS}
        gap, wait = (
            compared(times, recorded, LARGER, RECORDED_ON)
            for times, recorded in ((gaps, RECORDED_GAPS), (waits, RECORDED_WAITS))
        )
        bullets(self.console, [f"Longest gap of a stream: {gap}", f"First token of the long prompt: after {wait}"])

    def run_streams(self, engine: LLMEngine, prompt: list[int], num_streams: int) -> Run:
        """Start the streams, add the long prompt when each has `BEFORE` tokens, and step until all have ended."""
        engine.flush_cache()
        params, began = replace(self.params, n=1, max_tokens=STREAMED, min_tokens=STREAMED), time.perf_counter()
        prompts = [ask(engine, f"What is {TERMS[i % len(TERMS)]}?") for i in range(num_streams)]
        times = {engine.add_request(own, params, **self.options): list[float]() for own in prompts}
        outputs, late, arrival = dict[str, RequestOutput](), "", 0.0
        while engine.has_unfinished_requests():
            if not late and all(len(own) >= BEFORE for own in times.values()):
                arrival = time.perf_counter() - began
                late = engine.add_request(prompt, self.params, **self.options)
            for rid, output in engine.step().items():
                outputs[rid] = checked(output)
                times.get(rid, []).append(time.perf_counter() - began)
        gaps = (after - before for own in times.values() for before, after in pairwise(own) if after > arrival)
        return Run(next(iter(times.values())), max(gaps), outputs[late])

    def show_drafts(self, engines: Mapping[str, LLMEngine], views: Mapping[str, TokenOrigins]) -> None:
        """Print each answer with the origins of its tokens, and the drafts and the speed of each way to draft."""
        headline(self.console, "2. Two ways to draft, on three kinds of text", DRAFTS)
        marks = self.console.no_color or not self.console.is_terminal
        self.console.print(legend(with_marks=marks))
        prompts, outputs = kinds_of_text(engines[NO_DRAFTS]), dict[tuple[str, str], RequestOutput]()
        for kind, prompt in prompts.items():
            for name, engine in engines.items():
                (outputs[kind, name],) = self.answer(engine, prompt)
                if name in views:
                    decode = partial(engine.engine_core.input_processor.tokenizer.decode, skip_special_tokens=True)
                    text = coloured(views[name].tokens[outputs[kind, name].request_id], decode, with_marks=marks)
                    self.console.print(Text(f"\n{kind}, {name}: ", style="bold").append(text))
        for engine in engines.values():
            engine.tracer.close()  # what follows is measured without a trace
        with self.console.status("measuring", refresh_per_second=2):
            rounds = {kind: take_turns(engines, partial(self.seconds, prompt)) for kind, prompt in prompts.items()}
        self.console.print()
        self.console.print(speed_table(outputs, rounds))
        is_same = all(output.text == outputs[kind, NO_DRAFTS].text for (kind, _), output in outputs.items())
        self.console.print(f"\nThe answers {'are the same' if is_same else 'differ'} with drafts and without.")

    def seconds(self, prompt: list[int], engine: LLMEngine) -> float:
        """Return the time of one answer."""
        engine.flush_cache()
        began = time.perf_counter()
        self.answer(engine, prompt)
        return time.perf_counter() - began


def in_one_piece(config: SchedulerConfig) -> SchedulerConfig:
    """Return `config` without pieces of prompts, as in m4."""
    off: dict[str, Any] = {"chunked_prefill_size": None, "target_gap_ms": None, "max_num_batched_tokens": None}
    return replace(config, schedule="prefill_first", enable_chunked_prefill=False, **off)


def has_prompt(batch: Batch, rid: str) -> bool:
    """Return whether the batch has this prompt, or a piece of it, perhaps for one of several answers."""
    return any(each.partition("/")[0] == rid for each in batch.rids[: batch.num_prompts])


def timelines(streams: Mapping[str, Sequence[float]]) -> Table:
    """Return a line for each stream, on one scale, with a mark for each token."""
    table, end = Table.grid(padding=(0, 2, 0, 0)), max(times[-1] for times in streams.values())
    for name, times in streams.items():
        places = {int(WIDTH * moment / end) for moment in times}
        table.add_row(name, "".join("|" if place in places else " " for place in range(WIDTH + 1)))
    return table


def speed_table(
    outputs: Mapping[tuple[str, str], RequestOutput], rounds: Mapping[str, Mapping[str, Sequence[float]]]
) -> Table:
    """Return a line for each text and way to draft. An accepted draft saves a step, a rejected one only costs time."""
    table = Table("text", "drafts by", "tokens", "drafts", "accepted", "tokens/s", "speed", "recorded", box=None)
    for (kind, name), output in outputs.items():
        metrics, seconds = output.metrics, {name: median(own) for name, own in rounds[kind].items()}
        counts = (metrics.num_output_tokens, metrics.num_draft_tokens, metrics.num_accepted_tokens)
        numbers = (*counts, round(metrics.num_output_tokens / seconds[name]))
        speeds = (seconds[NO_DRAFTS] / seconds[name], RECORDED_SPEEDS[kind].get(name, 1.0))
        table.add_row(kind, name, *(f"{number:,}" for number in numbers), *(f"x {speed:.1f}" for speed in speeds))
    return table


def ask(engine: LLMEngine, text: str) -> list[int]:
    """Return the prompt of a user's message."""
    return as_tokens(engine, [{"role": "user", "content": text}])


def kinds_of_text(engine: LLMEngine) -> dict[str, list[int]]:
    """Return the prompts of part 2: a text to repeat, a term to explain, a code to look up."""
    return {
        "repeat": ask(engine, f"Repeat this text:\n{TEXT}"),
        "explain": ask(engine, "Why does multi-turn chat benefit from cached KV?"),
        "recall": ask(engine, f"{codes(range(12))} What is the code of {NOUNS[5]}?"),
    }
