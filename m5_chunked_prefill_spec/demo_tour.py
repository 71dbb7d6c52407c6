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

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.demo_tour import bullets, checked, prompt_of
from m1_single_request.events import some
from m1_single_request.trace_readers import at_most
from m2_continuous_batching.demo_tour import open_part, same_answers
from m3_paged_attention.demo_tour import with_room
from m4_radix_cache.demo_tour import NOUNS, TERMS, Stage, beside_recorded, codes
from m5_chunked_prefill_spec import LLMEngine, RequestOutput, SamplingParams, SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.events import Batch
from m5_chunked_prefill_spec.views.token_origins import TokenOrigins, coloured, legend

ROOM = 8192  # tokens of KV memory
TOUR_BUDGET = 64  # tokens of a step: few, so that the long prompt has many pieces
BEFORE, STREAMED = 6, 48  # tokens of each stream, before the long prompt arrives and in all
WIDTH = 60  # columns of a timeline
TITLES = {"gap": "longest gap", "wait": "first token of a prompt", "total": "total"}
RECORDED_ON = "with 8 streams and prompts of 1,000 tokens on 2 cores of an AMD EPYC"
RECORDED_TIMES = {"gap": {"in pieces": 0.0068, "whole": 0.0636}, "wait": {"in pieces": 0.315, "whole": 0.057}}
"""Seconds. These and `RECORDED_SPEEDS` are from `benchmarks/results/m5_chunked_prefill_spec.md`."""
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
    gap: float
    """Longest time between two tokens of a stream."""
    wait: float
    """Mean time to first token of the long prompts."""
    total: float
    output: RequestOutput
    """Answer to the last long prompt."""


