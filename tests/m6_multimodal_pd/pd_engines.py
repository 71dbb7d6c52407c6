"""Helpers of the tests of engines that work together: a group in one process, looked at by its user and by an auditor.

The user sees outputs; none may shrink, change, or come after its end. The auditor looks at all engines after every step
and reads every message on its way, so that a page that goes twice is seen even if it does no harm.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from m6_multimodal_pd import LLMEngine, ModelConfig, RequestOutput, SamplingParams, TraceConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.engine import Engine
from m6_multimodal_pd.disaggregation.router import Router
from m6_multimodal_pd.disaggregation.runtime.links import LocalLinks
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Chunk,
    Decode,
    FirstToken,
    Preallocated,
    Received,
    Relay,
    Tokens,
)
from m6_multimodal_pd.disaggregation.staging import StagedSource
from m6_multimodal_pd.wiring import PARTS, PreparedEngine
from tests.m6_multimodal_pd.engines import setting as m6_setting
from tests.support.engines import Recorder, drain

MANY_STEPS = 2000
Asked = Mapping[str, tuple[Any, SamplingParams, Mapping[str, Any]]]
"""Requests by their ids: a prompt or a conversation, what is asked for, and other keywords."""


def setting(*args: Any, **limits: Any) -> dict[str, Any]:
    """m6's keywords of an engine with these limits, audited after every step."""
    return m6_setting(*args, **{"tokens": 512} | limits)


class Listener(Recorder):
    """A trace reader that keeps the events of a group: `events(kind)` are the router's own."""

    def told(self, kind: str) -> list[Any]:
        """Of the engines' own events those of one kind, as the router passes them on."""
        return [event for event in self.events("reported") if event.what == kind]


class Wire:
    """All that went to engines and came from them, in order."""

    def __init__(self, links: LocalLinks) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.heard: list[tuple[str, Any]] = []
        send, receive = links.send, links.receive

        def tapped_send(name: str, message: Any) -> None:
            send(name, message)
            self.sent.append((name, message))

        def tapped_receive(timeout_s: float) -> Iterator[tuple[str, Any]]:
            for came in receive(timeout_s):
                self.heard.append(came)
                yield came

        links.send, links.receive = tapped_send, tapped_receive  # type: ignore[method-assign]

    def relayed(self, kind: type) -> list[Any]:
        """What engines said to each other, of one kind."""
        return [m.body for _, m in self.sent if isinstance(m, Relay) and isinstance(m.body, kind)]

    def commands(self, kind: type) -> list[Any]:
        """What the router said to engines, of one kind."""
        return [message for _, message in self.sent if isinstance(message, kind)]


@functools.cache
def loaded_once(model_config: ModelConfig, kv_cache_dtype: Any) -> Any:
    """Load a model for all groups of this process. No engine changes it: `update_weights` needs m6's own loader."""
    return PARTS["model_loader"](model_config, kv_cache_dtype)


