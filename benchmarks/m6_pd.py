"""Measures what prefill and decode apart cost and win on one machine: `python -m benchmarks.m6_pd`.

What the two phases ask of a machine (`roofline`); what moves for a request, against the arithmetic (`bytes`); how fast
pages go through the memory between two engines, against a plain copy (`bandwidth`); what a request pays for it
(`overhead`); and what becomes of streams when long prompts arrive in bursts (`gaps`). The group is one process for
prompts and one for answers with a thread each. Beside it stands one engine, with one thread and with two: on a machine
of two cores the second is the fair comparison, unless waking a second thread costs more than it brings. Writes
`results/m6_pd.json` after every part, then `results/m6_pd.md` and the plots. Times are medians of rounds in which the
sides take turns.

    python -m benchmarks.m6_pd                    all of it, in some minutes
    python -m benchmarks.m6_pd --parts gaps       one part again; the others stay as they were
    python -m benchmarks.m6_pd --quick            a small version; its numbers are no results
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import ASSETS, RESULTS, environment, interleaved
from benchmarks.m3_paged_attention import measure, start
from benchmarks.m5_gaps import ANSWER, Traffic, measured
from benchmarks.m6_pd_plots import draw_plots
from benchmarks.m6_pd_tables import tables
from benchmarks.m6_roofline import roofline
from m1_single_request.config import DEFAULT_MODEL as TEXT_MODEL
from m3_paged_attention.attention.registry import choose
from m3_paged_attention.kv_cache_config import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from m6_multimodal_pd import CacheConfig, DisaggregationConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from m6_multimodal_pd.disaggregation.page_store import PageStore
from m6_multimodal_pd.disaggregation.runtime.shared_memory import SharedMemorySegments
from m6_multimodal_pd.disaggregation.staging import StagedSource, StagedTarget

SEED = 1
NAME = "m6_pd"
ALONE, BOTH_CORES, GROUP = "one engine, 1 thread", "one engine, 2 threads", "prefill + decode, 1 thread each"
PAGE_SIZE = 16
Row = dict[str, Any]


def configs() -> Row:
    """Of every engine here."""
    return {
        "model_config": ModelConfig(model=TEXT_MODEL, device="cpu", dtype="float32", max_model_len=2048, seed=SEED),
        "cache_config": CacheConfig(page_size=PAGE_SIZE, kv_cache_memory_bytes=2**28),
        "scheduler_config": SchedulerConfig(max_num_seqs=32),
    }


class Side:
    """An engine whose cache is emptied before it is measured, and which then has so many threads in this process."""

    def __init__(self, engine: LLMEngine, threads: int) -> None:
        self.engine, self.threads = engine, threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def flush_cache(self) -> None:
        """Starts a turn."""
        torch.set_num_threads(self.threads)
        self.engine.flush_cache()


@contextmanager
def all_sides() -> Iterator[dict[str, Side]]:
    """One engine with one and with two threads, and a group whose processes have one each."""
    torch.set_num_threads(1)  # what the processes are told
    with LLMEngine(disaggregation_config=DisaggregationConfig(), **configs()) as group, LLMEngine(**configs()) as alone:
        yield {ALONE: Side(alone, 1), BOTH_CORES: Side(alone, 2), GROUP: Side(group, 1)}


# --- what is measured -------------------------------------------------------------------------------------------------


def bytes_moved(lengths: Sequence[int]) -> Row:
    """What a request's prompt moves, counted where it is sent, and what it should be."""
    with LLMEngine(disaggregation_config=DisaggregationConfig(transport="in_process"), **configs()) as engine:
        source: Any = engine.engine_core.router.links.engines["prefill-0"].side.transport  # type: ignore[attr-defined]
        page_bytes, rows, sent = source.store.page_bytes, [], [0]
        send = source.send

        def counted(target: str, pages: Sequence[int]) -> Any:
            ticket = send(target, pages)
            sent[0] += 0 if ticket is None else len(pages) * page_bytes
            return ticket

        source.send = counted
        for number, length in enumerate(lengths):
            before = sent[0]
            prompt = [300 + (7 * i * i + number) % 3000 for i in range(length)]
            engine.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
            moved = sent[0] - before
            pages = -(-length // PAGE_SIZE)
            rows.append({"tokens": length, "pages": pages, "expected": pages * page_bytes, "moved": moved})
            before = sent[0]
            longer = [*prompt, *range(400, 400 + PAGE_SIZE)]
            engine.generate(longer, SamplingParams(max_tokens=4, ignore_eos=True))
            rows[-1]["second_turn"] = sent[0] - before
        return {"page_bytes": page_bytes, "bytes_per_token": page_bytes // PAGE_SIZE, "rows": rows}


def bandwidth(sizes: Sequence[int], rounds: int) -> Row:
    """Pages through shared memory, out and in, against copying as many bytes once."""
    spec = KVCacheSpec(block_size=PAGE_SIZE, num_layers=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    most = max(sizes)
    here, there = (
        PageStore([KVStorage(KVCacheConfig(spec=spec, num_blocks=most), device=torch.device("cpu"))]) for _ in range(2)
    )
    source = StagedSource(here, SharedMemorySegments("benchsource"), num_frames=most)
    target = StagedTarget(there, SharedMemorySegments("benchtarget"))
    rows = []
    for count in sizes:
        pages = list(range(1, count + 1))
        plain_from = torch.ones(count, here.page_bytes, dtype=torch.uint8)
        plain_to = torch.empty_like(plain_from)

        def through(pages: list[int] = pages) -> float:
            began = time.perf_counter()
            ticket = source.send("decode", pages)
            assert ticket is not None
            target.receive("prefill", ticket, pages)
            seconds = time.perf_counter() - began
            source.release("decode", ticket.number)
            return seconds

        def plain(to: torch.Tensor = plain_to, of: torch.Tensor = plain_from) -> float:
            began = time.perf_counter()
            to.copy_(of)
            return time.perf_counter() - began

        took = interleaved({"through": through, "plain": plain}, rounds=rounds)
        num_bytes = count * here.page_bytes
        rows.append(
            {"pages": count, "bytes": num_bytes, "seconds": took["through"], "plain": took["plain"]}
            | {"gb_s": num_bytes / took["through"] / 1e9, "plain_gb_s": num_bytes / took["plain"] / 1e9}
        )
    source.close()
    target.close()
    return {"rows": rows}


def overhead(lengths: Sequence[int], rounds: int) -> Row:
    """One request at a time: its first token, and each further one."""
    found: Row = {}
    with all_sides() as sides:
        for length in lengths:
            took: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
            for turn in range(rounds + 1):
                for name, engine in sides.items():
                    engine.flush_cache()
                    prompt = [300 + (7 * i * i + 31 * turn) % 3000 for i in range(length)]
                    metrics = engine.generate(prompt, SamplingParams(max_tokens=32, ignore_eos=True)).metrics
                    if turn:
                        took[name].append((metrics.time_to_first_token or 0.0, metrics.time_per_output_token or 0.0))
            found[str(length)] = {
                name: {"ttft": statistics.median(t for t, _ in all_), "tpot": statistics.median(t for _, t in all_)}
                for name, all_ in took.items()
            }
    return found


def gaps(traffic: Traffic, rounds: int) -> Row:
    """Streams beside long prompts."""
    with all_sides() as sides:
        found = measured(sides, traffic, rounds)
    base = found[ALONE]
    for row in found.values():
        row["p95_share"], row["longest_share"] = row["p95"] / base["p95"], row["longest"] / base["longest"]
        row["throughput_share"] = row["tokens_per_second"] / base["tokens_per_second"]
        row["times_ttft"] = row["mean_ttft"] / base["mean_ttft"]
    return {
        "traffic": vars(traffic) | {"answer": ANSWER, "num_prompts": traffic.num_prompts},
        "rounds": rounds,
        "sides": found,
    }


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, and print the tables."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements per number, of which the median counts")
    parser.add_argument("--parts", default="", help="parts to measure, with commas between them; the others are kept")
    parser.add_argument("--quick", action="store_true", help="little of everything: to see that all of it works")
    args = parser.parse_args(argv)
    lengths = (20, 300) if args.quick else (20, 100, 300, 1000)
    traffic = Traffic(num_streams=2, stream_tokens=40, prompt_tokens=200) if args.quick else Traffic(num_streams=4)
    sizes: Row = (
        {"prefills": (16,), "batches": (1, 4), "mixed": (4, 16), "context": 16}
        if args.quick
        else {"prefills": (16, 64, 256, 512), "batches": (1, 4, 16, 64), "mixed": (16, 256), "context": 128}
    )
    todo: dict[str, Callable[[], Any]] = {
        "roofline": lambda: roofline(**sizes, seed=SEED),
        "bytes": lambda: bytes_moved(lengths),
        "bandwidth": lambda: bandwidth((1, 16, 64) if args.quick else (1, 4, 16, 64, 256, 1024), 20 * args.rounds),
        "overhead": lambda: overhead(lengths, 3 * args.rounds),
        "gaps": lambda: gaps(traffic, args.rounds),
    }
    chosen = args.parts.split(",") if args.parts else list(todo)
    if unknown := [name for name in chosen if name not in todo]:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(todo)}")
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = Path(tempfile.gettempdir()) / NAME if args.quick else RESULTS
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{NAME}.json"
    env = environment(model=Path(TEXT_MODEL), seed=SEED) | {"backend": choose("auto", torch.device("cpu"))}
    results = start(path, env, args.quick)

    def save() -> None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    measure(results, chosen, todo, save, Console(stderr=True))
    text = tables(results)
    (folder / f"{NAME}.md").write_text(text, encoding="utf-8")
    draw_plots(results["parts"], folder if args.quick else ASSETS)
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
