"""Prefill and decode apart: bytes, transfer, overhead of a request, gaps of streams, and the roofline.

The group is one process for prompts and one for answers with a thread each. Beside it is one engine, with one thread
and with two: on a machine of two cores the second is the fair comparison, unless waking a second thread costs more than
it brings.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.engines import EMBEDDED, Engines
from benchmarks.lesson import SEED, Row
from benchmarks.streams import Traffic, compare, measured
from benchmarks.timing import in_turns, interleaved, seconds_of
from m6_multimodal_pd import LLMEngine, SamplingParams

ALONE, BOTH_CORES, GROUP = "one engine, 1 thread", "one engine, 2 threads", "prefill + decode, 1 thread each"
PAGE_SIZE = 16


class WithThreads:
    """An engine that has so many threads in this process, from the next `flush_cache` on."""

    def __init__(self, engine: LLMEngine, threads: int) -> None:
        self.engine, self.threads = engine, threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def flush_cache(self) -> None:
        """Start a turn."""
        torch.set_num_threads(self.threads)
        self.engine.flush_cache()


@contextmanager
def all_sides() -> Iterator[dict[str, WithThreads]]:
    """Yield one engine with one and with two threads, and a group whose processes have one each."""
    torch.set_num_threads(1)  # the processes of the group get the same number
    with Engines(EMBEDDED, max_model_len=2048, seed=SEED) as engines:
        settings = {"scheduler": {"max_num_seqs": 32}}
        group = engines("m6", disaggregation={}, **settings)
        alone = engines("m6", **settings)
        yield {ALONE: WithThreads(alone, 1), BOTH_CORES: WithThreads(alone, 2), GROUP: WithThreads(group, 1)}


def prompt_of(length: int, number: int) -> list[int]:
    """Return a prompt that shares no page with others."""
    return [300 + (7 * i * i + 31 * number) % 3000 for i in range(length)]


def bytes_moved(lengths: Sequence[int]) -> Row:
    """Count the bytes that a request's prompt moves where they are sent, and by the arithmetic."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with Engines(EMBEDDED, max_model_len=2048, seed=SEED) as engines:
        engine = engines("m6", disaggregation={"transport": "in_process"})
        source = engine.engine_core.router.links.engines["prefill-0"].side.transport
        page_bytes, rows, sent, send = source.store.page_bytes, list[Row](), [0], source.send

        def counted(target: str, pages: Sequence[int]) -> Any:
            ticket = send(target, pages)
            sent[0] += 0 if ticket is None else len(pages) * page_bytes
            return ticket

        def moved_by(prompt: list[int]) -> int:
            before = sent[0]
            engine.generate(prompt, params)
            return sent[0] - before

        source.send = counted
        for number, length in enumerate(lengths):
            prompt, pages = prompt_of(length, number), -(-length // PAGE_SIZE)
            row = {"tokens": length, "pages": pages, "expected": pages * page_bytes, "moved": moved_by(prompt)}
            rows.append(row | {"second_turn": moved_by([*prompt, *range(400, 400 + PAGE_SIZE)])})
    return {"page_bytes": page_bytes, "bytes_per_token": page_bytes // PAGE_SIZE, "rows": rows}


def transfer(sizes: Sequence[int], rounds: int) -> Row:
    """Measure pages through shared memory, out and in, against copying as many bytes once."""
    from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
    from m3_paged_attention.kv_storage import KVStorage
    from m6_multimodal_pd.disaggregation.page_store import PageStore
    from m6_multimodal_pd.disaggregation.runtime.shared_memory import SharedMemorySegments
    from m6_multimodal_pd.disaggregation.staging import StagedSource, StagedTarget

    spec = KVCacheSpec(block_size=PAGE_SIZE, num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    config, cpu, rows = KVCacheConfig(spec=spec, num_blocks=max(sizes)), torch.device("cpu"), []
    here, there = (PageStore([KVStorage(config, device=cpu)]) for _ in range(2))
    source = StagedSource(here, SharedMemorySegments("benchsource"), num_frames=max(sizes))
    target = StagedTarget(there, SharedMemorySegments("benchtarget"))

    def through(pages: list[int]) -> float:
        began = time.perf_counter()
        ticket = source.send("decode", pages)
        assert ticket is not None
        target.receive("prefill", ticket, pages).write()
        seconds = time.perf_counter() - began
        source.release("decode", ticket.number)
        return seconds

    for count in sizes:
        pages, plain = list(range(1, count + 1)), torch.ones(2, count, here.page_bytes, dtype=torch.uint8)
        sides = {
            "through": lambda pages=pages: through(pages),
            "plain": lambda plain=plain: seconds_of(lambda: plain[0].copy_(plain[1])),
        }
        took, num_bytes = interleaved(sides, rounds=rounds), count * here.page_bytes
        rows.append(
            {"pages": count, "bytes": num_bytes, "seconds": took["through"], "plain": took["plain"]}
            | {"gb_s": num_bytes / took["through"] / 1e9, "plain_gb_s": num_bytes / took["plain"] / 1e9}
        )
    source.close()
    target.close()
    return {"rows": rows}


def overhead(lengths: Sequence[int], rounds: int) -> Row:
    """Measure one request at a time: its first token, and each further one."""
    params, found = SamplingParams(max_tokens=32, ignore_eos=True), dict[str, Row]()

    def answered(side: WithThreads, length: int) -> tuple[float, float]:
        side.flush_cache()
        metrics = side.engine.generate(prompt_of(length, 0), params).metrics
        return metrics.time_to_first_token or 0.0, metrics.time_per_output_token or 0.0

    with all_sides() as sides:
        for length in lengths:
            calls = {name: lambda side=side, n=length: answered(side, n) for name, side in sides.items()}
            found[str(length)] = {
                name: dict(zip(("ttft", "tpot"), map(statistics.median, zip(*times, strict=True)), strict=True))
                for name, times in in_turns(calls, rounds=rounds).items()
            }
    return found


def gaps(traffic: Traffic, rounds: int) -> Row:
    """Measure streams beside long prompts."""
    with all_sides() as sides:
        found = measured(sides, traffic.workload(), traffic.num_streams, rounds)
    compare(found, found[ALONE])
    return {"traffic": traffic.describe(), "rounds": rounds, "sides": found}


def roofline(
    *, prefills: Sequence[int], batches: Sequence[int], mixed: tuple[int, int], context: int, quick: bool
) -> Row:
    """Measure steps of prefill, of decode and of both at once below the roof of one thread.

    Random weights in the shape of Qwen3-0.6B, bfloat16: larger than any cache, as real models are. `mixed`: decodes and
    tokens of a prompt in one step.
    """
    from benchmarks.m3 import on_random_model
    from benchmarks.roofline import BUDGET, Forwards, under_roof

    def measure(engines: Engines) -> Row:
        engine = engines("m6", scheduler={"max_num_seqs": max(batches) + 1, "max_num_batched_tokens": BUDGET})
        forwards = Forwards(engine, engines.model)
        points = [forwards.prefill(length) for length in prefills]
        points += [forwards.decode(batch, context, num_steps=8) for batch in batches]
        points.append(forwards.both(mixed[0], context, mixed[1]))
        return under_roof(points, engines.model.dtype) | {"context": context, "mixed": list(mixed)}

    return on_random_model(measure, quick, kv_bytes=2 * 2**30)
