"""A first token about a picture: the picture is new, a second turn, behind another text, another picture.

Each time is the caller's, from the message to the first token of the answer, and its parts: pixels to patches, the
tower, the model, and the rest. The tower's own cost, and the memory of a picture at every station, stand here, too.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.engines import Engines
from benchmarks.texts import LARGE, SMALL, message, picture_message, pixels
from benchmarks.timing import Clocks, in_turns, medians, ratio, seconds_of
from m6_multimodal_pd import SamplingParams

QUESTION = "Describe the picture."
COLD, TURN, ELSEWHERE, OTHER = "nothing is known", "second turn", "behind another text", "another picture"
PARTS = ("patches", "tower", "model", "rest")
Row = dict[str, Any]


def first_token(engine: Any, messages: list[Row]) -> tuple[Row, str]:
    """Measure the first token of an answer, in seconds and in tokens; return them and the answer."""
    before = engine.stats()
    with Clocks(forward=engine.engine_core.executor.worker.model_runner) as clocks:
        began = time.perf_counter()
        prompt = engine.chat_prompt(messages)
        read = time.perf_counter() - began
        rid = engine.add_request(prompt, SamplingParams(max_tokens=24, ignore_eos=True))
        output: Any = None
        while output is None or not output.token_ids:
            output = engine.step().get(rid, output)
        ttft = time.perf_counter() - began
    now = engine.stats()
    while engine.has_unfinished_requests():
        output = engine.step().get(rid, output)
    tower = now.encoder_seconds - before.encoder_seconds
    parts = {"patches": read, "tower": tower, "model": clocks.seconds["forward"]}
    row = {
        "prompt_tokens": len(prompt),
        "computed_tokens": len(prompt) - output.metrics.cached_tokens,
        "encoder_runs": now.num_encoder_runs - before.num_encoder_runs,
        "ttft": ttft,
        **parts,
        "rest": ttft - sum(parts.values()),
    }
    return row, output.text


def four(engine: Any, number: int) -> dict[str, Row]:
    """Measure the four cases, from a cold start, with pictures that this round alone has."""
    engine.flush_cache()
    own = pixels(2 * number)
    asked = [message(own, QUESTION)]
    found: dict[str, Row] = {}
    found[COLD], answer = first_token(engine, asked)
    again = [*asked, message(answer, role="assistant"), message("What is at the center?")]
    found[TURN], _ = first_token(engine, again)
    found[ELSEWHERE], _ = first_token(engine, [message("Look at this. ", own)])
    found[OTHER], _ = first_token(engine, picture_message(2 * number + 1, QUESTION))
    return found


def answers(engines: Engines, *, rounds: int) -> Row:
    """Return medians of the rounds, after one that warms up; counts are those of the last."""
    engine = engines("m6")
    runs = [four(engine, number) for number in range(rounds + 1)][1:]
    cases = {}
    for name, last in runs[-1].items():
        cases[name] = last | {key: statistics.median(run[name][key] for run in runs) for key in ("ttft", *PARTS)}
        cases[name]["times_cold"] = ratio([run[name]["ttft"] for run in runs], [run[COLD]["ttft"] for run in runs])
    return {"size": LARGE, "rounds": rounds, "cases": cases}


def tower(engines: Engines, numbers: Sequence[int], *, rounds: int) -> Row:
    """Measure the vision tower over several pictures: one after the other, and all in one pass."""
    engine = engines("m6")
    network: Any = engine.engine_core.encoder.tower
    found: Row = {}
    for size in (SMALL, LARGE):
        prompts = [engine.chat_prompt([message(pixels(number, size), QUESTION)]) for number in range(max(numbers))]
        pictures = [prompt.multimodal_inputs.mm_items[0] for prompt in prompts]
        items = [(torch.from_numpy(picture.feature), picture.grid_thw) for picture in pictures]
        rows = []
        for count in numbers:
            own = items[:count]
            sides = {
                "one by one": lambda own=own: seconds_of(lambda: [network.encode([item]) for item in own]),
                "in one pass": lambda own=own: seconds_of(lambda: network.encode(own)),
            }
            seconds = in_turns(sides, rounds=rounds)
            rows.append(medians(seconds) | {"number": count, "times": ratio(*seconds.values())})
        found[f"{size[0]} x {size[1]}"] = {"tokens": network.num_tokens(items[0][1]), "numbers": rows}
    return {"sizes": found, "rounds": rounds}


def memory(engines: Engines) -> Row:
    """Count what a picture takes at every station from pixels to KV, in numbers and in bytes."""
    engine = engines("m6")
    core = engine.engine_core
    network, config = core.encoder.tower, engine.config.multimodal
    kv_bytes = core.executor.kv_cache_spec(16).bytes_per_token
    pictures = {}
    for size in (SMALL, LARGE):
        engine.flush_cache()
        prompt = engine.chat_prompt([message(pixels(0, size), QUESTION)])
        item = prompt.multimodal_inputs.mm_items[0]
        engine.generate(prompt, SamplingParams(max_tokens=1))
        pictures[f"{size[0]} x {size[1]}"] = {
            "pixels": pixels(0, size).size,
            "patches": len(item.feature),
            "feature_bytes": item.feature.nbytes,
            "tokens": item.num_tokens,
            "embedding_bytes": engine.stats().embedding_cache_bytes,
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
