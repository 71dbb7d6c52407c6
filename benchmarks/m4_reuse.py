"""What a prefix cache saves: requests with a common prefix that arrive at once, with and without sharing.

How many tokens must be computed follows from the work alone and is asserted; how much time that saves is measured.
Every round begins with an empty cache, so only what the requests compute for each other is shared.
"""

import statistics
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from benchmarks import interleaved
from benchmarks.m3_workload import ORDINARY_TOKENS, EngineSide, Ragged
from benchmarks.m4_models import Engines
from m3_paged_attention import SamplingParams

PAGE_SIZE = 16
CACHES = {"m4, no sharing": "chunk", "m4, hashes": "hash", "m4, tree": "radix"}
SHARING = ("m4, tree", "m4, hashes")
Row = dict[str, Any]


@dataclass(frozen=True)
class SharedPrefix(Ragged):
    """Prompts that begin with the same tokens. Each one's own tokens differ from the first on."""

    prefix_len: int = 0

    @classmethod
    def made(cls, num_requests: int, *, prefix: int, own: int, outputs: int, seed: int) -> "SharedPrefix":
        """All of these lengths; random ordinary tokens, the same for the same seed."""
        rng = Random(seed)
        common = [rng.randrange(*ORDINARY_TOKENS) for _ in range(prefix)]
        firsts = rng.sample(range(*ORDINARY_TOKENS), num_requests)
        rests = [[rng.randrange(*ORDINARY_TOKENS) for _ in range(own - 1)] for _ in firsts]
        prompts = [[*common, first, *rest] for first, rest in zip(firsts, rests, strict=True)]
        return cls(prompts, [outputs] * num_requests, prefix)

    def shortened(self) -> "SharedPrefix":
        """The ends of a few prompts, with outputs of a few tokens: enough to warm up."""
        few = [prompt[-64:] for prompt in self.prompts[:4]]
        return replace(self, prompts=few, output_lens=[4] * len(few), prefix_len=0)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_to_compute(self) -> int:
        """Prompt tokens that go through the model if whole pages of the common prefix are computed once."""
        shared = self.prefix_len // PAGE_SIZE * PAGE_SIZE
        return self.num_prompt_tokens - (len(self.prompts) - 1) * shared


@dataclass
class ReuseSide(EngineSide):
    """An engine, which forgets everything before each round."""

    computed: int = 0
    """Prompt tokens that went through the model in the last round."""
    cached: list[int] = field(default_factory=list)
    """Of each request of the last round: tokens that were found."""
    first_tokens: list[list[float]] = field(default_factory=list)
    """Seconds to the first token of each request, for every round that counts."""

    def run(self, work: Ragged) -> None:
        if hasattr(self.engine, "flush_cache"):  # m3 has no cache
            self.engine.flush_cache()
        before = self.engine.stats()
        params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in work.output_lens]
        outputs = list(self.engine.generate_batch(work.prompts, params, progress=False).values())
        for output in outputs:
            if output.error is not None:
                raise output.error
        after = self.engine.stats()
        self.tokens = [output.token_ids for output in outputs]
        self.steps = after.num_steps - before.num_steps
        self.computed = after.num_prompt_tokens - before.num_prompt_tokens
        self.cached = [output.metrics.cached_tokens for output in outputs]
        if work is self.work:
            self.first_tokens.append([output.metrics.time_to_first_token or 0.0 for output in outputs])

    def report(self, seconds: float) -> Row:
        """Medians over the rounds."""
        waits = self.first_tokens
        return {
            "computed": self.computed,
            "cached": sum(self.cached),
            "mean_ttft": statistics.median(map(statistics.mean, waits)),
            "first_ttft": statistics.median(map(min, waits)),
            "last_ttft": statistics.median(map(max, waits)),
            "seconds": seconds,
            "all_seconds": self.seconds,
            "all_mean_ttfts": [statistics.mean(wait) for wait in waits],
            "output_tokens_per_second": self.work.num_output_tokens / seconds,
            "steps": self.steps,
        }


def reuse(engines: Engines, work: SharedPrefix, *, rounds: int) -> Row:
    """The same requests on m3, and on m4 with a tree, with hashes and without sharing."""
    num = len(work.prompts)
    sides = {"m3": ReuseSide(work, engine=engines.m3(max_num_seqs=num))}
    sides |= {name: ReuseSide(work, engine=engines.m4(cache, max_num_seqs=num)) for name, cache in CACHES.items()}
    seconds = interleaved(sides, rounds=rounds)
    for name, side in sides.items():
        expected = work.num_to_compute if name in SHARING else work.num_prompt_tokens
        assert side.computed == expected, f"{name} computed {side.computed} prompt tokens, not {expected}"
    rows = {name: side.report(seconds[name]) for name, side in sides.items()}
    tree, none = rows["m4, tree"], rows["m4, no sharing"]
    return work.describe() | {
        "prefix": work.prefix_len,
        "sides": rows,
        "ttft_times_none": _times(none["all_mean_ttfts"], tree["all_mean_ttfts"]),
        "total_times_none": _times(none["all_seconds"], tree["all_seconds"]),
        "same_answers": {
            name: sum(a == b for a, b in zip(side.tokens, sides["m4, no sharing"].tokens, strict=True))
            for name, side in sides.items()
        },
    }


def _times(slow: list[float], fast: list[float]) -> float:
    """The median of the rounds' ratios: the two sides of a round ran within the same minute."""
    return statistics.median([a / b for a, b in zip(slow, fast, strict=True)])
