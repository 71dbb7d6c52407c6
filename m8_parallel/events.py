"""Events of ranks: the part of the model that a rank has loaded, and the collectives of a step."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from m1_single_request.trace_event import Event, size, some, volatile
from m8_parallel.collective_record import Collective
from m8_parallel.models.shards import Shard
from m8_parallel.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class RanksJoined(Event):
    """The ranks of a job have loaded the model together."""

    headline = True

    rank: int
    """Number of this rank."""
    size: int
    """Number of ranks."""
    num_heads: int
    """Attention heads of this rank, in each layer."""
    num_kv_heads: int
    """Heads of keys and values that this rank keeps, in each layer."""
    num_experts: int | None
    """Whole experts of this rank in each sparse layer; None: a part of each, or there are none."""
    first_token: int
    """The first token whose embedding and logit this rank has."""
    num_tokens: int
    """Number of such tokens."""
    weight_bytes: int
    """Size of this rank's weights."""

    @classmethod
    def of(cls, ranks: Ranks, model: Any, weight_bytes: int) -> Self:
        """Return the event of a rank that has this decoder, and a vision tower perhaps."""
        shard: Shard = model.part.shard
        local, tokens = shard.local, shard.rows_of_vocabulary()
        return cls(
            rank=ranks.rank,
            size=ranks.size,
            num_heads=local.num_heads,
            num_kv_heads=local.num_kv_heads,
            num_experts=local.experts.num_experts if shard.expert_parallel and local.experts is not None else None,
            first_token=tokens.start,
            num_tokens=len(tokens),
            weight_bytes=weight_bytes,
        )

    def explain(self) -> str:
        experts = "" if self.num_experts is None else f", {some(self.num_experts, 'expert')}"
        return (
            f"Rank {self.rank} of {self.size}: {some(self.num_heads, 'head')} of each layer with "
            f"{some(self.num_kv_heads, 'KV head')}{experts}, and {some(self.num_tokens, 'token')} of the vocabulary "
            f"from {self.first_token:,} on: {size(self.weight_bytes)} of weights."
        )


@dataclass(frozen=True, kw_only=True)
class Collectives(Event):
    """Collectives of this rank since its previous such event: of a step, and of loading or `stats` before it."""

    rank: int
    """Number of this rank."""
    kinds: tuple[str, ...]
    """Of each collective, in order."""
    sizes: tuple[int, ...]
    """Size of this rank's tensor, of each."""
    began: tuple[float, ...] = volatile()
    """By `time.perf_counter` of this rank, of each."""
    seconds: tuple[float, ...] = volatile()
    """Duration of each on the host, in seconds, with the wait for later ranks. NCCL: the launch of the kernel alone, 0
    in a CUDA graph."""

    @classmethod
    def of(cls, ranks: Ranks, calls: Sequence[Collective]) -> Self | None:
        """Return the event of a step, None without collectives."""
        if not calls:
            return None
        kinds, sizes, began, seconds = zip(*calls, strict=True)
        return cls(rank=ranks.rank, kinds=kinds, sizes=sizes, began=began, seconds=seconds)

    def explain(self) -> str:
        number, num_bytes, seconds = Counter(self.kinds), defaultdict[str, int](int), defaultdict[str, float](float)
        for kind, own, duration in zip(self.kinds, self.sizes, self.seconds, strict=True):
            num_bytes[kind] += own
            seconds[kind] += duration
        parts = [
            f"{some(count, kind)} of {size(num_bytes[kind])} in {seconds[kind] * 1e3:.1f} ms"
            for kind, count in number.items()
        ]
        return f"Rank {self.rank}: {', '.join(parts)}."

    def brief(self) -> str:
        return f"{some(len(self.kinds), 'collective')} {sum(self.seconds) * 1e3:.1f} ms"

    def calls(self) -> list[Collective]:
        """Return the collectives."""
        return [Collective(*each) for each in zip(self.kinds, self.sizes, self.began, self.seconds, strict=True)]
