"""Metrics in Prometheus' format, with SGLang's names.

Gauges, and the evicted tokens, are read from the engine when the page is requested. The other counters are about
answers: those of tokens are the sums of the `usage` of finished ones. Requests that fail or are rejected are in no
counter; the log and the access log have them. Times to first tokens and gaps also contain requests that have failed or
were aborted; a gap is measured where the output is read, and ends later if the event loop is busy. The names have
SGLang's prefix, so that its dashboards work. New in this milestone. SGLang: `metrics/collector.py`; vLLM:
`v1/metrics/loggers.py`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from m1_single_request.outputs import RequestOutput
from m6_multimodal_pd.outputs import EngineStats
from m7_serving.openai.usage import usage

M = TypeVar("M", Gauge, Counter, Histogram)
SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds
LONG = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
MIN_INTERVAL_S = 1.0
"""Shortest time of which the throughput is the mean."""


def used_tokens(stats: EngineStats) -> int:
    """Return the number of tokens of the KV memory that running requests occupy."""
    return stats.max_total_tokens - stats.available_size - stats.evictable_size


GAUGES: Mapping[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_running_reqs": ("Requests that run", lambda stats: stats.num_running),
    "num_queue_reqs": ("Requests that wait", lambda stats: stats.num_waiting),
    "num_used_tokens": ("Tokens of the KV memory that running requests occupy", used_tokens),
    "token_usage": (
        "Share of the KV memory that running requests occupy",
        lambda stats: used_tokens(stats) / (stats.max_total_tokens or 1),  # 0: no engine is there
    ),
    "cache_hit_rate": ("Cached tokens as a share of all tokens of admitted requests", lambda stats: stats.hit_rate),
    "spec_accept_length": ("Tokens of a verification of drafts, on average", lambda stats: stats.accept_length),
    "num_retracted_reqs": ("Retractions of running requests in all", lambda stats: stats.num_retractions),
    "num_preempted_reqs": ("Requests preempted for one of higher priority in all", lambda stats: stats.num_preemptions),
}
"""What is read from the engine: a text for Prometheus, and the value."""


class Metrics:
    """The metrics of a server, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._gauges = {name: self._new(Gauge, name, text) for name, (text, _) in GAUGES.items()}
        self._throughput = self._new(Gauge, "gen_throughput", "Output tokens per second since the last reading")
        self._prompt_tokens = self._new(Counter, "prompt_tokens", "Prompt tokens of answered requests")
        self._output_tokens = self._new(Counter, "generation_tokens", "Output tokens of answered requests")
        self._cached_tokens = self._new(Counter, "cached_tokens", "Prompt tokens of answered requests that were cached")
        self._evicted_tokens = self._new(Counter, "evicted_tokens", "Tokens that the caches have evicted")
        self._num_requests = self._new(Counter, "num_requests", "Answered requests")
        self._num_aborted = self._new(
            Counter, "num_aborted_requests", "Requests whose client left, or that took too long"
        )
        self._first_token_s = self._new(
            Histogram, "time_to_first_token_seconds", "From arrival to the first token", buckets=LONG
        )
        self._gap_s = self._new(
            Histogram, "inter_token_latency_seconds", "Between two tokens of an output", buckets=SHORT
        )
        self._request_s = self._new(Histogram, "e2e_request_latency_seconds", "From arrival to the end", buckets=LONG)
        self._reading = (time.monotonic(), 0)  # time and number of output tokens
        self._num_evicted = 0  # at the last reading; less after the loss of an engine

    def page(self, stats: EngineStats) -> bytes:
        """Return the page of all metrics; `stats` are the engine's now."""
        for name, (_, value_of) in GAUGES.items():
            self._gauges[name].set(value_of(stats))
        self._evicted_tokens.inc(max(0, stats.num_evicted_tokens - self._num_evicted))
        self._num_evicted = stats.num_evicted_tokens
        now, (before, num_tokens) = time.monotonic(), self._reading
        if now - before >= MIN_INTERVAL_S:
            self._throughput.set(max(0, stats.num_output_tokens - num_tokens) / (now - before))
            self._reading = (now, stats.num_output_tokens)
        return generate_latest(self.registry)

    @contextmanager
    def watch(self, num_prompts: int) -> Iterator[Callable[[int, RequestOutput], None]]:
        """Count the requests of one call: a context whose value receives their outputs, with the index of the prompt.

        Requests that fail, or are rejected, are no answers.
        """
        newest: dict[int, RequestOutput] = {}
        times: dict[int, float] = {}
        try:
            yield partial(self._observe, newest, times)
        except (GeneratorExit, asyncio.CancelledError):
            self._num_aborted.inc(num_prompts - sum(output.finished for output in newest.values()))
            raise
        tokens = usage(newest.values())
        self._prompt_tokens.inc(tokens["prompt_tokens"])
        self._output_tokens.inc(tokens["completion_tokens"])
        self._cached_tokens.inc(tokens["prompt_tokens_details"]["cached_tokens"])
        self._num_requests.inc(num_prompts)
        for output in newest.values():
            self._request_s.observe(output.metrics.latency or 0.0)

    def _observe(
        self, newest: dict[int, RequestOutput], times: dict[int, float], index: int, output: RequestOutput
    ) -> None:
        """Note the times of the new tokens of an output. Its outputs (`n`) are computed side by side, so that each of
        the new tokens has taken the time since the last ones, times their number, divided by the number of new
        tokens."""
        metrics, width = output.metrics, len(output.outputs)
        if metrics.first_token_time is not None:
            if index not in times:
                times[index] = metrics.first_token_time
                self._first_token_s.observe(metrics.first_token_time - metrics.arrival_time)
            num_before = max(_num_tokens(newest[index]) if index in newest else 0, width)  # the first ones have no gap
            num_new = _num_tokens(output) - num_before
            if num_new > 0:
                now = metrics.finished_time or time.monotonic()
                for _ in range(num_new):
                    self._gap_s.observe((now - times[index]) * width / num_new)
                times[index] = now
        newest[index] = output

    def _new(self, kind: type[M], name: str, text: str, **options: Any) -> M:
        metric = kind(f"sglang:{name}", text, ["model_name"], registry=self.registry, **options)
        return metric.labels(self._model_name)


def _num_tokens(output: RequestOutput) -> int:
    return sum(len(completion.token_ids) for completion in output.outputs)
