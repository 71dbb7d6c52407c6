"""Record the traces that the players of the site show: `python -m docs.traces`, or `python -m docs.traces m4 pictures`.

From m3 on a lesson shows the example that it explains line by line (`benchmarks/*/trace.py`). The other runs have more
requests than such an example, compare two engines, or stand on the landing page. All are runs of the models that ship,
on one thread. Every file is gzipped JSONL in `docs/assets/traces`.
"""

import asyncio
import gzip
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.traces import stepped
from m1_single_request.trace_readers import JsonlReader

FOLDER = Path(__file__).parent / "assets" / "traces"
NOUNS = "lamp zebra otter river kite candle garden mirror".split()
CODES = " ".join(f"The code of {noun} is {1635 + 531 * i:04}." for i, noun in enumerate(NOUNS))
SYSTEM = {"role": "system", "content": f"You answer questions. {CODES}"}
SCENES = ("a_big_red_circle", "a_blue_square_and_a_green_star", "a_blue_square_and_a_yellow_star")

Arrival = tuple[int, str, str, int]
"""Step before which a request arrives, its id, its question, its maximum of new tokens."""
BURST: list[Arrival] = [
    (0, "ann", "What is decode?", 12),
    (0, "bob", "What is a scheduler?", 8),
    (0, "cat", "What is continuous batching?", 20),
    (3, "dan", "What is a KV cache?", 16),
    (3, "eve", "What is padding waste?", 12),
    (4, "fay", f"{CODES} What is the code of zebra?", 10),
    (6, "gus", "What is prefill?", 14),
]
USERS: list[Arrival] = [
    (0, "user 1", "What is the code of lamp?", 10),
    (0, "user 2", "What is the code of zebra?", 10),
    (0, "user 3", "What is prefix caching?", 14),
    (4, "user 4", "What is the code of lamp?", 10),
    (6, "user 5", "What is LRU?", 14),
]
STREAMS: list[Arrival] = [
    (0, "stream 1", "What is a KV cache?", 40),
    (0, "stream 2", "What is continuous batching?", 40),
    (6, "long prompt", f"{CODES} {CODES} What is the code of zebra?", 12),
    (8, "repeats", "Repeat this text:\nsee a green lamp and a green bird and a green lamp", 24),
]


def run(package: str, path: Path, arrivals: Sequence[Arrival], *, system: Any = None, **configs: Any) -> None:
    """Run requests on an engine of a milestone, and write the trace."""
    face = import_module(package)
    with face.LLMEngine(trace_config=face.TraceConfig(jsonl=path), **configured(face, configs)) as engine:
        drive(engine, face, arrivals, lambda text: [*([system] if system else []), {"role": "user", "content": text}])


def configured(face: Any, configs: dict[str, Any]) -> dict[str, Any]:
    """Return configurations of a milestone, from the values of their fields."""
    classes = {name: "".join(map(str.title, name.split("_"))) for name in configs}
    return {name: getattr(face, classes[name])(**fields) for name, fields in configs.items()}


def drive(engine: Any, face: Any, arrivals: Sequence[Arrival], messages: Callable[[str], Any]) -> None:
    """Add each request before its step, and run steps to the end."""
    asked: dict[int, list[tuple[str, Any, Any]]] = {}
    for step, rid, text, max_tokens in arrivals:
        asked.setdefault(step + 1, []).append((rid, messages(text), face.SamplingParams(max_tokens=max_tokens)))
    for _ in stepped(engine, asked):
        pass


def m1(path: Path) -> None:
    run("m1_single_request", path, BURST[:3])


def m2(path: Path) -> None:
    run("m2_continuous_batching", path, BURST, scheduler_config={"max_num_seqs": 4, "max_num_batched_tokens": 160})


def shared(path: Path) -> None:
    run("m4_radix_cache", path, USERS, system=SYSTEM, cache_config={"max_total_tokens": 480, "page_size": 8})


