"""Tour of the demo: a long prompt arrives among streams; two ways to draft tokens, on three kinds of text.

Part of `python -m m5_chunked_prefill_spec.demo`; no part of the engine depends on it. The texts are made of what the
model that ships can do: it explains terms, repeats texts, and restates codes from its prompt.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import mean, median
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from m1_single_request.demo_tour import bullets, checked
from m1_single_request.events import some
from m2_continuous_batching.demo_tour import open_part
from m4_radix_cache.demo_tour import NOUNS, TERMS, Stage, beside_recorded, codes, prompt_of, sized, tokenizer_of
from m5_chunked_prefill_spec import LLMEngine, RequestOutput, SamplingParams, SchedulerConfig, SpeculativeConfig
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
QUESTIONS = {
    "repeat": f"Repeat this text:\n{TEXT}",
    "explain": "Why does multi-turn chat benefit from cached KV?",
    "recall": f"{codes(range(12))} What is the code of {NOUNS[5]}?",
}

Request = tuple[list[int], SamplingParams]


class Run(NamedTuple):
    """Streams, and long prompts that arrive among them, on one engine. All times are in seconds."""

    stream: list[float]
    """Times of the tokens of the first stream, since the arrival of the first long prompt."""
    times: tuple[float, float, float]
    """Longest gap between two tokens of a stream, mean time to first token of the long prompts, and the total."""
    output: RequestOutput
    """Answer to the last long prompt."""


class Tour(Stage):
    """The parts of m5's tour."""

    engine_class = LLMEngine

    def run(self, drafts: Mapping[str, SpeculativeConfig], num_streams: int) -> None:
        """Run both parts; each engine has a memory of its own."""
        self.configs["cache_config"] = sized(self.configs["cache_config"], ROOM)
        with self.stack:
            if self.configs["scheduler_config"].enable_chunked_prefill:
                self.show_streams(num_streams)
            else:
                self.console.print("Part 1, a long prompt in pieces, is left out: --no-chunked-prefill.")
            if drafts:
                self.show_drafts({NO_DRAFTS: SpeculativeConfig(), **drafts})

    def show_streams(self, num_streams: int) -> None:
        """Print the steps of the long prompt, and the gaps of the streams when it runs in pieces and whole.

        {answers} being streamed; when they have {before} tokens each, a prompt of {prompt} arrives. One engine computes
        it whole, as m4, and the streams wait. The other cuts the prompt so that a step has at most {step}; {order}.
        """
        limits = self.configs["scheduler_config"]
        engine = self.engine()
        prompt = prompt_of(engine, f"{codes(range(len(NOUNS)))} What is the code of {NOUNS[len(NOUNS) // 2]}?")
        is_decode_first = limits.schedule == "decode_first"
        numbers = {
            "answers": some(num_streams, "answer"),
            "before": BEFORE,
            "prompt": some(len(prompt), "token"),
            "step": some(limits.max_num_batched_tokens, "token"),
            "order": "each stream gets a token in every step" if is_decode_first else "the streams wait here, too",
        }
        open_part(self.console, "1. A long prompt arrives among streams", self.show_streams, **numbers)
        params = replace(self.params, n=1, max_tokens=STREAMED, min_tokens=STREAMED)
        questions = [f"What is {TERMS[i % len(TERMS)]}?" for i in range(num_streams)]
        streams = [(prompt_of(engine, question), params) for question in questions]
        run = partial(run_streams, streams=streams, late=[(prompt, self.params)], every=BEFORE, options=self.options)
        output = run(engine).output
        self.show_steps(output)
        engines = {"in pieces": engine, "whole": self.engine(scheduler_config=in_one_piece(limits))}
        run(engines["whole"])
        runs = self.measured(engines, run)
        self.console.print("[bold]The first stream, from the arrival of the long prompt on: a mark for each token")
        last = {name: own[-1].stream for name, own in runs.items()}
        end = max((moment for stream in last.values() for moment in stream), default=1.0)
        self.console.print(timelines(last, end))
        gaps = {name: [run.times[0] for run in own] for name, own in runs.items()}
        waits = {name: [run.times[1] for run in runs[name]] for name in RECORDED_WAITS}
        gap = beside_recorded(gaps, RECORDED_GAPS, f"{LARGER} on {RECORDED_ON}")
        wait = beside_recorded(waits, RECORDED_WAITS, f"{LARGER} on {RECORDED_ON}")
        bullets(self.console, [f"Longest gap of a stream: {gap}", f"First token of the long prompt: after {wait}"])

    def show_steps(self, late: RequestOutput) -> None:
        """Print the first and the last steps of the long prompt, and the answer to it."""
        steps = self.records.sentences(lambda event: isinstance(event, Batch) and has_prompt(event, late.request_id))
        middle = steps[2:-1] if len(steps) < 5 else [f"{len(steps) - 3} more steps like these"]
        bullets(self.console, [*steps[:2], *middle, *steps[2:][-1:]])
        self.console.print(Text(f"\n{late.request_id}: {late.text}\n", style="green"))

    def show_drafts(self, drafts: Mapping[str, SpeculativeConfig]) -> None:
        """Print each answer with the origins of its tokens, and the drafts and the speed of each way to draft.

        A text to repeat, a term to explain, a code to look up. Without drafts every token takes a step. ngram drafts
        the tokens that followed an earlier occurrence of the last ones; draft_model drafts with a small model. One step
        of the model verifies all drafts, and drops those that it would not have generated itself.
        """
        open_part(self.console, "2. Two ways to draft, on three kinds of text", self.show_drafts)
        self.params, marks = replace(self.params, n=1), self.console.no_color or not self.console.is_terminal
        self.console.print(legend(with_marks=marks))
        self.readers.append(origins := TokenOrigins())
        engines, outputs = dict[str, LLMEngine](), dict[tuple[str, str], RequestOutput]()
        for name, config in drafts.items():
            engines[name] = engine = self.engine(speculative_config=config)
            decode = partial(tokenizer_of(engine).decode, skip_special_tokens=True)
            for kind, prompt in kinds_of_text(engine).items():
                (output,) = self.answer(engine, prompt)
                outputs[kind, name] = output
                if name != NO_DRAFTS:
                    text = coloured(origins.tokens[output.request_id], decode, with_marks=marks)
                    self.console.print(Text(f"\n{kind}, {name}: ", style="bold").append(text))
        prompts = kinds_of_text(engines[NO_DRAFTS])
        rounds = {kind: self.measured(engines, partial(self.seconds, prompt)) for kind, prompt in prompts.items()}
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


