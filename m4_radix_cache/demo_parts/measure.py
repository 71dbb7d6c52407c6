"""The time to the first token with and without a prefix cache: the same requests on two engines, in turn.

Part of `python -m m4_radix_cache.demo`; nothing in the engine depends on it. One engine has the cache that the flags
ask for, the other a `ChunkCache`, which keeps nothing; all else is the same. Neither has a trace.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from m1_single_request.errors import EngineError
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m4_radix_cache.config import CacheConfig
from m4_radix_cache.llm_engine import LLMEngine

WITH, WITHOUT = "with", "without"
ROUNDS = 3


@dataclass(frozen=True)
class Measured:
    """One engine on some requests: medians over the rounds, for each request in order."""

    seconds_to_first_token: list[float]
    token_ids: list[tuple[tuple[int, ...], ...]]
    """What was said, all answers to each request; the same in every round unless requests draw without a seed."""

    def mean(self, rows: Sequence[int] | None = None) -> float:
        """Seconds to the first token, the mean of these requests or all."""
        waits = self.seconds_to_first_token
        return mean(waits if rows is None else [waits[row] for row in rows])


@contextmanager
def rivals(configs: Mapping[str, Any], cache: CacheConfig) -> Iterator[dict[str, LLMEngine]]:
    """Two engines while the context lasts; only the one without a cache if that is what `cache` asks for."""
    cache = replace(cache, debug=False)
    caches = {WITH: cache, WITHOUT: replace(cache, prefix_cache="chunk", eviction_policy="lru")}
    if cache.prefix_cache == "chunk":
        del caches[WITH]
    with ExitStack() as stack:
        yield {name: stack.enter_context(LLMEngine(cache_config=own, **configs)) for name, own in caches.items()}


def measure(engines: Mapping[str, LLMEngine], run: Callable[[LLMEngine], list[RequestOutput]]) -> dict[str, Measured]:
    """Let every engine `run` the same requests, in turn, so that a slow moment of the machine meets all of them.

    Each round begins with an empty cache. The first round of all is not counted: the first steps of an engine are
    slower. Raises `EngineError` if a request fails.
    """
    outputs: dict[str, list[list[RequestOutput]]] = {name: [] for name in engines}
    for number in range(ROUNDS + 1):
        for name, engine in engines.items():
            engine.flush_cache()
            done = checked(run(engine))
            if number:
                outputs[name].append(done)
    return {name: _medians(runs) for name, runs in outputs.items()}


def run_together(
    engine: LLMEngine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], options: Mapping[str, Any]
) -> list[RequestOutput]:
    """Hand all requests in at once and step until they have ended; their last outputs, in order."""
    request_ids = [engine.add_request(p, own, **options) for p, own in zip(prompts, params, strict=True)]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= engine.step()
    return [outputs[request_id] for request_id in request_ids]


def checked(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """The same outputs, if none of them failed; otherwise raises `EngineError`."""
    for output in outputs:
        if output.error is not None:
            raise EngineError(f"{output.request_id} failed: {output.error}") from output.error
    return outputs


def _medians(runs: list[list[RequestOutput]]) -> Measured:
    waits = [[output.metrics.time_to_first_token or 0.0 for output in outputs] for outputs in runs]
    said = [tuple(answer.token_ids for answer in output.outputs) for output in runs[-1]]
    return Measured([median(each) for each in zip(*waits, strict=True)], said)
