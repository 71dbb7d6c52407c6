"""m3 against transformers, on the same machine in the same minutes: one stream, and ragged batches; and m3's forwards.

Both sides get the same prompts and make outputs of the same length; the end of sequence is ignored.
"""

import statistics
import time
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from benchmarks import reference
from benchmarks.engines import Engines
from benchmarks.lesson import SEED, Row
from benchmarks.roofline import Forwards, roof_bandwidth, under_roof
from benchmarks.serving import Side, num_same
from benchmarks.timing import in_turns, interleaved, medians, ratio
from benchmarks.workloads import Workload, drawn
from m3_paged_attention import SamplingParams

QUESTIONS = (
    "What is a KV cache?",
    "Explain why decode is bound by memory and prefill by arithmetic.",
    "What does a scheduler decide in every step?",
    "How does paged attention find the keys of a token?",
)
BACKENDS = {"m3 on torch": "torch", "m3": "auto"}
"""What every machine can run, and what this one runs best."""
PREFILLS, BATCHES = (16, 64, 256, 512), (1, 16, 64)
"""Tokens of a prefill and requests of a decode below the roof."""


class Clock(BaseStreamer):
    """Arrival of each token of `generate`; the first entry is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note a token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""

    @property
    def seconds_per_token(self) -> float:
        """Return the mean time from the first token to the last."""
        return (self.times[-1] - self.times[1]) / (len(self.times) - 2)


def on_backend(engines: Engines, side: str) -> Any:
    """Return the m3 engine of a side."""
    return engines("m3", model={"attention_backend": BACKENDS[side]})


def single_stream(engines: Engines, *, prompt_len: int, num_tokens: int, rounds: int) -> Row:
    """Measure the decode of one request: tokens per second, and the share of the memory's bandwidth that it uses."""
    prompt = drawn(1, prompts=(prompt_len, prompt_len), outputs=(1, 1), seed=SEED).requests[0].prompt
    theirs, params = reference.load(engines.model, SEED), SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    tokens: dict[str, list[int]] = {}

    def transformers() -> float:
        clock = Clock()
        (tokens["transformers"],) = reference.generate(theirs, [prompt], num_tokens, streamer=clock)
        return clock.seconds_per_token

    def ours(side: str) -> float:
        output = on_backend(engines, side).generate(prompt, params)
        tokens[side] = list(output.token_ids)
        return output.metrics.time_per_output_token or 0.0

    sides = {"transformers": transformers} | {side: lambda side=side: ours(side) for side in BACKENDS}
    rounds_of = in_turns(sides, rounds=rounds)
    forwards = Forwards(None, engines.model)
    context = prompt_len + num_tokens // 2
    points = [forwards.point("decode", 1, own, [1], [context]) for own in medians(rounds_of).values()]
    bandwidth = roof_bandwidth(points)
    return {
        "prompt": prompt_len,
        "output": num_tokens,
        "sides": {
            name: {
                "tokens_per_second": 1 / point["seconds"],
                "times_transformers": ratio(rounds_of["transformers"], rounds_of[name]),
                "bandwidth_share": point["bandwidth"] / bandwidth,
            }
            for name, point in zip(sides, points, strict=True)
        },
        "bytes_per_token": points[0]["bytes"],
        "bandwidth": bandwidth,
        "same_tokens": tokens["m3"] == tokens["transformers"],
    }


def single_text(engines: Engines, *, num_tokens: int, rounds: int) -> Row:
    """Measure one request at a time from text to text: tokenized, prefilled, decoded, and made text again."""
    theirs, tokenizer = reference.load(engines.model, SEED), AutoTokenizer.from_pretrained(engines.model.directory)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    texts: dict[str, list[str]] = {}

    def transformers(question: str) -> str:
        (row,) = reference.generate(theirs, [tokenizer(question)["input_ids"]], num_tokens)
        return tokenizer.decode(row, skip_special_tokens=True)

    answers = {"transformers": transformers} | {
        side: lambda question, side=side: on_backend(engines, side).generate(question, params).text for side in BACKENDS
    }

    def all_questions(side: str) -> float:
        begin = time.perf_counter()
        texts[side] = [answers[side](question) for question in QUESTIONS]
        return time.perf_counter() - begin

    seconds = in_turns({side: lambda side=side: all_questions(side) for side in answers}, rounds=rounds)
    total = num_tokens * len(QUESTIONS)
    return {
        "questions": len(QUESTIONS),
        "output": num_tokens,
        "sides": {
            name: {
                "tokens_per_second": total / statistics.median(own),
                "times_transformers": ratio(seconds["transformers"], own),
            }
            for name, own in seconds.items()
        },
        "same_texts": num_same(texts["m3"], texts["transformers"]),
    }


def lengths(number: int, quick: bool) -> Workload:
    """Return requests of very different lengths."""
    prompts, outputs = ((32, 64), (4, 16)) if quick else ((32, 512), (16, 256))
    return drawn(number, prompts=prompts, outputs=outputs, seed=SEED)


def ragged_16(engines: Engines, work: Workload, *, rounds: int) -> Row:
    """Measure a batch as large as transformers' own."""
    settings: Row = {"scheduler": {"max_num_seqs": 16}}
    sides = {
        "m3 on torch, 16 at a time": engines("m3", model={"attention_backend": "torch"}, **settings),
        "m3, 16 at a time": engines("m3", **settings),
    }
    return ragged(engines, work, sides, rounds)


def ragged_64(engines: Engines, work: Workload, *, rounds: int) -> Row:
    """Measure more requests than transformers takes at a time, and m2 with them."""
    few, many = ({"scheduler": {"max_num_seqs": number}} for number in (16, 64))
    sides = {
        "m2, 64 at a time": engines("m2", **many),
        "m3 on torch, 64 at a time": engines("m3", model={"attention_backend": "torch"}, **many),
        "m3, 16 at a time": engines("m3", **few),
        "m3, 64 at a time": engines("m3", **many),
    }
    return ragged(engines, work, sides, rounds)


def ragged(engines: Engines, work: Workload, engine_of: Row, rounds: int) -> Row:
    """Measure engines and transformers in turns over the same requests."""
    first, model = "transformers, static 16", reference.load(engines.model, SEED)
    sides = {first: Side(model, work, reference.static())}
    sides |= {name: Side(engine, work) for name, engine in engine_of.items()}
    seconds = interleaved(sides, rounds=rounds)
    return work.describe() | {
        "sides": {
            name: {
                "tokens_per_second": work.num_output_tokens / seconds[name],
                "times_transformers": ratio(sides[first].seconds, side.seconds),
                "seconds": seconds[name],
                "all_seconds": side.seconds,
                "steps": side.last.counts["num_steps"],
                "same_answers": num_same(side.last.answers, sides[first].last.answers),
            }
            for name, side in sides.items()
        },
    }


def roofline(engines: Engines, *, context: int, num_decodes: int) -> Row:
    """Measure prefills and decode steps of different sizes below the roof of the machine."""
    engine = engines("m3", scheduler={"max_num_seqs": max(BATCHES)})
    forwards = Forwards(engine, engines.model)
    points = [forwards.prefill(length) for length in PREFILLS]
    points += [forwards.decode(size, context, num_decodes) for size in BATCHES]
    return under_roof(points, engines.model.dtype)
