"""What engines that share the work have told, kept as it comes: who had which request, and how its KV moved.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from m1_single_request.tracer import TraceRecord
from m6_multimodal_pd.disaggregation.events import EngineJoined, Reported, RequestRouted
from m6_multimodal_pd.disaggregation.poll import KVPoll
from m6_multimodal_pd.disaggregation.runtime.messages import Heartbeat

TRANSFER = ("room_taken", "kv_poll_changed", "chunk_sent", "chunk_received")
"""Kinds of events that tell of a transfer."""
WORK = ("batch", "encoder_run")
SHOWN = (*TRANSFER, *WORK, "chunk_cut")


@dataclass(frozen=True)
class Word:
    """Something that an engine has said, or was given; and when that was heard."""

    at: float
    engine: str
    said: Reported | Heartbeat | RequestRouted


@dataclass(eq=False)
class Transfer:
    """One request's KV on its way, as far as was heard."""

    rid: str
    room: int
    prefill: str
    decode: str
    state: dict[str, str] = field(default_factory=lambda: dict.fromkeys(("prefill", "decode"), "bootstrapping"))
    """By side."""
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By chunk: its pages, and the step of the prefill engine in which it left."""
    num_received: int = 0
    """Chunks that are there."""
    num_pages: int = 0
    """Pages that are there."""
    all_pages: int | None = None
    """Pages that are to come; known when there is room for them."""
    num_bytes: int = 0
    """What the pages that are there take."""

    @property
    def is_over(self) -> bool:
        return self.state["decode"] in (told(KVPoll.SUCCESS.name), told(KVPoll.FAILED.name))

    def hear(self, said: Reported, facts: Mapping[str, Any]) -> None:
        """Take something that is about it."""
        if said.what == "room_taken":
            self.all_pages = facts["num_pages"]
        elif said.what == "kv_poll_changed":
            self.state[facts["side"]] = told(facts["new"])
        elif said.what == "chunk_sent":
            self.sent[facts["number"]] = (facts["num_pages"], said.its_step)
        elif said.what == "chunk_received":
            self.num_received += 1
            self.num_pages += self.sent.get(facts["number"], (0, 0))[0]  # causes are heard before effects
            self.num_bytes += facts["num_bytes"]


def told(state: str) -> str:
    """A name of `KVPoll` in words."""
    return state.replace("_", " ").lower()


class Board:
    """How everything stands after the words that it was told."""

    def __init__(self) -> None:
        self.standing: dict[str, Heartbeat] = {}
        """By engine."""
        self.work: dict[str, Reported] = {}
        """What it did last, by engine."""
        self.transfers: dict[int, Transfer] = {}
        """By room."""

    def hear(self, words: Iterable[Word]) -> None:
        """Take what comes next."""
        for word in words:
            said = word.said
            if isinstance(said, Heartbeat):
                self.standing[word.engine] = said
            elif isinstance(said, RequestRouted):
                again = [own.room for own in self.transfers.values() if own.rid == said.rid]
                for room in again:  # an earlier attempt has failed
                    del self.transfers[room]
                self.transfers[said.room] = Transfer(said.rid, said.room, said.prefill, said.decode)
            elif said.what in WORK:
                self.work[word.engine] = said
            else:
                facts: dict[str, Any] = dict(said.facts)
                transfer = self.transfers.get(facts.get("room", -1))
                if transfer is not None:
                    transfer.hear(said, facts)


class Post:
    """A trace reader that remembers who joined, who got what, and what engines said of it."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineJoined] = {}
        self.words: list[Word] = []
        self._heartbeats: dict[str, Heartbeat | None] = {}

    def read(self, record: TraceRecord) -> None:
        """Take one record."""
        event = record.event
        if isinstance(event, EngineJoined):
            self.engines[event.name] = event
        elif isinstance(event, RequestRouted):
            self.words.append(Word(time.perf_counter(), "", event))
        elif isinstance(event, Reported) and event.what in SHOWN:
            self.words.append(Word(time.perf_counter(), event.engine, event))

    def look(self, members: Mapping[str, Any]) -> None:
        """Take down how the engines stand, if that is news; `members`: as the router knows them."""
        for name, member in members.items():
            if member.heartbeat is not None and member.heartbeat is not self._heartbeats.get(name):
                self._heartbeats[name] = member.heartbeat
                self.words.append(Word(time.perf_counter(), name, member.heartbeat))

    def close(self) -> None:
        """Nothing to let go of."""

    def clear(self) -> None:
        """Forget what was about requests."""
        self.words, self._heartbeats = [], {}

    @property
    def board(self) -> Board:
        """How everything stands after all of it."""
        board = Board()
        board.hear(self.words)
        return board

    def of(self, transfer: Transfer) -> list[Reported]:
        """What both engines said of a request: how its prompt was cut, and how its KV moved; causes before effects."""
        return [
            word.said
            for word in self.words
            if isinstance(word.said, Reported)
            and word.said.what not in WORK
            and (dict(word.said.facts).get("room") == transfer.room or word.said.rids == (transfer.rid,))
        ]
