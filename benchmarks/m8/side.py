"""One side of the measurement, in processes of its own: `torchrun ... -m benchmarks.m8.side FOLDER`, or python alone.

The first rank reads one question after the other from the folder (`question-1.json`) and writes the answers. The
settings of the engine are in `settings.json`. So two sides take turns, each with an engine that stays.
"""

import json
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lesson import SEED, Row

MILLISECONDS = 1e3


class Seen:
    """Keeps the collectives of the last step."""

    def __init__(self) -> None:
        self.last: Any = None

    def read(self, record: Any) -> None:
        """Take an event."""
        if record.event.kind == "collectives":
            self.last = record.event

    def close(self) -> None:
        """Do nothing."""


def built(settings: Row, reader: Seen) -> Any:
    """Return the engine of this side; on other ranks this does not return."""
    from m8_parallel import CacheConfig, LLMEngine, ModelConfig, SchedulerConfig, TraceConfig

    torch.set_num_threads(settings["threads"])
    return LLMEngine(
        model_config=ModelConfig(**settings["model"], device="cpu", seed=SEED),
        cache_config=CacheConfig(kv_cache_memory_bytes=settings["kv_bytes"], prefix_cache="chunk"),
        scheduler_config=SchedulerConfig(max_num_seqs=settings["most"], max_num_batched_tokens=2048),
        trace_config=TraceConfig(readers=(reader,)),
    )


def step_seconds(engine: Any, number: int, length: int, num_steps: int) -> Row:
    """Return the median seconds of a decode step of so many requests behind `length` tokens, and those of the step with
    their prompts."""
    from m8_parallel import SamplingParams

    rng, params = random.Random(SEED), SamplingParams(max_tokens=num_steps + 1, ignore_eos=True, temperature=0.0)
    for request_id in range(number):
        prompt = [rng.randrange(4000) for _ in range(length)]
        engine.add_request(prompt, params, request_id=str(request_id))
    began = time.perf_counter()
    engine.step()
    prompts, seconds = time.perf_counter() - began, []
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return {"prompts": prompts, "decode": statistics.median(seconds)}


def answered(engine: Any, seen: Seen, question: Row) -> Row:
    """Return the answer to a question."""
    found = step_seconds(engine, **question)
    if seen.last is not None:
        event = seen.last
        found["collectives"] = [
            [kind, size, seconds] for kind, size, seconds in zip(event.kinds, event.sizes, event.seconds, strict=True)
        ]
    found["ranks"] = [vars(each) for each in engine.stats().ranks] if hasattr(engine.stats(), "ranks") else []
    found["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def main(folder: Path) -> None:
    """Serve a folder, until a question is `null`."""
    seen = Seen()
    with built(json.loads((folder / "settings.json").read_text("utf-8")), seen) as engine:
        number = 0
        while True:
            number += 1
            path = folder / f"question-{number}.json"
            while not path.exists():
                time.sleep(0.01)
            question = json.loads(path.read_text("utf-8"))
            if question is None:
                return
            written = path.with_suffix(".tmp")
            written.write_text(json.dumps(answered(engine, seen, question)), encoding="utf-8")
            written.rename(folder / f"answer-{number}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