class Group:
    """A disaggregated engine in one process. Every step is looked at."""

    def __init__(
        self,
        model: Path,
        prefill: int = 1,
        decode: int = 1,
        *,
        parts: Mapping[str, Any] | None = None,
        group: Mapping[str, Any] | None = None,
        is_traced: bool = False,
        **configs: Any,
    ) -> None:
        """`group`: other fields of `DisaggregationConfig`; `configs`: those of `setting`."""
        self.listener = Listener()
        self.engine: Any = LLMEngine(
            model_config=ModelConfig(model=model, device="cpu", dtype="float32"),
            parts={"model_loader": loaded_once, **(parts or {})},
            disaggregation_config=DisaggregationConfig(
                prefill=prefill, decode=decode, transport="in_process", **(group or {})
            ),
            trace_config=TraceConfig(readers=(self.listener,) if is_traced else ()),
            **{**setting(), **configs},
        )
        self.router: Router = self.engine.engine_core.router
        self.routed = Listener()
        self.engine.tracer.attach(self.routed)
        links = self.router.links
        assert isinstance(links, LocalLinks)
        self.links = links
        self.wire = Wire(links)
        self.last: dict[str, RequestOutput] = {}
        self.num_steps = 0

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.engine.close()

    # --- engines ------------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> dict[str, Engine]:
        """Those that are there, by name."""
        return self.links.engines

    def of_role(self, role: str) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.role == role]

    def sides(self, rid: str) -> dict[str, tuple[Engine, Any]]:
        """By role: the engine that has a request of this id now, and the request as it is known there."""
        room = self.room_of(rid)
        return {
            engine.role: (engine, engine.side.rooms[room].req)
            for engine in self.engines.values()
            if room is not None and room in engine.side.rooms
        }

    def room_of(self, rid: str) -> int | None:
        """The room that a request has now."""
        return next((room for room, attempt in self.router.attempts.items() if attempt.req.rid == rid), None)

    @property
    def num_retries(self) -> int:
        """Attempts after the first one, of all requests."""
        return sum(event.attempt > 1 for event in self.routed.events("request_routed"))

    def states(self, rid: str) -> set[str]:
        """Where a request is, in words: on the prefill side, and on the decode side."""
        if rid not in self.router.requests:
            return {"finished"}
        places: dict[str, Any] = {}
        for role, (engine, req) in self.sides(rid).items():
            scheduler = engine.core.scheduler
            queues = ("bootstrap", "inflight") if role == "prefill" else ("prealloc", "transfer")
            places |= {f"{name} queue": req.rid in getattr(scheduler, f"{name}_queue") for name in queues}
            if role == "prefill":
                places |= {
                    "in pieces": req is scheduler.chunked_req,
                    "waiting on prefill": req in scheduler.waiting_queue,
                }
            else:
                places |= {"arrivals": req.rid in scheduler.arrivals, "waiting again": req in scheduler.waiting_queue}
                places["running"] = req in scheduler.running
        return {name for name, is_there in places.items() if is_there} or {"at the router"}

    def lose(self, name: str) -> None:
        """As if an engine's process had died."""
        self.links.drop(name, "it was pulled out")

    # --- the user -----------------------------------------------------------------------------------------------------

    def prompt(self, conversation: Any) -> Any:
        """A prompt as intake takes it; messages become one."""
        is_messages = not isinstance(conversation, str) and conversation and isinstance(conversation[0], Mapping)
        return self.engine.chat_prompt(conversation) if is_messages else conversation

    def add(self, asked: Asked, num_steps: int = 0) -> None:
        """Ask all at once, and step so many times."""
        for rid, (prompt, params, options) in asked.items():
            self.engine.add_request(prompt, params, request_id=rid, **options)
        for _ in range(num_steps):
            self.step()

    def step(self) -> dict[str, RequestOutput]:
        """One step, looked at from both sides."""
        outputs: dict[str, RequestOutput] = self.engine.step()
        self.num_steps += 1
        for rid, output in outputs.items():
            check_goes_on(self.last.get(rid), output)
        self.last |= outputs
        self.check()
        return outputs

    def until(self, happens: Callable[[], bool]) -> None:
        """Step until something is so."""
        for _ in range(MANY_STEPS):
            if happens():
                return
            assert self.engine.has_unfinished_requests(), "it is over, and it did not happen"
            self.step()
        raise AssertionError(f"it did not happen in {MANY_STEPS} steps")

    def run(self, asked: Asked | None = None) -> dict[str, RequestOutput]:
        """Ask all at once, and step until nothing is left anywhere; the last output of everybody so far."""
        for rid in asked or ():
            self.last.pop(rid, None)
        self.add(asked or {})
        self.until(lambda: not self.engine.has_unfinished_requests())
        self.settle()
        return self.last

    def check_all(self, wanted: Mapping[str, RequestOutput], asked: Asked | None = None) -> None:
        """Run; these are the answers, and then nothing is left of anybody."""
        check_alike(self.run(asked), wanted)
        self.check_flushed()

    def settle(self) -> None:
        """Let the engines hear what was said last; then nothing may be left."""
        for _ in range(20):
            if all(is_idle(engine) for engine in self.engines.values()):
                break
            self.router.listen(0)
            self.check()
        self.check_drained()
        check_transfers(self)

    # --- the auditor --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after every step."""
        for engine in self.engines.values():
            engine.core.check_invariants()
            if isinstance(transport := getattr(engine.side, "transport", None), StagedSource):
                transport.check_invariants()
            assert {o.req.rid for o in engine.side.rooms.values()} == set(engine.core.scheduler.requests)
        router = self.router
        in_rooms = [attempt.req.rid for attempt in router.attempts.values()]
        assert sorted([*in_rooms, *(req.rid for req in router.waiting)]) == sorted(router.requests)
        for member in router.members.values():
            mine = {a.room for a in router.attempts.values() if member.name in (a.prefill, a.decode)}
            assert member.rooms <= mine, "an engine is charged with a room that is over"

    def check_drained(self) -> None:
        """What must hold when all is done: nothing waits, runs, is on its way or is remembered of anybody."""
        router = self.router
        assert not router.requests and not router.attempts and not router.latest and not router.running
        assert not any(member.rooms for member in router.members.values())
        for name, engine in self.engines.items():
            scheduler = engine.core.scheduler
            pools = scheduler.pools
            allocator, tree, rows = pools.token_to_kv_pool_allocator, pools.tree_cache, pools.req_to_token_pool
            assert is_idle(engine) and not scheduler.marked and not engine.side.elsewhere, name
            assert rows.available_size() == rows.size and not tree.protected_size(), name
            assert allocator.available_size() + tree.evictable_size() == allocator.size, name
            if engine.role == "decode":
                assert not scheduler.first_tokens and not scheduler.arrivals, name

    def check_flushed(self) -> None:
        """An idle group forgets everything when it is told to."""
        assert self.engine.flush_cache()
        for name, engine in self.engines.items():
            pools = engine.core.scheduler.pools
            allocator = pools.token_to_kv_pool_allocator
            assert allocator.available_size() == allocator.size and not pools.tree_cache.evictable_size(), name
        stats = self.engine.stats()
        assert (stats.evictable_size, stats.protected_size, stats.kv_tokens) == (0, 0, 0)
        assert stats.available_size == stats.max_total_tokens and not stats.embedding_cache_bytes


