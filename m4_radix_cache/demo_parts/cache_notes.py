"""What the trace says about sharing, in sentences: why a request computed so little, and what there is to see.

Part of `python -m m4_radix_cache.demo`. A reader of the trace, and pure functions of what it has heard, like m3's
`block_map_facts.py`: every number is from the run, and nothing is said where there is nothing to say.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

from m1_single_request.events import Event, some
from m1_single_request.tracer import TraceRecord
from m2_continuous_batching.timeline_facts import agree, listed
from m4_radix_cache.events import Admit, Audit, Batch, Matched, PolicyOrder, Retract
from m4_radix_cache.mem_cache.events import DuplicatesFreed, Evicted
from m4_radix_cache.tree_view import shorten

E = TypeVar("E", bound=Event)

KEPT = (PolicyOrder, Matched, Admit, Batch, DuplicatesFreed, Evicted, Retract, Audit)
RULES = {
    "lru": "the least recently used first",
    "lfu": "what fewest requests started from first",
    "fifo": "the oldest first",
    "slru": "what at most one request started from first",
    "priority": "the lowest priority first",
}
"""What each eviction policy does, in words."""
TEXT_WIDTH = 60  # of an evicted text
MOST_NAMED = 3  # of what is evicted at once
MARKER = re.compile(r"<\|\w+\|>")  # of a chat template: they say little, and take much room


class CacheNotes:
    """Keeps what was decided about requests and the cache, with the steps."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Event]] = []

    def read(self, record: TraceRecord) -> None:
        """Keep a record, if it is of a kind that is told."""
        if isinstance(record.event, KEPT):
            self.heard.append((record.step, record.event))

    def close(self) -> None:
        """Everything stays: it is told after the run."""

    def clear(self) -> None:
        """Forget what was heard so far."""
        self.heard.clear()

    def of(self, kind: type[E]) -> Iterator[tuple[int, E]]:
        """All events of a kind so far, with their steps."""
        for step, event in self.heard:
            if isinstance(event, kind):
                yield step, event

    def first_admits(self) -> dict[str, tuple[int, Admit]]:
        """How each request began, in the order in which they did, with the step."""
        found: dict[str, tuple[int, Admit]] = {}
        for step, event in self.of(Admit):
            found.setdefault(event.rid, (step, event))
        return found


def why(notes: CacheNotes, rid: str) -> list[tuple[int, str]]:
    """How a request came to compute what it did: the decisions of the trace in their own words, with the steps."""
    told: list[tuple[int, Event]] = []
    for step, event in notes.heard:
        if isinstance(event, Matched) and event.rid == rid:  # only the look-up that counted
            told = [each for each in told if not isinstance(each[1], Matched)]
        if rid in event.request_ids():
            told.append((step, event))
        if isinstance(event, Batch) and rid in event.rids:
            break
    return [(step, event.explain()) for step, event in told]


# --- facts about users who share --------------------------------------------------------------------------------------


def shared(notes: CacheNotes) -> str | None:
    """How much of the prompts was computed."""
    admits = [admit for _, admit in notes.first_admits().values()]
    if not admits:
        return None
    reused, computed = sum(admit.prefix for admit in admits), sum(admit.extend for admit in admits)
    said = f"The prompts of part 1 have {some(reused + computed, 'token')} in all. "
    if not reused:
        return f"{said}All of them were computed: nothing was found in a cache."
    share = computed / (reused + computed)
    return f"{said}The KV of {reused:,} was in the cache when its turn came; {computed:,} were computed, {share:.0%}."