def run_streams(
    engine: Any, streams: Sequence[Request], late: Sequence[Request], *, every: int, options: Mapping[str, Any]
) -> Run:
    """Run streams from an empty cache; the next late request arrives when they have `every` tokens more on average."""
    engine.flush_cache()
    began, arrivals, done = time.perf_counter(), list[float](), list[RequestOutput]()
    times = {engine.add_request(*request, **options): list[float]() for request in streams}
    while engine.has_unfinished_requests():
        due = sum(map(len, times.values())) // (every * len(times))
        for request in late[len(arrivals) : due]:
            engine.add_request(*request, **options)
            arrivals.append(time.perf_counter())
        for rid, output in engine.step().items():
            if rid in times:
                num_new = len(checked(output).token_ids) - len(times[rid])
                times[rid] += [time.perf_counter()] * num_new
            elif checked(output).finished:
                done.append(output)
    gaps = (after - before for own in times.values() for before, after in pairwise(own))
    stream = [at - arrivals[0] for at in next(iter(times.values())) if at > arrivals[0]]
    wait = mean(output.metrics.time_to_first_token or 0.0 for output in done)
    return Run(stream, (max(gaps), wait, time.perf_counter() - began), done[-1])


def in_one_piece(config: SchedulerConfig) -> SchedulerConfig:
    """Return `config` without pieces of prompts, as in m4."""
    off: dict[str, Any] = {"chunked_prefill_size": None, "target_gap_ms": None, "max_num_batched_tokens": None}
    return replace(config, schedule="prefill_first", enable_chunked_prefill=False, **off)


def has_prompt(batch: Batch, rid: str) -> bool:
    """Return whether the batch has this prompt, or a piece of it, perhaps for one of several answers."""
    return any(each.partition("/")[0] == rid for each in batch.rids[: batch.num_prompts])


def timelines(streams: Mapping[str, Sequence[float]], end: float) -> Table:
    """Return a line for each stream, on one scale from 0 to `end`, with a mark for each token."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, times in streams.items():
        table.add_row(name, timeline(times, end))
    return table


def timeline(times: Sequence[float], end: float) -> str:
    """Return a line from 0 to `end` with a mark at each of the times."""
    places = {int(WIDTH * moment / end) for moment in times}
    return "".join("|" if place in places else " " for place in range(WIDTH + 1))


def speed_table(
    outputs: Mapping[tuple[str, str], RequestOutput], rounds: Mapping[str, Mapping[str, Sequence[float]]]
) -> Table:
    """Return a line for each text and way to draft. An accepted draft saves a step, a rejected one only costs time."""
    table = Table("text", "drafts by", "tokens", "drafts", "accepted", "tokens/s", "speed", "recorded", box=None)
    for kind, own in rounds.items():
        seconds = {name: median(times) for name, times in own.items()}
        for name in own:
            metrics = outputs[kind, name].metrics
            counts = (metrics.num_output_tokens, metrics.num_draft_tokens, metrics.num_accepted_tokens)
            numbers = (*counts, round(metrics.num_output_tokens / seconds[name]))
            speeds = (seconds[NO_DRAFTS] / seconds[name], RECORDED_SPEEDS[kind].get(name, 1.0))
            table.add_row(kind, name, *(f"{number:,}" for number in numbers), *(f"x {speed:.1f}" for speed in speeds))
    return table


def kinds_of_text(engine: LLMEngine) -> dict[str, list[int]]:
    """Return the prompts of part 2."""
    return {kind: prompt_of(engine, question) for kind, question in QUESTIONS.items()}
