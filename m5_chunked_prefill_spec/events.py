"""Trace events of m5: cost tables, pieces of prompts, mixed batches, verified and rolled back drafts.

`Batch` extends m4's: a step may have prompts and decodes. Events about the cache, the policy and admission are m4's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from m1_single_request.trace_event import Event, some, volatile
from m4_radix_cache.events import Batch as PlainBatch
from m4_radix_cache.mem_cache.events import listed
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.cost_table import CostTable


@dataclass(frozen=True, kw_only=True)
class CostsMeasured(Event):
    """Costs of steps, given or measured: the table by which `target_gap_ms` limits pieces of prompts."""

    style: ClassVar[str] = "dim"
    headline: ClassVar[bool] = True
    given: bool
    """Whether the table was given instead of measured."""
    num_tokens: tuple[int, ...] = volatile()
    """New tokens in a step."""
    step_ms: tuple[float, ...] = volatile()
    """Milliseconds of a step with so many new tokens."""
    context_ms: float = volatile()
    """Additional milliseconds of one prompt token for each thousand tokens of its context."""
    decode_context_ms: float = volatile()
    """The same for one token of a decode or its drafts."""

    @classmethod
    def of(cls, table: CostTable, *, given: bool) -> Self:
        """Build the event for a table."""
        return cls(
            given=given,
            num_tokens=table.num_tokens,
            step_ms=table.step_ms,
            context_ms=table.context_ms,
            decode_context_ms=table.decode_context_ms,
        )

    def explain(self) -> str:
        least, most = (f"{self.num_tokens[i]:,} {self.step_ms[i]:.2f} ms" for i in (0, -1))
        how = "as given" if self.given else "measured once"
        return f"Costs of a step by its tokens, {how}: {least}, {most}."


@dataclass(frozen=True, kw_only=True)
class ChunkCut(Event):
    """A prompt was cut: a piece of it runs in this step."""

    style: ClassVar[str] = "cyan"
    rid: str
    """Request id."""
    asked: int
    """Number of prompt tokens without KV before this step."""
    given: int
    """Number of tokens of this piece."""
    start: int
    """Number of tokens with KV: computed before, or found in the cache."""
    total: int
    """Number of tokens that need KV before the request gets its next token."""
    bound_by: str
    """Limit behind the cut: `max_num_batched_tokens`, `chunked_prefill_size`, `target_gap_ms`, `memory`, or another."""

    def brief(self) -> str:
        return f"piece of {self.rid}: {self.given:,} of {self.asked:,}"

    def explain(self) -> str:
        limit = {
            "max_num_batched_tokens": "that is what is left of the step's budget",
            "chunked_prefill_size": "chunked_prefill_size allows no more",
            "target_gap_ms": "a longer step would miss target_gap_ms",
            "memory": "there is no free memory for more",
        }.get(self.bound_by, f"{self.bound_by} allows no more")
        return (
            f"{self.rid} is cut: tokens {self.start:,} to {self.start + self.given - 1:,} of {self.total:,} run now, "
            f"{self.given:,} of the {self.asked:,} that it lacks, because {limit}. It gets no token yet."
        )


@dataclass(frozen=True, kw_only=True)
class Batch(PlainBatch):
    """The requests and tokens of one forward pass: prompts first, then decodes, with drafts or without.

    `mode`: `extend` (prompts only), `decode` (one token each), `target_verify` (decodes with drafts) or `mixed`.
    """

    draft_lens: tuple[int, ...]
    """Number of drafts among the new tokens, per request."""
    num_prompts: int
    """Number of requests that are prefilled: the first ones."""
    chunked: str | None
    """Id of the prefilled request whose prompt does not end in this step; None: all end."""

    @classmethod
    def of(cls, batch: Any, scheduler: Any) -> Self:
        """Build the event for a `ScheduleBatch` and the state of the scheduler."""
        return cls(
            mode=batch.forward_mode.name.lower(),
            rids=tuple(batch.rids),
            extend_lens=tuple(batch.new_lens.tolist()),
            prefix_lens=tuple((batch.seq_lens - batch.new_lens).tolist()),
            seq_lens=tuple(batch.seq_lens.tolist()),
            draft_lens=tuple(map(len, batch.drafts)) or (0,) * len(batch.reqs),
            out_slots=tuple(batch.out_cache_loc.tolist()),
            left=tuple(scheduler.unreported),
            num_prompts=batch.num_prompts,
            chunked=batch.chunked_req.rid if batch.chunked_req else None,
            num_running=len(scheduler.running),
            budget=scheduler.max_num_batched_tokens,
        )

    @property
    def word(self) -> str:
        return "verify" if self.mode == "target_verify" else super().word

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.extend_lens[: self.num_prompts])

    @property
    def num_decodes(self) -> int:
        return len(self.rids) - self.num_prompts

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.draft_lens)

    def brief(self) -> str:
        return f"{self.word:<7} {some(self.total_tokens, 'token')} of {some(len(self.rids), 'request')}"

    def lanes(self) -> tuple[tuple[str, str], ...]:
        decodes = [f"verify {number}" if number else "decode" for number in self.draft_lens[self.num_prompts :]]
        return tuple(zip(self.rids, ["prefill"] * self.num_prompts + decodes, strict=True))

    def counters(self) -> dict[str, float]:
        return {
            "prompt tokens": self.num_prompt_tokens,
            "decode tokens": self.num_decodes,
            "draft tokens": self.num_draft_tokens,
        }

    def explain(self) -> str:
        decodes = list(zip(self.rids, self.draft_lens, strict=True))[self.num_prompts :]
        verifying, plain = ([rid for rid, drafts in decodes if bool(drafts) is has] for has in (True, False))
        does = (
            (self.rids[: self.num_prompts], "prefills", "prefill", f" {some(self.num_prompt_tokens, 'token')}"),
            (verifying, "verifies", "verify", f" {some(self.num_draft_tokens, 'draft')}"),
            (plain, "decodes", "decode", ""),
        )
        parts = [f"{listed(rids)} {one if len(rids) == 1 else many}{what}" for rids, one, many, what in does if rids]
        waiting = self.num_running - len(self.rids)
        delayed = f" {some(waiting, 'running request')} must wait for that." if waiting > 0 else ""
        left = f" Since the last batch left: {', '.join(self.left)}." if self.left else ""
        return (
            f"Batch of {some(len(self.rids), 'request')}: {'; '.join(parts)}. "
            f"New tokens: {self.total_tokens:,} of at most {self.budget:,}.{delayed}{left}"
        )


@dataclass(frozen=True, kw_only=True)
class Verified(Event):
    """The drafts of a request were verified: compared with the target model's tokens or distribution."""

    style: ClassVar[str] = "green"
    rid: str
    """Request id."""
    method: str
    """Source of the drafts: `ngram` or `draft_model`."""
    drafted: tuple[int, ...]
    """Token ids of the drafts."""
    accepted: int
    """Number of accepted drafts, from the first on."""
    tokens: tuple[int, ...]
    """New tokens of the request: the accepted drafts, and one token of the target model."""
    texts: tuple[str, ...]
    """Text of each draft."""
    own: str
    """Text of the target model's token."""

    @classmethod
    def of(cls, req: Req, token_ids: Sequence[int], drafted: Sequence[int], method: str) -> Self:
        """Build the event for a request that got `token_ids` for the drafts `drafted`."""
        text = req.sequence.detokenizer.token_text
        return cls(
            rid=req.rid,
            method=method,
            drafted=tuple(drafted),
            accepted=len(token_ids) - 1,
            tokens=tuple(token_ids),
            texts=tuple(map(text, drafted)),
            own=text(token_ids[-1]),
        )

    @property
    def rejected_at(self) -> int | None:
        """Index of the first wrong draft; None if all were accepted."""
        return None if self.accepted == len(self.drafted) else self.accepted

    def origin(self, place: int) -> str:
        """Return the origin of the token at index `place` of `tokens`.

        `accepted`: a draft; `corrected`: in place of the first wrong draft; `bonus`: behind drafts that were all
        accepted.
        """
        if place < self.accepted:
            return "accepted"
        return "bonus" if self.rejected_at is None else "corrected"

    def explain(self) -> str:
        drafts = " ".join(repr(text) for text in self.texts)
        accepted = f"{self.accepted} of {some(len(self.drafted), 'draft')}"
        if self.rejected_at is None:
            end = f"all are right, and {self.own!r} comes behind them"
        else:
            end = f"{self.texts[self.rejected_at]!r} is wrong, {self.own!r} is right"
        new = some(len(self.tokens), "token")
        source = {"ngram": "n-grams", "draft_model": "the draft model"}.get(self.method, self.method)
        return f"{self.rid}: {source} drafted {drafts}. {accepted} accepted: {end}. {new} in one step."


@dataclass(frozen=True, kw_only=True)
class RolledBack(Event):
    """The slots of drafts that were not accepted were taken back; pages that became empty are free."""

    style: ClassVar[str] = "dim"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    num_tokens: int
    """Number of tokens whose slots are not used any more."""
    committed: int
    """Number of tokens with KV that the request keeps."""

    def explain(self) -> str:
        return f"{self.rid} frees the slots of {some(self.num_tokens, 'token')}; it keeps {self.committed:,} with KV."