def took_turns(notes: CacheNotes) -> str | None:
    """Who waited for whom, and what it found after that."""
    order = next(((step, event) for step, event in notes.of(PolicyOrder) if event.num_held_back), None)
    if order is None:
        return None
    step, event = order
    number = len(event.rids) - event.num_held_back
    held, admits = list(event.rids[number:]), notes.first_admits()
    said = (
        f"They came at the same time, so the cache had nothing for any of them. Step {step} lets only "
        f"{listed(event.rids[:number])} begin: {listed(held)} would compute the same tokens, and "
        f"{agree(held, 'is', 'are')} held back ({event.policy})."
    )
    begun = [admits[rid] for rid in held if rid in admits]
    if not begun:
        return said
    hits = sorted({admit.prefix for _, admit in begun})
    found = f"{hits[0]:,}" if len(hits) == 1 else f"{hits[0]:,} to {hits[-1]:,}"
    they = agree(held, "it begins and finds", "they begin and find")
    return f"{said} From step {min(at for at, _ in begun)} on {they} {found} tokens each that need not be computed."


def computed_twice(notes: CacheNotes) -> str | None:
    """Who computed what somebody else was computing."""
    events = [event for _, event in notes.of(DuplicatesFreed)]
    if not events:
        return None
    rids, slots = list(dict.fromkeys(event.rid for event in events)), sum(event.num_tokens for event in events)
    return (
        f"{listed(rids)} computed tokens that another request computed meanwhile. {some(slots, 'slot')} of such "
        f"duplicates came free at once, but the time was spent."
    )


# --- facts about little memory ----------------------------------------------------------------------------------------


def evictions(notes: CacheNotes) -> str | None:
    """Tokens evicted from the cache, and the eviction policy that chose them."""
    events = [event for _, event in notes.of(Evicted)]
    if not events:
        return None
    tokens, asked = sum(event.freed for event in events), sum(event.asked for event in events)
    return (
        f"With little memory {some(tokens, 'cached token')} had to go in {some(len(events), 'eviction')}, "
        f"{RULES.get(events[0].strategy, events[0].strategy)} ({events[0].strategy}); {asked:,} were needed. Only what "
        f"no running request has locked can go."
    )


def retractions(notes: CacheNotes) -> str | None:
    """Requests retracted and the tokens to compute again."""
    events = list(notes.of(Retract))
    if not events:
        return None
    step, loss = events[0]
    said = (
        f"Step {step} retracts {loss.rid}: {loss.needed:,} slots are needed, {loss.available:,} are free or evictable, "
        f"and it has said least, {some(loss.num_output_tokens, 'token')}."
    )
    for at, back in notes.of(Admit):
        if back.rid == loss.rid and at > step:
            said += (
                f" {some(at - step, 'step')} later it is back and finds {back.prefix:,} of its "
                f"{back.prefix + back.extend:,} tokens in the cache: {back.extend:,} are computed, and nothing that it "
                f"had said is lost."
            )
            break
    return said + (f" In all there were {len(events)} retractions." if len(events) > 1 else "")


def audits(*all_notes: CacheNotes) -> str | None:
    """That no slot was lost."""
    events = [event for notes in all_notes for _, event in notes.of(Audit)]
    if not events:
        return None
    wrong = [event for event in events if not event.holds]
    if wrong:
        return wrong[0].explain()
    return f"The memory was audited after each of {some(len(events), 'step')}. The last time: {events[-1].explain()}"


def evicted_texts(event: Evicted, texts: Mapping[int, str]) -> str:
    """An eviction in a sentence. `texts`: what the nodes hold; pages of a table have none."""

    def name(node: int) -> str:
        if node not in texts:
            return f"{'node' if texts else 'page'} {node}"
        return f'"{shorten(MARKER.sub("", texts[node]), TEXT_WIDTH)}"'

    what = [f"{name(node)} ({count:,})" for node, count in zip(event.nodes, event.token_counts, strict=True)]
    if len(what) > MOST_NAMED:
        what[MOST_NAMED:] = [f"{len(what) - MOST_NAMED} more"]
    rule = RULES.get(event.strategy, event.strategy)
    return (
        f"{some(event.asked, 'slot')} {'is' if event.asked == 1 else 'are'} missing. Of what nobody uses, "
        f"{some(event.freed, 'token')} {'goes' if event.freed == 1 else 'go'}, {rule}: {listed(what)}."
    )
