"""Milestone 3 against transformers, on the same machine in the same minutes: one stream, and ragged batches.

Both sides get the same prompts and make outputs of the same length; the end of sequence is ignored. transformers runs
`generate` with fused attention (sdpa) and its dynamic KV cache, without gradients.
"""

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from benchmarks import interleaved
from benchmarks.m3_machine import Reader
from benchmarks.m3_models import TestedModel
from benchmarks.m3_roofline import decode_bytes
from benchmarks.m3_workload import EngineSide, Ragged, Side, StaticSide, generate
from m3_paged_attention import LLMEngine, SamplingParams
from m3_paged_attention.config import AttentionBackend

QUESTIONS = (
    "What is a KV cache?",
    "Explain why decode is bound by memory and prefill by arithmetic.",
    "What does a scheduler decide in every step?",
    "How does paged attention find the keys of a token?",
)
BACKENDS: dict[str, AttentionBackend] = {"m3 on torch": "torch", "m3": "auto"}
"""Our sides: what every machine can run, and what this one runs best."""
Row = dict[str, Any]


class Clock(BaseStreamer):
    """Notes when each token of `generate` came; what comes first is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""

    @property
    def seconds_per_token(self) -> float:
        """From the first token to the last."""
        return (self.times[-1] - self.times[1]) / (len(self.times) - 2)


@dataclass
class Streams:
    """The sides of one stream of tokens."""

    model: TestedModel
    prompt: list[int]
    num_tokens: int
    totals: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of whole answers, the prefill included."""
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def m3(self, side: str) -> float:
        """Seconds per token after the first."""
        params = SamplingParams(max_tokens=self.num_tokens, ignore_eos=True)
        output = self.model.engine(max_num_seqs=16, backend=BACKENDS[side]).generate(self.prompt, params)
        if output.error is not None:
            raise output.error
        self.totals[side].append(output.metrics.latency or 0.0)
        self.tokens[side] = list(output.token_ids)
        return output.metrics.time_per_output_token or 0.0

    def transformers(self) -> float:
        """The same."""
        clock, begin = Clock(), time.perf_counter()
        (self.tokens["transformers"],) = generate(self.model.reference, [self.prompt], self.num_tokens, streamer=clock)
        self.totals["transformers"].append(time.perf_counter() - begin)
        return clock.seconds_per_token