class Tour(Stage):
    """The parts of m5's tour."""

    engine_class = LLMEngine

    def run(self, drafts: Sequence[SpeculativeConfig], num_streams: int) -> None:
        """Run both parts; each engine has a memory of its own."""
        self.configs["cache_config"] = with_room(self.configs["cache_config"], max_total_tokens=ROOM)
        self.params = replace(self.params, n=1)
        with self.stack:
            if self.configs["scheduler_config"].enable_chunked_prefill:
                self.show_streams(num_streams)
            else:
                self.console.print("Part 1, a long prompt in pieces, is left out: --no-chunked-prefill.")
            self.show_drafts({NO_DRAFTS: SpeculativeConfig(), **{str(config.method): config for config in drafts}})

    def show_streams(self, num_streams: int) -> None:
        """Print the steps of the long prompt, and the gaps of the streams when it runs in pieces and whole.

        {answers} being streamed; when they have {before} tokens each, a prompt of {prompt} tokens arrives. One engine
        computes it whole, as m4, and the streams wait. The other cuts the prompt so that a step has at most
        {limits.max_num_batched_tokens} tokens; {order}.
        """
        limits = self.configs["scheduler_config"]
        engine = self.engine()
        prompt = prompt_of(engine, f"{codes(range(len(NOUNS)))} What is the code of {NOUNS[len(NOUNS) // 2]}?")
        is_decode_first = limits.schedule == "decode_first"
        order = "each stream gets a token in every step" if is_decode_first else "the streams wait here, too"
        numbers = {"answers": some(num_streams, "answer"), "before": BEFORE, "prompt": len(prompt), "order": order}
        open_part(self.console, "1. A long prompt arrives among streams", self.show_streams, limits=limits, **numbers)
        params = replace(self.params, max_tokens=STREAMED, min_tokens=STREAMED)
        questions = [f"What is {TERMS[i % len(TERMS)]}?" for i in range(num_streams)]
        streams = [(prompt_of(engine, question), params) for question in questions]
        run = partial(run_streams, streams=streams, late=[(prompt, self.params)], every=BEFORE, options=self.options)
        output = run(engine).output
        rid = output.request_id
        *steps, last = self.sentences(lambda event: isinstance(event, Batch) and rid in event.rids[: event.num_prompts])
        bullets(self.console, [*at_most(2, steps), last])
        self.console.print(Text(f"\n{rid}: {output.text}\n", style="green"))
        whole = SchedulerConfig(
            max_num_seqs=limits.max_num_seqs, schedule="prefill_first", enable_chunked_prefill=False
        )
        engines = {"in pieces": engine, "whole": self.engine(scheduler_config=whole)}
        show_times(self.console, self.measured(engines, run), RECORDED_TIMES, RECORDED_ON)

    def show_drafts(self, drafts: Mapping[str, SpeculativeConfig]) -> None:
        """Print each answer with the origins of its tokens, and the drafts and the speed of each way to draft.

        A text to repeat, a term to explain, a code to look up. Without drafts every token takes a step. ngram drafts
        the tokens that followed an earlier occurrence of the last ones; draft_model drafts with a small model. One step
        of the model verifies all drafts, and drops those that it would not have generated itself.
        """
        open_part(self.console, "2. Two ways to draft, on three kinds of text", self.show_drafts)
        marks = self.console.no_color or not self.console.is_terminal
        self.console.print(legend(with_marks=marks))
        self.readers.append(origins := TokenOrigins())
        engines, outputs = dict[str, LLMEngine](), dict[tuple[str, str], RequestOutput]()
        for name, config in drafts.items():
            engines[name] = engine = self.engine(speculative_config=config)
            decode = partial(engine.engine_core.input_processor.tokenizer.decode, skip_special_tokens=True)
            prompts = kinds_of_text(engine)
            for kind, prompt in prompts.items():
                (output,) = self.answer(engine, prompt)
                outputs[kind, name] = output
                if name != NO_DRAFTS:
                    text = coloured(origins.tokens[output.request_id], decode, with_marks=marks)
                    self.console.print(Text(f"\n{kind}, {name}: ", style="bold").append(text))
        rounds = {kind: self.measured(engines, partial(self.seconds, prompt)) for kind, prompt in prompts.items()}
        self.console.print()
        self.console.print(speed_table(outputs, rounds))
        self.console.print()
        self.console.print(same_answers(*([outputs[kind, name].token_ids for kind in QUESTIONS] for name in drafts)))

    def seconds(self, prompt: list[int], engine: LLMEngine) -> float:
        """Return the time of one answer."""
        engine.flush_cache()
        return self.answer(engine, prompt)[0].metrics.latency or 0.0


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
    return Run(stream, max(gaps), wait, time.perf_counter() - began, done[-1])


def show_times(
    console: Console, rounds: Mapping[str, Sequence[Run]], recorded: Mapping[str, Mapping[str, float]], source: str
) -> None:
    """Print the first stream of the last round of two engines; then their times, medians, beside recorded ones."""
    console.print("[bold]The first stream, from the arrival of a long prompt on: a mark for each token")
    runs, lines = {name: own[-1] for name, own in rounds.items()}, Table.grid(padding=(0, 2, 0, 0))
    end = min(max(run.stream[-1] for run in runs.values()), 12 * max(run.gap for run in runs.values()))
    for name, run in runs.items():
        lines.add_row(name, timeline(run.stream, end))
    table = Table("", *(TITLES[kind] for kind in recorded), box=None, padding=(0, 2, 0, 0))
    here = {name: [median(getattr(run, kind) for run in own) for kind in recorded] for name, own in rounds.items()}
    past = {f"{name}, recorded": [seconds[name] for seconds in recorded.values()] for name in rounds}
    for name, times in (here | past).items():
        table.add_row(name, *(f"{seconds * 1e3:,.1f} ms" for seconds in times))
    console.print(lines, Text(), table, Text(), sep="\n")
    gaps = {name: [run.gap for run in own] for name, own in rounds.items()}
    bullets(console, [f"Longest gap of a stream: {beside_recorded(gaps, recorded['gap'], source)}"])


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