def is_idle(engine: Engine) -> bool:
    """Whether an engine has nothing to do, and nothing of it is on its way."""
    transport: Any = getattr(engine.side, "transport", None)
    targets = transport.targets if engine.role == "prefill" else ()
    frames_are_free = all(free_frames(transport, target) == transport.num_frames for target in targets)
    return not (engine.side.rooms or engine.side.in_flight or engine.core.scheduler.requests) and frames_are_free


def check_goes_on(before: RequestOutput | None, after: RequestOutput) -> None:
    """What a user has seen stays as it is: more may come, until the end, and nothing comes again."""
    if before is None:
        return
    assert not before.finished, f"{after.request_id} is reported again after its end"
    for old, new in zip(before.outputs, after.outputs, strict=True):
        assert new.token_ids[: len(old.token_ids)] == old.token_ids, f"{after.request_id} takes a token back"
        assert new.text.startswith(old.text), f"{after.request_id} takes text back"
        if old.logprobs is not None and new.logprobs is not None:
            assert len(new.logprobs) == len(new.token_ids)


def free_frames(source: Any, target: str) -> int:
    """Frames of a `StagedSource` without a page in transit to this target."""
    return source.targets[target].frames.num_free  # type: ignore[no-any-return]


def check_transfers(group: Group) -> None:
    """Of every room: no page goes twice; of a room that was handed over, all pages went but those that were there."""
    wire, page_size = group.wire, group.engine.config.cache.page_size
    commands = {command.room: command for command in wire.commands(Decode)}
    starts = {body.room: body.start for body in wire.relayed(Preallocated)}
    firsts = Counter(body.room for body in wire.relayed(FirstToken))
    told = {body.room: body for body in wire.relayed(FirstToken)}
    done = Counter(body.room for body in wire.relayed(Received))
    pages: dict[int, list[int]] = {}
    numbers: dict[int, list[int]] = {}
    for chunk in wire.relayed(Chunk):
        pages.setdefault(chunk.room, []).extend(range(chunk.first_page, chunk.first_page + chunk.num_pages))
        numbers.setdefault(chunk.room, []).append(chunk.number)
    assert set(pages) <= set(starts), "pages were sent for which there was no room"
    assert set(firsts.values()) <= {1} and set(done.values()) <= {1} and set(done) <= set(firsts)
    for room, start in starts.items():
        num_tokens = len(commands[room].job.prompt_token_ids) + len(commands[room].job.output_token_ids)
        first, end = start // page_size, -(-num_tokens // page_size)
        went = pages.get(room, [])
        assert went == list(range(first, first + len(went))) and first + len(went) <= end, (room, went)
        assert numbers.get(room, []) == list(range(len(numbers.get(room, [])))), room
        if room in told:
            assert went == list(range(first, end)), (room, went)
            assert told[room].num_chunks == len(numbers.get(room, []))


