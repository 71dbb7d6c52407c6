"""Last parts of the tour: the batch through two engines, and the gaps of streams while long prompts arrive.

Part of `python -m m6_multimodal_pd.demo`; no part of the engine depends on it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from random import Random
from statistics import mean, median
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.status import Status
from rich.table import Table

from m1_single_request.config import TraceConfig
from m1_single_request.demo_tour import bullets, checked
from m1_single_request.events import some
from m1_single_request.sampling_params import SamplingParams
from m4_radix_cache.demo_tour import Records, take_turns
from m5_chunked_prefill_spec.demo_tour import timelines
from m6_multimodal_pd.demo_tour import Ask, Outputs, Tour
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.llm_engine import LLMEngine
from m6_multimodal_pd.views.two_engines import TwoEnginesView, replay

NUM_STREAMS, STREAM_TOKENS, EVERY, PROMPT_TOKENS = 4, 180, 12, 1000
"""A prompt arrives whenever the streams, on average, have EVERY tokens more."""
TWO, ONE = "two engines", "one engine"
COLUMNS = ("longest gap", "first token of a prompt", "total")
RECORDED, RECORDED_ON = {TWO: (0.00595, 0.766, 1.64), ONE: (0.01747, 0.1175, 1.77)}, "AMD EPYC, 2 cores, tiny-qwen3"
"""Seconds, from `benchmarks/results/m6_pd.json`, and the machine."""


class Round(NamedTuple):
    """Streams on one engine, and long prompts that arrive among them. All times are in seconds."""

    stream: list[float]
    """Times of the tokens of the first stream, since the arrival of the first long prompt."""
    times: tuple[float, float, float]
    """By COLUMNS: the longest gap of a stream, the mean time to first token of a long prompt, and the total."""


def starting(group: DisaggregationConfig | None, console: Console) -> Status:
    """Print that the engines of a group start; return the sign of progress of a start, on a terminal, as a context."""
    if group is not None:
        console.print(f"{some(group.prefill + group.decode, 'engine')} load the model and join ...")
    return console.status("starting")


def show_two_engines(tour: Tour, group: DisaggregationConfig, batch: Mapping[str, Ask], alone: Outputs) -> None:
    """Run the batch through a group of engines, and measure the gaps. `alone`: the outputs of one engine.

    The same requests once more. One engine computes prompts, another one the answers. Before it can answer, it must
    have the KV of the prompt, which moves in chunks of whole pages, the first ones while the rest of the prompt is
    still being computed. Chunks and pages: arrived/sent, and arrived/expected.
    """
    tour.headline("4. Prefill here, decode there", show_two_engines)
    view, records = TwoEnginesView(), Records()
    trace = TraceConfig(readers=(view, records))
    with starting(group, tour.console):
        engine = LLMEngine(disaggregation_config=group, trace_config=trace, **tour.configs)
    with engine:
        with Live(get_renderable=view.draw, console=tour.console):
            *_, together = tour.run(engine, batch)
        if tour.console.is_terminal:
            replay(records, tour.console)
        same = sum(tokens_of(alone[rid]) == tokens_of(together[rid]) for rid in batch)
        tour.console.print(f"\n{same} of {len(batch)} requests have the same tokens as from one engine, in part 1.")
        engine.tracer.close()  # what follows is measured without readers here
        with LLMEngine(**tour.configs) as one:
            show_gaps(tour, {TWO: engine, ONE: one})


def tokens_of(output: Any) -> list[Any]:
    """Return the tokens of all answers."""
    return [answer.token_ids for answer in output.outputs]


def show_gaps(tour: Tour, engines: Mapping[str, LLMEngine]) -> None:
    """Measure the engines in turn; print the gaps of the streams, and the price.

    Answers are streamed, and long prompts arrive. One engine must compute them between the tokens of the streams; of
    two, the one that decodes never computes a prompt.
    """
    tour.headline("5. What two engines are for", show_gaps)
    length = min(PROMPT_TOKENS, engines[ONE].stats().max_model_len // 2)
    tour.console.print(
        f"{NUM_STREAMS} streams of {STREAM_TOKENS} tokens, and a prompt of {length:,} tokens whenever each has {EVERY} "
        f"more. The two sides take turns; that takes some seconds ...\n"
    )
    with tour.console.status("measuring"):
        rounds = take_turns(engines, partial(serve, length=length))
    here = {name: tuple(map(median, zip(*(own.times for own in each), strict=True))) for name, each in rounds.items()}
    window = 12 * here[ONE][0]
    shown = {name: [at for at in each[-1].stream if 0 <= at < window] for name, each in rounds.items()}
    tour.console.print("[bold]The first stream, from the arrival of a long prompt on: a mark for each token")
    tour.console.print(timelines(shown))
    recorded = {f"{name}, recorded": own for name, own in RECORDED.items()}
    table = Table("", *COLUMNS, box=None, padding=(0, 2, 0, 0))
    for name, times in {**here, **recorded}.items():
        table.add_row(name, *(f"{seconds * 1e3:,.1f} ms" for seconds in times))
    tour.console.print(table, f"recorded on: {RECORDED_ON}\n")
    bullets(tour.console, conclusions(here))


def conclusions(here: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Yield the meaning of the times, of the recorded ones if this run was disturbed; then the price and the total."""
    (two, wait, total), (one, wait_of_one, total_of_one) = here[TWO], here[ONE]
    if one < 1.5 * two:
        yield "This run was disturbed, or its engines have no core each: the recorded times show the rule."
        two, one = RECORDED[TWO][0], RECORDED[ONE][0]
    yield (
        f"With one engine the longest gap of a stream is {one / two:.1f} times as long, because it computes prompts "
        f"between two tokens of an answer. The price: with two engines a prompt waits {wait / wait_of_one:.1f} times "
        f"as long for its first token, behind the prompts before it."
    )
    yield (
        f"The total: {total:.2f} s with two engines, {total_of_one:.2f} s with one. On one machine they share cores "
        f"and memory, and messages come on top; in a larger system each has a device of its own."
    )


def serve(engine: LLMEngine, length: int) -> Round:
    """Run the streams, and prompts of `length` random tokens, from an empty cache."""
    engine.flush_cache()
    rng, began = Random(0), time.perf_counter()
    streams: dict[str, list[float]] = {f"stream-{number}": [] for number in range(NUM_STREAMS)}
    arrivals, ttfts = list[float](), list[float]()

    def add(rid: str, num_tokens: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(rng.choices(range(256, 4000), k=num_tokens), params, request_id=rid, speculate=False)

    for rid in streams:
        add(rid, 64, STREAM_TOKENS)
    while engine.has_unfinished_requests():
        due = sum(map(len, streams.values())) // (NUM_STREAMS * EVERY)
        if len(arrivals) < min(due, STREAM_TOKENS // EVERY - 1):
            add(f"prompt-{len(arrivals)}", length, 8)
            arrivals.append(time.perf_counter() - began)
        for rid, output in engine.step().items():
            if rid in streams:
                new = len(checked(output).token_ids) - len(streams[rid])
                streams[rid] += [time.perf_counter() - began] * new
            elif checked(output).finished:
                ttfts.append(output.metrics.time_to_first_token or 0.0)
    gaps = (after - before for times in streams.values() for before, after in pairwise(times))
    first = [at - arrivals[0] for at in streams["stream-0"]]
    return Round(first, (max(gaps), mean(ttfts), time.perf_counter() - began))
