"""Linear layers: huge pages, weights of eight bits and what they change, from one layer to the speed of a model.

A linear layer of bfloat16 weights: on pages of 4 KiB, on huge pages, and quantized, in turns and with one thread, whose
own time counts. Each call takes the next of twelve such layers (of int8: 24), so that none is in a cache. The ratios
are medians over the rounds.

Quality, with the embedded checkpoint: questions of its three skills that training never used, with the share of answers
that are exactly right, the perplexity of the right answers, and the mean difference of a token's log-probability from
that of float32, in questions and right answers. Groups of 32 inputs are measured with a patched constant, on the torch
backend. Speed, with the shape of Qwen3-0.6B and random weights: sides take turns, each in its own process, and a ratio
is the median over the rounds.
"""

import math
import statistics
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoTokenizer

from benchmarks.compare import measure, paired
from benchmarks.engines import MAX_MODEL_LEN, TEXT_MODEL, build, random_model
from benchmarks.lesson import SEED, Lesson, Row, Size
from benchmarks.timing import ratio
from training.evaluate import cases

SKILLS = "explain, unseen wording", "recall", "repeat"
WEIGHTS: dict[str, Row] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, float32": {"dtype": "float32", "quantization": "int8"},
    "int8, bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "int8, float32, groups of 32": {"dtype": "float32", "quantization": "int8", "attention_backend": "torch"},
}
SHAPE, NUM_LAYERS = (6144, 1024), 12
"""Output and input features, and the number of such layers that take turns, so that none is in the cache."""
ROWS = (1, 2, 4, 8, 16, 24, 64)
STREAMS = {1: 48, 4: 32, 16: 24}
"""Requests at once: tokens of an answer."""


def layers(size: Size) -> Row:
    """Measure a layer of bfloat16 weights, for each number of rows."""
    from m3_paged_attention.attention import native_backend, native_linear
    from m3_paged_attention.int8_weight import Int8Weight

    torch.set_num_threads(1)
    backend, weight = native_backend.NativeBackend(), torch.randn(SHAPE).bfloat16()
    with patch.object(native_linear, "on_huge_pages", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8)):
        sides = {"small pages": [backend.linear(weight) for _ in range(NUM_LAYERS)]}
    sides["huge pages"] = [backend.linear(weight) for _ in range(NUM_LAYERS)]
    sides["int8"] = [backend.linear(Int8Weight.of(weight)) for _ in range(2 * NUM_LAYERS)]
    rows = []
    for count in ROWS:
        hidden, seconds = torch.randn(count, SHAPE[1]).bfloat16(), {name: [] for name in sides}
        for number in range(2 if size.quick else 40 * size.rounds):
            for name, own in sides.items():
                began = time.thread_time()
                own[number % len(own)](hidden)
                seconds[name].append(time.thread_time() - began)
        times = {name: statistics.median(own) for name, own in seconds.items()}
        ratios = {f"times {name}": ratio(seconds["small pages"], seconds[name]) for name in ("huge pages", "int8")}
        rows.append({"rows": count, "weights": weight.numel(), "seconds": times} | ratios)
    return {"rows": rows}


def quality(size: Size) -> Row:
    """Measure the answers with each kind of weights."""
    every = 40 if size.quick else 4
    tokenizer = AutoTokenizer.from_pretrained(TEXT_MODEL)
    asked = [case for case in cases(tokenizer) if case.skill in SKILLS][::every]
    prompts = [
        tokenizer.apply_chat_template(list(case.messages), add_generation_prompt=True, return_dict=False)
        for case in asked
    ]
    right = [tokenizer(case.answer, add_special_tokens=False).input_ids for case in asked]
    rows = [quality_of(name, asked, prompts, right) for name in WEIGHTS]
    exact = rows[0]["losses"]
    for row in rows:
        row["difference"] = statistics.mean(abs(a - b) for a, b in zip(row["losses"], exact, strict=True))
    return {"rows": [{name: value for name, value in row.items() if name != "losses"} for row in rows]}


def quality_of(name: str, asked: Any, prompts: list[list[int]], right: list[list[int]]) -> Row:
    """Return a row of the table: memory, perplexity, the loss of each token, and the share of right answers."""
    from m3_paged_attention import ModelConfig, SamplingParams, int8_weight
    from m3_paged_attention.model_loader import load_model

    model = {"model": TEXT_MODEL, "device": "cpu", **WEIGHTS[name]}
    group = 32 if name.endswith("groups of 32") else int8_weight.GROUP_SIZE
    with patch.object(int8_weight, "GROUP_SIZE", group), build("m3", model=model) as engine:
        weight_bytes = load_model(ModelConfig(**model)).weight_bytes
        outputs = list(engine.generate_batch(prompts, SamplingParams(max_tokens=128, temperature=0.0)).values())
        whole = [prompt + answer for prompt, answer in zip(prompts, right, strict=True)]
        scored = engine.generate_batch(whole, SamplingParams(max_tokens=1, prompt_logprobs=0)).values()
    losses = [
        [-row[token].logprob for row, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
        for output, tokens in zip(scored, whole, strict=True)
    ]
    of_answers = [loss for own, answer in zip(losses, right, strict=True) for loss in own[-len(answer) :]]
    found: Row = {"weights": name, "bytes": weight_bytes, "perplexity": math.exp(statistics.mean(of_answers))}
    found["losses"] = [loss for own in losses for loss in own]
    for skill in SKILLS:
        of_skill = [i for i, case in enumerate(asked) if case.skill == skill]
        hits = sum(outputs[i].text.strip() == asked[i].answer for i in of_skill)
        found[skill.split(",")[0]] = hits / len(of_skill)
    return found | {"questions": len(asked)}


def speed(size: Size) -> Row:
    """Measure bfloat16 and int8 side by side, for each number of requests at once."""
    with TemporaryDirectory() as folder:
        model = random_model(Path(folder))
        config = {"model": str(model.directory), "dtype": model.dtype, "load_format": model.load_format}
        config |= {"device": "cpu", "max_model_len": MAX_MODEL_LEN, "seed": SEED}
        kinds = {"bfloat16": {}, "int8": {"quantization": "int8"}}
        sides = {
            name: {"milestone": "m3", "settings": {"model": config | more}, "threads": torch.get_num_threads()}
            for name, more in kinds.items()
        }
        rows = []
        for streams, length in STREAMS.items():
            length, rounds = (4, 1) if size.quick else (length, size.rounds)
            work = {"number": streams, "prompts": (32, 32), "outputs": (length, length), "seed": SEED}
            found = paired(measure(sides, {"drawn": work, "times": 1}, rounds), rate)
            rows.append({**found, "streams": streams, "rounds": rounds})
        return {"rows": rows}


def rate(run: Row) -> float:
    """Return the tokens per second of a run."""
    return sum(map(len, run["times"])) / run["seconds"]


LESSON = Lesson(
    "m3_quantized",
    lambda size: {"layers": partial(layers, size), "quality": partial(quality, size), "speed": partial(speed, size)},
    rounds=5,
    threads=1,
)