def alone(path: Path) -> None:
    cache = {"max_total_tokens": 480, "page_size": 8, "prefix_cache": "chunk"}
    run("m4_radix_cache", path, USERS, system=SYSTEM, cache_config=cache)


def pieces(path: Path) -> None:
    run("m5_chunked_prefill_spec", path, STREAMS, scheduler_config={"max_num_batched_tokens": 48}, **GUESSES, **PAGES)


def whole(path: Path) -> None:
    run("m5_chunked_prefill_spec", path, STREAMS, scheduler_config={"max_num_batched_tokens": 512}, **PAGES)


PAGES = {"cache_config": {"max_total_tokens": 1024, "page_size": 8}}
GUESSES = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


def pictures(path: Path) -> None:
    """Pictures beside questions about text; the same picture comes twice."""
    import m6_multimodal_pd as face

    folder = Path(face.__file__).parent / "demo_pictures"
    shown: list[Arrival] = [
        (0, "text", "What is a KV cache?", 24),
        (1, "circle", f"{SCENES[0]}: Describe the picture.", 16),
        (2, "square", f"{SCENES[1]}: Describe the picture.", 16),
        (12, "again", f"{SCENES[0]}: What color is the circle?", 8),
        (13, "long", f"{CODES} What is the code of zebra?", 8),
    ]

    def messages(text: str) -> Any:
        name, _, question = text.partition(": ")
        if name not in SCENES:
            return [{"role": "user", "content": text}]
        image = {"type": "image", "image": str(folder / f"{name}.png")}
        return [{"role": "user", "content": [image, {"type": "text", "text": question}]}]

    memory = face.CacheConfig(max_total_tokens=512, page_size=8)
    with face.LLMEngine(cache_config=memory, trace_config=face.TraceConfig(jsonl=path)) as engine:
        drive(engine, face, shown, messages)


def m7(path: Path) -> None:
    """Four clients, one of which leaves in the middle of its answer."""
    from m7_serving import AsyncLLM, CacheConfig, SamplingParams, TraceConfig

    configs = {"cache_config": CacheConfig(max_total_tokens=512, page_size=8), "trace_config": TraceConfig(jsonl=path)}

    async def client(llm: AsyncLLM, arrival: Arrival) -> None:
        _, rid, text, max_tokens = arrival
        outputs = llm.generate(
            [{"role": "user", "content": text}], SamplingParams(max_tokens=max_tokens), request_id=rid
        )
        async with aclosing(outputs):
            async for output in outputs:
                if rid == "cat" and len(output.token_ids) >= 6:
                    return

    async def serve() -> None:
        async with await AsyncLLM.start(**configs) as llm:
            await asyncio.gather(*(client(llm, arrival) for arrival in BURST[:4]))

    asyncio.run(serve())


def lesson(name: str, path: Path) -> None:
    """Run the example of a lesson, and write all its events."""
    example = import_module(f"benchmarks.{name}.trace")
    with patch.object(example, "TraceConfig", partial(example.TraceConfig, jsonl=path)):
        example.traced_steps()


def tiers(part: str, path: Path) -> None:
    """Run a part of the example of the second part of lesson 4: `chat` or `urgent`."""
    example = import_module("benchmarks.m4_tiers.trace")
    example.PARTS[part](JsonlReader(path))


RUNS = {each.__name__: each for each in (m1, m2, m7, shared, alone, pieces, whole, pictures)}
RUNS |= {name: partial(lesson, name) for name in ("m3", "m4", "m5", "m6", "m6_pd", "m6_overlap")}
RUNS |= {"m4_tiers": partial(tiers, "chat"), "m4_preemption": partial(tiers, "urgent")}


def main(names: Sequence[str]) -> None:
    """Record runs, all if none is named."""
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.jsonl")
            RUNS[name](path)
            packed = gzip.compress(path.read_bytes(), mtime=0)
        (FOLDER / f"{name}.jsonl.gz").write_bytes(packed)
        print(f"{name}: {len(packed):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