def single_stream(model: TestedModel, *, prompt_len: int, num_tokens: int, rounds: int, seed: int) -> Row:
    """Decode of one request: tokens per second of both sides, and the share of the memory's speed that is used."""
    prompt = Ragged.drawn(1, prompts=(prompt_len, prompt_len), outputs=(1, 1), seed=seed).prompts[0]
    streams, read = Streams(model, prompt, num_tokens), Reader()
    ours = {side: partial(streams.m3, side) for side in BACKENDS}
    seconds = interleaved({"transformers": streams.transformers, **ours, "read": read}, rounds=rounds)
    bandwidth = read.large.nbytes / seconds["read"]
    moved = decode_bytes(model.config, model.dtype, [prompt_len + num_tokens // 2])
    return {
        "prompt": prompt_len,
        "output": num_tokens,
        "sides": {
            name: {
                "tokens_per_second": 1 / seconds[name],
                "seconds_per_answer": statistics.median(streams.totals[name][1:]),
                "bandwidth_share": moved / seconds[name] / bandwidth,
            }
            for name in ("transformers", *BACKENDS)
        },
        "times_transformers": seconds["transformers"] / seconds["m3"],
        "bytes_per_token": moved,
        "bandwidth": bandwidth,
        "bandwidths": read.bandwidths,
        "read_with": read.way,
        "same_tokens": streams.tokens["m3"] == streams.tokens["transformers"],
    }


@dataclass
class TextSide:
    """Questions one after another, from text to text."""

    num_tokens: int
    texts: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        """Seconds for all questions."""
        begin = time.perf_counter()
        self.texts = [self.answer(question) for question in QUESTIONS]
        self.seconds.append(time.perf_counter() - begin)
        return self.seconds[-1]

    def answer(self, question: str) -> str:
        """One question."""
        raise NotImplementedError


@dataclass
class EngineTextSide(TextSide):
    """m3."""

    engine: LLMEngine | None = None

    def answer(self, question: str) -> str:
        assert self.engine is not None
        return self.engine.generate(question, SamplingParams(max_tokens=self.num_tokens, ignore_eos=True)).text


@dataclass
class ReferenceTextSide(TextSide):
    """transformers."""

    model: Any = None
    tokenizer: Any = None

    def answer(self, question: str) -> str:
        ids = self.tokenizer(question)["input_ids"]
        (row,) = generate(self.model, [ids], self.num_tokens)
        return self.tokenizer.decode(row, skip_special_tokens=True)


def single_text(model: TestedModel, *, num_tokens: int, rounds: int) -> Row:
    """One request at a time from text to text: tokenised, prefilled, decoded, and made text again."""
    ours = {
        side: EngineTextSide(num_tokens, engine=model.engine(max_num_seqs=16, backend=backend))
        for side, backend in BACKENDS.items()
    }
    theirs = ReferenceTextSide(num_tokens, model=model.reference, tokenizer=model.tokenizer)
    seconds = interleaved({"transformers": theirs, **ours}, rounds=rounds)
    total = num_tokens * len(QUESTIONS)
    return {
        "questions": len(QUESTIONS),
        "output": num_tokens,
        "sides": {name: {"tokens_per_second": total / seconds[name]} for name in seconds},
        "times_transformers": seconds["transformers"] / seconds["m3"],
        "same_texts": sum(a == b for a, b in zip(ours["m3"].texts, theirs.texts, strict=True)),
    }


def ragged(work: Ragged, sides: dict[str, Side], *, rounds: int) -> Row:
    """Tokens per second of several sides over the same requests. The first side is the one that others are held to."""
    seconds = interleaved(sides, rounds=rounds)
    first = next(iter(sides))
    return work.describe() | {
        "sides": {
            name: {
                "tokens_per_second": work.num_output_tokens / seconds[name],
                "times_transformers": seconds[first] / seconds[name],
                "seconds": seconds[name],
                "all_seconds": side.seconds,
                "steps": side.steps,
                "same_answers": sum(a == b for a, b in zip(side.tokens, sides[first].tokens, strict=True)),
            }
            for name, side in sides.items()
        },
    }


def ragged_random(model: TestedModel, work: Ragged, *, rounds: int) -> Row:
    """A batch as large as transformers' own, on the 0.6B shape."""
    return ragged(
        work,
        {
            "transformers, static 16": StaticSide(work, model=model.reference),
            "m3 on torch, 16 at a time": EngineSide(work, engine=model.engine(max_num_seqs=16, backend="torch")),
            "m3, 16 at a time": EngineSide(work, engine=model.engine(max_num_seqs=16)),
        },
        rounds=rounds,
    )


def ragged_embedded(model: TestedModel, work: Ragged, *, rounds: int) -> Row:
    """More requests than transformers takes at a time, on the embedded checkpoint; m2 beside it."""
    dense = model.dense_engine(max_num_seqs=64)
    try:
        return ragged(
            work,
            {
                "transformers, static 16": StaticSide(work, model=model.reference),
                "m2, 64 at a time": EngineSide(work, engine=dense),
                "m3 on torch, 64 at a time": EngineSide(work, engine=model.engine(max_num_seqs=64, backend="torch")),
                "m3, 16 at a time": EngineSide(work, engine=model.engine(max_num_seqs=16)),
                "m3, 64 at a time": EngineSide(work, engine=model.engine(max_num_seqs=64)),
            },
            rounds=rounds,
        )
    finally:
        dense.close()