def tokens_told(group: Group) -> dict[int, list[int]]:
    """By room: the tokens that came to the router, each place once."""
    found: dict[int, list[int]] = {}
    begins: dict[int, int] = {}
    for _, message in group.wire.heard:
        if isinstance(message, Tokens):
            begin = begins.setdefault(message.room, message.first)
            assert message.first == begin + len(found.setdefault(message.room, [])), "a token is told twice, or not"
            found[message.room] += message.token_ids
    return found


# --- answers ----------------------------------------------------------------------------------------------------------


def aggregated(model: Path, asked: Asked, **configs: Any) -> dict[str, RequestOutput]:
    """What one engine that does everything says to all of this at once."""
    own = {key: value for key, value in configs.items() if key not in ("parts", "group", "is_traced")}
    config = ModelConfig(model=model, device="cpu", dtype="float32")
    with LLMEngine(model_config=config, **{**setting(), **own}) as engine:
        for rid, (prompt, params, options) in asked.items():
            engine.add_request(prompt, params, request_id=rid, **options)
        return drain(engine)


def check_alike(found: Mapping[str, RequestOutput], wanted: Mapping[str, RequestOutput]) -> None:
    """The same answers in every respect; log-probabilities as nearly as another batch computes them."""
    assert found.keys() >= wanted.keys()
    for rid, other in wanted.items():
        own = found[rid]
        assert own.error is None and own.finished, f"{rid}: {own.error!r}"
        assert len(own.outputs) == len(other.outputs)
        for one, two in zip(own.outputs, other.outputs, strict=True):
            assert one.token_ids == two.token_ids, rid
            assert (one.text, one.finish_reason, one.stop_reason) == (two.text, two.finish_reason, two.stop_reason), rid
            check_rows(one.logprobs, two.logprobs, rid)
        check_rows(own.prompt_logprobs, other.prompt_logprobs, rid)


def check_rows(own: Sequence[Any] | None, other: Sequence[Any] | None, what: str) -> None:
    """The same tokens at every place, with as good as the same log-probabilities."""
    assert (own is None) == (other is None), what
    for one, two in zip(own or (), other or (), strict=True):
        assert (one is None) == (two is None), what
        if one is not None and two is not None:
            assert one.keys() == two.keys(), what
            for token_id in one:
                assert one[token_id].logprob == pytest.approx(two[token_id].logprob, abs=1e-3), what
                assert one[token_id].rank == two[token_id].rank, what
                assert one[token_id].decoded_token == two[token_id].decoded_token, what


def engine_of(role: Any, config: Any, shared: Any, send: Any) -> Engine:
    """An engine of this process that comes late."""
    return Engine(
        role=role,
        config=config,
        parts=PARTS,
        prepare=functools.partial(PreparedEngine, load=PARTS["model_loader"]),
        segments=shared,
        send=send,
        is_traced=False,
    )


def add(links: LocalLinks, name: str, make: Callable[[Any], Engine]) -> None:
    """Start an engine of one's own making; its argument sends to the router."""
    role: Any = name.partition("-")[0]
    with patch.object(links, "make", lambda name, role, send: make(send)):
        links.start(name, role)
