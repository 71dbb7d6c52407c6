"""Experts: m3 beside transformers and beside a dense model that reads as much, and the weights that a step reads.

A sparse shape of 1.5 billion weights, random, in bfloat16: 17 layers of 48 experts, of which a token uses four. Beside
it a dense model whose MLP is as wide as four experts, so that a token computes as much. transformers computes experts
in two ways, `grouped_mm` and `eager`; a ratio is to the faster one of a round. The sides take turns in one process.
Decoding: seconds of a step of so many requests, each behind 16 tokens. A prompt: 2,048 tokens at once, or fewer.

`reads` counts from the trace how many experts the tokens of a step choose. If the router is fair, a batch of B tokens
is expected to read E (1 - (1 - k/E)^B) of E experts, k for each token.
"""

import io
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from benchmarks.engines import Model, build, random_model
from benchmarks.lesson import SEED, Lesson, Row, Size
from benchmarks.reference import decoder_shape, load
from benchmarks.roofline import Forwards, experts_read, under_roof
from benchmarks.timing import ratio

SHAPE: Row = {
    "num_hidden_layers": 17,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
EXPERTS: Row = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 48,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "intermediate_size": 2048,
}
DENSE: Row = {"intermediate_size": EXPERTS["num_experts_per_tok"] * EXPERTS["moe_intermediate_size"]}
BATCHES, CONTEXT, PROMPT = (1, 16, 64), 16, 2048
MAPPED, MAP_COLUMNS = 16, 84
"""The requests of the step whose experts are drawn, and the width of the drawing."""
WAYS = ("grouped_mm", "eager")
"""How transformers computes experts."""


def models(folder: Path, quick: bool) -> dict[str, Model]:
    """Write the configurations of the two models."""
    less = {"num_hidden_layers": 2, "vocab_size": 4096} if quick else {}
    return {
        "sparse": random_model(folder / "sparse", **SHAPE | EXPERTS | less),
        "dense": random_model(folder / "dense", **SHAPE | DENSE | less),
    }


def engine(model: Model, *readers: Any) -> Any:
    """Return an m3 engine with random weights."""
    settings: Row = {"trace": {"readers": readers, "experts": True}} if readers else {}
    return build(
        "m3",
        model={
            "model": str(model.directory),
            "dtype": model.dtype,
            "load_format": model.load_format,
            "device": "cpu",
            "seed": SEED,
        },
        scheduler={"max_num_seqs": max(BATCHES), "max_num_batched_tokens": SHAPE["max_position_embeddings"]},
        cache={"kv_cache_memory_bytes": 2**30},
        **settings,
    )


def prompts(number: int, length: int) -> list[list[int]]:
    """Return random prompts, the same in every call."""
    rng = random.Random(SEED)
    return [[rng.randrange(4000) for _ in range(length)] for _ in range(number)]


def decode_step(engine: Any, number: int, num_steps: int) -> float:
    """Return the median seconds of a decode step of m3."""
    from m3_paged_attention import SamplingParams

    params = SamplingParams(max_tokens=num_steps + 1, ignore_eos=True, temperature=0.0)
    for request_id, prompt in enumerate(prompts(number, CONTEXT)):
        engine.add_request(prompt, params, request_id=str(request_id))
    engine.step()
    return statistics.median(timed(engine.step) for _ in range(num_steps))


def prompt_step(engine: Any, length: int) -> float:
    """Return the seconds of a prompt in m3."""
    from m3_paged_attention import SamplingParams

    engine.add_request(prompts(1, length)[0], SamplingParams(max_tokens=1, ignore_eos=True), request_id="prompt")
    return timed(engine.step)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Theirs:
    """transformers' model with the weights of the engine."""

    def __init__(self, model: Model) -> None:
        self.model = load(model, SEED)

    @torch.inference_mode()
    def decode_step(self, way: str, number: int, num_steps: int) -> float:
        """Return the median seconds of a decode step."""
        self.model.set_experts_implementation(way)
        found = self.model(torch.tensor(prompts(number, CONTEXT)), use_cache=True)
        cache, seconds = found.past_key_values, []
        for _ in range(num_steps):
            began = time.perf_counter()
            found = self.model(found.logits[:, -1:].argmax(-1), cache=cache, use_cache=True)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    @torch.inference_mode()
    def prompt_step(self, way: str, length: int) -> float:
        """Return the seconds of a prompt."""
        self.model.set_experts_implementation(way)
        tokens = torch.tensor(prompts(1, length))
        return timed(lambda: self.model(tokens, use_cache=True, logits_to_keep=1))


