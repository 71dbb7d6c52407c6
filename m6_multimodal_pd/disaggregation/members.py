"""Engines of a group as the router records them, and the checks of an engine that asks to join.

Pages of KV are copied as bytes and tokens are sent as ids, so engines that differ in page layout, weights or vocabulary
would answer with wrong tokens and without an error. An engine therefore describes itself when it joins and is compared
with the members; its vocabulary is compared with that of the router, which makes texts of ids. Before that, it fits a
maximum length of requests to its own memory (`m3_paged_attention/model_len.py`), reports it and waits. When all engines
of the group have reported, the router fixes the shortest length, unless the user has named one. New in this milestone.
vLLM: `compatibility_hash` in the handshake of its NIXL connector; the minimum over workers in `get_kv_cache_configs`.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from m6_multimodal_pd.disaggregation.config import Role
from m6_multimodal_pd.disaggregation.runtime.jobs import error_of
from m6_multimodal_pd.disaggregation.runtime.messages import Answer, Joined, LengthFitted

COMPARED = ("page_size", "layout", "max_model_len", "model")


@dataclass(eq=False)
class Member:
    """The router's record of an engine that has joined."""

    name: str
    joined: Joined
    last_heard: float
    """Time of its last message, in monotonic seconds; an engine without requests, or in a step, sends none."""
    rooms: set[int] = field(default_factory=set)
    """Rooms that it has not ended."""
    calls: dict[int, str] = field(default_factory=dict)
    """Verbs of the calls that it has not answered, by number."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """Its latest answer to a call of each verb."""
    is_lost: bool = False

    @property
    def role(self) -> Role:
        return self.joined.role

    def result_of(self, verb: str) -> Any:
        """Return the value of the latest answer to `verb`. Raises the error that the engine reported instead."""
        answer = self.answers[verb]
        if answer.fault is not None:
            raise error_of(answer.fault, self.name)
        return msgspec.msgpack.decode(answer.value)


def length_incompatibility(fitted: LengthFitted, max_model_len: int) -> str | None:
    """Return why an engine cannot serve requests of `max_model_len` tokens, or None if it can."""
    own = fitted.max_model_len
    if own < max_model_len:
        return f"it has room for requests of {own:,} tokens, and max_model_len is {max_model_len:,} here"
    if fitted.is_named and own != max_model_len:
        return f"its max_model_len is {own:,}, as named, and {max_model_len:,} here"
    return None


def incompatibility(joined: Joined, members: Iterable[Member], vocabulary: str) -> str | None:
    """Return why an engine cannot work with `members` and a router of this vocabulary, or None if it can."""
    if joined.vocabulary != vocabulary:
        return "its ids stand for other tokens than the router's: it has another tokenizer"
    for other in members:
        for name in COMPARED:
            own, theirs = getattr(joined, name), getattr(other.joined, name)
            if own != theirs:
                return f"its {name} is {own}, and that of {other.name} is {theirs}"
    return None


def vocabulary_of(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's tokens and their ids, and of the special ones; the same on every machine."""
    meaning = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)]
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()


def load_of(member: Member) -> tuple[int, str]:
    """Return the sort key of an engine's load: the number of its rooms, then its name."""
    return len(member.rooms), member.name
