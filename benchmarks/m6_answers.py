"""A first token about a picture, four times: nothing known, a second turn, behind another text, another picture.

Each time is what a caller waits from handing in the message to the first token of the answer, and where it goes: pixels
to patches, the tower, the model, and everything else. The tower's own cost, by how many pictures share a pass, and what
a picture takes of memory at every station stand here, too.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import interleaved
from benchmarks.m6_models import LARGE, QUESTION, SMALL, Clocks, Engines, Row, image, pixels, said
from m6_multimodal_pd import LLMEngine, SamplingParams

ANSWER = 24
COLD, TURN, ELSEWHERE, OTHER = "nothing is known", "second turn", "behind another text", "another picture"
PARTS = ("patches", "tower", "model", "rest")
Messages = list[dict[str, Any]]


def first_token(engine: LLMEngine, messages: Messages) -> tuple[Row, str]:
    """What the first token of an answer took, in seconds and in tokens; and the answer."""
    before = engine.stats()
    with Clocks(engine) as clocks:
        began = time.perf_counter()
        prompt = engine.chat_prompt(messages)
        read = time.perf_counter() - began
        rid = engine.add_request(prompt, SamplingParams(max_tokens=ANSWER, ignore_eos=True))
        output: Any = None
        while output is None or not output.token_ids:
            output = engine.step().get(rid, output)
        ttft = time.perf_counter() - began
    now: Any = engine.stats()
    while engine.has_unfinished_requests():
        output = engine.step().get(rid, output)
    cached = output.metrics.cached_tokens
    tower = now.encoder_seconds - before.encoder_seconds
    parts = {"patches": read, "tower": tower, "model": clocks.seconds["forward"]}
    row = {
        "prompt_tokens": len(prompt),
        "computed_tokens": len(prompt) - cached,
        "encoder_runs": now.num_encoder_runs - before.num_encoder_runs,
        "ttft": ttft,
        **parts,
        "rest": ttft - sum(parts.values()),
    }
    return row, output.text


def four(engine: LLMEngine, number: int) -> dict[str, Row]:
    """The four cases, from a cold start, with pictures that this round alone has."""
    engine.flush_cache()
    own, other = image(2 * number, LARGE), image(2 * number + 1, LARGE)
    asked: Messages = [{"role": "user", "content": [own, said(QUESTION)]}]
    found: dict[str, Row] = {}
    found[COLD], answer = first_token(engine, asked)
    again = [*asked, {"role": "assistant", "content": answer}, {"role": "user", "content": "What is at the center?"}]
    found[TURN], _ = first_token(engine, again)
    found[ELSEWHERE], _ = first_token(engine, [{"role": "user", "content": [said("Look at this. "), own]}])
    found[OTHER], _ = first_token(engine, [{"role": "user", "content": [other, said(QUESTION)]}])
    return found


def answers(engines: Engines, *, rounds: int) -> Row:
    """Medians of the rounds, after one that warms up; counts are those of the last."""
    engine = engines.seeing()
    runs = [four(engine, number) for number in range(rounds + 1)][1:]
    cases = {}
    for name, last in runs[-1].items():
        seconds = {key: statistics.median(run[name][key] for run in runs) for key in ("ttft", *PARTS)}
        cases[name] = last | seconds
    for row in cases.values():
        row["times_cold"] = row["ttft"] / cases[COLD]["ttft"]
    return {"size": LARGE, "rounds": rounds, "cases": cases}


def tower(engines: Engines, *, numbers: Sequence[int], rounds: int) -> Row:
    """The vision tower over so many pictures: one after the other, and all in one pass."""
    engine = engines.seeing()
    encoder: Any = engine.engine_core.encoder
    found: Row = {}
    for size in (SMALL, LARGE):
        items = []
        for number in range(max(numbers)):
            prompt: Any = engine.chat_prompt([{"role": "user", "content": [image(number, size), said(QUESTION)]}])
            item = prompt.multimodal_inputs.mm_items[0]
            items.append((torch.from_numpy(item.feature), item.grid_thw))

        def one_by_one(count: int, items: Any = items) -> None:
            for item in items[:count]:
                encoder.tower.encode([item])

        def in_one_pass(count: int, items: Any = items) -> None:
            encoder.tower.encode(items[:count])

        name = f"{size[0]} x {size[1]}"
        found[name] = {"tokens": encoder.tower.num_tokens(items[0][1]), "numbers": []}
        for count in numbers:
            sides = {"one by one": _seconds(one_by_one, count), "in one pass": _seconds(in_one_pass, count)}
            row = interleaved(sides, rounds=rounds)
            found[name]["numbers"].append(row | {"number": count, "times": row["one by one"] / row["in one pass"]})
    return {"sizes": found, "rounds": rounds}


def _seconds(call: Callable[[int], None], count: int) -> Callable[[], float]:
    def measured() -> float:
        began = time.perf_counter()
        call(count)
        return time.perf_counter() - began

    return measured


def memory(engines: Engines) -> Row:
    """What a picture takes at every station from pixels to KV, in numbers and in bytes."""
    engine = engines.seeing()
    core: Any = engine.engine_core
    network, config = core.encoder.tower, engine.config.multimodal
    kv_bytes = core.executor.kv_cache_spec(16).bytes_per_token
    pictures = {}
    for size in (SMALL, LARGE):
        engine.flush_cache()
        messages: Messages = [{"role": "user", "content": [image(0, size), said(QUESTION)]}]
        prompt: Any = engine.chat_prompt(messages)
        item = prompt.multimodal_inputs.mm_items[0]
        engine.generate(prompt, SamplingParams(max_tokens=1))
        stats: Any = engine.stats()
        pictures[f"{size[0]} x {size[1]}"] = {
            "pixels": pixels(0, size).size,
            "patches": len(item.feature),
            "feature_bytes": item.feature.nbytes,
            "tokens": item.num_tokens,
            "embedding_bytes": stats.embedding_cache_bytes,
            "kv_bytes": item.num_tokens * kv_bytes,
            "held": config.embedding_cache_bytes // (item.num_tokens * network.bytes_per_token),
        }
    return {
        "hidden_size": network.hidden_size,
        "num_deepstack": network.num_deepstack,
        "bytes_per_token": network.bytes_per_token,
        "kv_bytes_per_token": kv_bytes,
        "capacity_bytes": config.embedding_cache_bytes,
        "pictures": pictures,
    }
