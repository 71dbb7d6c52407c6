"""Ragged batches, and the sides that run them: our engines, and transformers in static batches.

All requests are there at the start, of very different length, and their outputs have a fixed length. Each side is an
object that is called once per round and returns seconds. Its first call is a shorter one, to warm up: `interleaved`
throws that one away.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from m1_single_request.events import Event
from m1_single_request.tracer import TraceRecord
from m3_paged_attention import SamplingParams

WARM_UP_TOKENS = 4
ORDINARY_TOKENS = (256, 4000)  # of the course's tokenizer: no special ones


@dataclass(frozen=True)
class Ragged:
    """Requests of different lengths; random ordinary tokens."""

    prompts: list[list[int]]
    output_lens: list[int]

    @classmethod
    def drawn(cls, num_requests: int, *, prompts: tuple[int, int], outputs: tuple[int, int], seed: int) -> "Ragged":
        """Lengths between these ends, both included; the same for the same seed."""
        rng = Random(seed)
        sizes = [(rng.randint(*prompts), rng.randint(*outputs)) for _ in range(num_requests)]
        drawn = [[rng.randrange(*ORDINARY_TOKENS) for _ in range(length)] for length, _ in sizes]
        return cls(drawn, [length for _, length in sizes])

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    def shortened(self) -> "Ragged":
        """The same prompts with outputs of a few tokens."""
        return replace(self, output_lens=[min(length, WARM_UP_TOKENS) for length in self.output_lens])

    def run(self, engine: Any) -> list[tuple[int, ...]]:
        """Everything at once; returns the answers. Raises the error of a request that failed."""
        params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in self.output_lens]
        outputs = engine.generate_batch(self.prompts, params, progress=False).values()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [output.token_ids for output in outputs]

    def describe(self) -> dict[str, Any]:
        """What stands beside the numbers."""
        lens = [len(prompt) for prompt in self.prompts]
        return {
            "num_requests": len(lens),
            "num_prompt_tokens": sum(lens),
            "num_output_tokens": self.num_output_tokens,
            "prompt_lens": [min(lens), max(lens)],
            "output_lens": [min(self.output_lens), max(self.output_lens)],
        }


@dataclass
class Side:
    """Somebody who runs a ragged batch."""

    work: Ragged
    num_warm_ups: int = 1
    seconds: list[float] = field(default_factory=list)
    """Of every round that counts."""
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    """The answers of the last round."""
    steps: int = 0
    """Of the last round."""

    def __call__(self) -> float:
        """Seconds for all requests."""
        warms_up = self.num_warm_ups > 0
        work = self.work.shortened() if warms_up else self.work
        begin = time.perf_counter()
        self.run(work)
        seconds = time.perf_counter() - begin
        self.num_warm_ups -= warms_up
        if not warms_up:
            self.seconds.append(seconds)
        return seconds

    def run(self, work: Ragged) -> None:
        """Run it once; sets `tokens` and `steps`."""
        raise NotImplementedError


@dataclass
class EngineSide(Side):
    """One of our engines: everything is handed in at once."""

    engine: Any = None
    preemptions: list[int] = field(default_factory=list)
    """How often a request was thrown out, in each run."""

    def run(self, work: Ragged) -> None:
        before = self.engine.stats()
        self.tokens = work.run(self.engine)
        after = self.engine.stats()
        self.steps = after.num_steps - before.num_steps
        self.preemptions.append(getattr(after, "num_preemptions", 0) - getattr(before, "num_preemptions", 0))


@dataclass
class StaticSide(Side):
    """transformers' `generate` in batches of `batch_size`, padded on the left, in the order of arrival.

    A batch runs until its longest answer is complete; the surplus tokens of the others are thrown away.
    """

    model: Any = None
    batch_size: int = 16

    def run(self, work: Ragged) -> None:
        self.tokens, self.steps = [], 0
        for first in range(0, len(work.prompts), self.batch_size):
            lengths = work.output_lens[first : first + self.batch_size]
            rows = generate(self.model, work.prompts[first : first + self.batch_size], max(lengths))
            self.tokens += [tuple(row[:length]) for row, length in zip(rows, lengths, strict=True)]
            self.steps += max(lengths)


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, **settings: Any) -> list[list[int]]:
    """`num_tokens` greedy tokens for each prompt, from transformers, in one batch padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)  # `generate` derives the position ids from it
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    return out[:, longest:].tolist()


class Keep:
    """A trace reader that keeps events of some kinds, in the order in which they came."""

    def __init__(self, *kinds: type[Event]) -> None:
        self.kinds = kinds
        self.events: list[Any] = []

    def read(self, record: TraceRecord) -> None:
        """Keep an event if it is of a kind that is asked for."""
        if isinstance(record.event, self.kinds):
            self.events.append(record.event)

    def close(self) -> None:
        """Nothing to release."""

    def of(self, kind: type[Event]) -> list[Any]:
        """Those of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def watched(engine: Any, call: Callable[[], object], *kinds: type[Event]) -> Keep:
    """Run something with a reader attached."""
    reader = Keep(*kinds)
    engine.tracer.attach(reader)
    try:
        call()
    finally:
        engine.tracer.detach(reader)
    return reader