def speed(size: Size) -> Row:
    """Measure all sides in turns, for each batch and for a prompt."""
    num_steps, length = (2, 64) if size.quick else (24, PROMPT)
    with TemporaryDirectory() as folder:
        made = models(Path(folder), size.quick)
        theirs = Theirs(made["sparse"])
        with engine(made["sparse"]) as sparse, engine(made["dense"]) as dense:
            cells: dict[str, tuple[int, Callable[[Any], float], Callable[[str], float]]] = {
                f"decode {number}": (
                    number,
                    partial(decode_step, number=number, num_steps=num_steps),
                    partial(theirs.decode_step, number=number, num_steps=num_steps),
                )
                for number in BATCHES
            }
            cells["prompt"] = length, partial(prompt_step, length=length), partial(theirs.prompt_step, length=length)
            rows = []
            for name, (num_tokens, ours, other) in cells.items():
                seconds: dict[str, list[float]] = {each: [] for each in ("m3", "m3 dense", *WAYS)}
                for number in range(size.rounds + 1):
                    found = {"m3": ours(sparse), "m3 dense": ours(dense)} | {way: other(way) for way in WAYS}
                    if number:  # the first round warms up
                        for each, value in found.items():
                            seconds[each].append(value)
                fastest = [min(pair) for pair in zip(*(seconds[way] for way in WAYS), strict=True)]
                rows.append(
                    {
                        "cell": name,
                        "tokens": num_tokens,
                        "seconds": {each: statistics.median(values) for each, values in seconds.items()},
                        "times transformers": ratio(fastest, seconds["m3"]),
                        "of dense": ratio(seconds["m3 dense"], seconds["m3"]),
                    }
                )
    return {"rows": rows}


def reads(size: Size) -> Row:
    """Count the experts that steps read."""
    from m3_paged_attention.expert_events import ExpertsUsed
    from m3_paged_attention.views.expert_map import ExpertMap, draw

    num_steps = 2 if size.quick else 24
    with TemporaryDirectory() as folder:
        model, view = models(Path(folder), size.quick)["sparse"], ExpertMap()
        config = json.loads((model.directory / "config.json").read_text(encoding="utf-8"))
        rows, drawn = [], Console(file=io.StringIO(), width=MAP_COLUMNS)
        with engine(model, view) as own:
            for number in BATCHES:
                view.frames.clear()
                decode_step(own, number, num_steps)
                frames = [frame for frame in view.frames if frame.used.num_tokens == number]
                used: ExpertsUsed = frames[0].used
                if number == MAPPED:
                    drawn.print(draw(frames[0], MAP_COLUMNS))
                per_layer = statistics.mean(frame.used.num_read for frame in frames) / len(used.layers)
                rows.append(
                    {
                        "tokens": number,
                        "experts": used.num_experts,
                        "read": per_layer,
                        "expected": experts_read(decoder_shape(model).experts, number),
                        "bytes": statistics.mean(frame.used.read_bytes for frame in frames),
                        "unevenness": statistics.mean(frame.unevenness for frame in frames),
                    }
                )
        sizes = {"layers": config["num_hidden_layers"], "expert_bytes": used.expert_bytes}
        return {"rows": rows, "map": drawn.file.getvalue(), **sizes}


def roofline(size: Size) -> Row:
    """Measure steps of both models below the roof of the machine."""
    num_steps, length = (2, 64) if size.quick else (24, PROMPT)
    points: list[Row] = []
    with TemporaryDirectory() as folder:
        for name, model in models(Path(folder), size.quick).items():
            with engine(model) as own:
                forwards = Forwards(own, model)
                measured = [forwards.decode(number, CONTEXT, num_steps) for number in BATCHES]
                points += [point | {"model": name} for point in (*measured, forwards.prefill(length))]
    return under_roof(points, "bfloat16")


LESSON = Lesson(
    "m3_experts",
    lambda size: {"speed": partial(speed, size), "reads": partial(reads, size), "roofline": partial(roofline, size)},
    model=Path("sparse and dense models, random weights"),
    environment=lambda quick: {"sparse_model": SHAPE | EXPERTS, "dense_model": SHAPE | DENSE},
    rounds=5,
)
