"""Who is in a group: the engines that have joined, what each has said of itself, and who may not join.

Pages of KV are copied as bytes and tokens travel as numbers, so engines that differ in what these mean would answer
each other's requests with nonsense, and nobody would notice. Each says what it is when it joins, at the start or years
later, and is compared with those that are there; its vocabulary with that of the router, which makes texts of ids. New
in this milestone. vLLM: `compatibility_hash` in the handshake of its NIXL connector.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from m6_multimodal_pd.disaggregation.runtime.messages import Heartbeat, Joined

COMPARED = ("page_size", "layout", "max_model_len", "model")


@dataclass(eq=False)
class Member:
    """An engine, as the router knows it."""

    name: str
    joined: Joined
    last_heard: float
    """In monotonic seconds; an engine without requests, or in a step, says nothing."""
    heartbeat: Heartbeat | None = None
    stats: Mapping[str, Any] | None = None
    """As it last told them when it was asked."""
    rooms: set[int] = field(default_factory=set)


def misfit(joined: Joined, there: Iterable[Member], vocabulary: str) -> str | None:
    """Why an engine cannot work with those that are `there` and a router of this vocabulary; None if it can."""
    if joined.vocabulary != vocabulary:
        return "its ids stand for other tokens than the router's: it has another tokenizer"
    for other in there:
        for name in COMPARED:
            own, theirs = getattr(joined, name), getattr(other.joined, name)
            if own != theirs:
                return f"its {name} is {own}, and that of {other.name} is {theirs}"
    return None


def vocabulary_of(tokenizer: Any) -> str:
    """A digest of what the ids of a tokenizer stand for, and which of them are special: the same on every machine."""
    meaning = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)]
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()


def load_of(member: Member) -> tuple[int, str]:
    """How much an engine has to do: the fewest rooms first, of equal ones the first name."""
    return len(member.rooms), member.name
