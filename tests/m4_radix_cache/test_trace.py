"""What m4's events say is the truth about the cache. Their form is tested for all milestones in `tests/events`.

The trace alone must explain why a request computed as little as it did, who got in and who did not, what had to go, and
whose each page is.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from m4_radix_cache import ConsoleReader, JsonlReader, LLMEngine, TraceConfig
from m4_radix_cache.invariants import pages_of
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from tests.events.milestones import MILESTONES, event_classes
from tests.m4_radix_cache.engines import MakeEngine, check_flushed, greedy, ids, run, scheduler_of, setting, unfinished
from tests.m4_radix_cache.event_examples import ADMIT, AUDIT, BATCH, EVICTED, MATCHED, ORDER, RETRACT
from tests.support.traces import fields, traced

HEAD = ids(40)
"""What several prompts have in common: more than is needed to wait for."""


def crowd(engine: LLMEngine) -> None:
    """Sharing, a salt, a family and long answers, which together outgrow a memory of 88 tokens."""
    engine.add_request(HEAD[:12], greedy(40), request_id="long")
    engine.step()
    engine.add_request([*HEAD, 60, 61], greedy(6), request_id="a")
    engine.add_request([*HEAD, 70, 71, 72], greedy(5), request_id="b")
    engine.add_request(HEAD, greedy(7), request_id="whole")
    engine.add_request(ids(13, 100), greedy(30), request_id="salted", cache_salt="tenant", priority=2)
    engine.add_request(ids(9, 150), greedy(5, n=2, temperature=1.0, seed=3), request_id="two")


CROWDED = {"tokens": 88, "conservativeness": 0.0}


# --- forms of events --------------------------------------------------------------------------------------------------


def test_events_name_their_requests() -> None:
    assert ORDER.request_ids() == ("a", "b", "c") and BATCH.request_ids() == ("a", "b")
    assert MATCHED.request_ids() == ("c",) and RETRACT.request_ids() == ADMIT.request_ids() == ("a",)


def test_summaries_lanes_and_curves_of_events() -> None:
    assert BATCH.brief() == "extend  3 tokens of 2 requests, 527 more cached"
    assert dataclasses.replace(BATCH, mode="decode").brief() == "decode  3 tokens of 2 requests"
    assert (EVICTED.brief(), RETRACT.brief()) == ("evicted: 48 tokens", "retracted: a")
    assert BATCH.lanes() == (("a", "extend"), ("b", "extend"))
    assert AUDIT.counters() == {
        "KV slots free": 1000,
        "KV slots evictable": 500,
        "KV slots protected": 400,
        "KV slots owned": 100,
    }


# --- why so little was computed ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
def test_the_trace_alone_tells_how_much_each_request_skipped_and_why(make_engine: MakeEngine, cache: str) -> None:
    engine, recorder = traced(make_engine, **setting(3, cache=cache, **CROWDED))
    crowd(engine)
    outputs = run(engine)
    found: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for record in recorder.records:
        event: Any = record.event
        if event.kind == "matched":
            found[event.rid] = event
        elif event.kind == "admit":
            match = found.pop(event.rid)
            assert (event.prefix, event.extend) == (match.device_hit, match.query_len - match.device_hit)
            assert match.device_hit <= match.limit == match.query_len - 1
            first.setdefault(event.rid, event)
    assert {rid: output.metrics.cached_tokens for rid, output in outputs.items() if rid != "two"} == {
        rid: admit.prefix for rid, admit in first.items() if not rid.startswith("two/")
    }
    stats, admits = engine.stats(), recorder.events("admit")
    extends = [event for event in recorder.events("batch") if event.mode == "extend"]
    assert sum(event.num_cached for event in extends) == sum(admit.prefix for admit in admits)
    assert stats.num_cached_tokens == sum(admit.prefix for admit in admits)
    assert stats.num_prompt_tokens == sum(event.total_tokens for event in extends)
    assert stats.num_evicted_tokens == sum(event.freed for event in recorder.events("evicted"))
    assert stats.num_retractions == len(recorder.events("retract")) > 0
    assert (stats.num_cached_tokens > 0) == (stats.num_evicted_tokens > 0) == (cache != "chunk")


def test_whoever_may_skip_nothing_is_told_why(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(4))
    engine.generate(HEAD, greedy(1))
    engine.generate(HEAD, greedy(1, prompt_logprobs=1), request_id="rated")
    engine.generate(HEAD, greedy(1), request_id="salted", cache_salt="tenant")
    assert [event.explain() for event in recorder.events("matched")] == [
        "req-0 can skip none of its 40 tokens: no prefix of it is cached.",
        "rated can skip none of its 40 tokens: the logits of its whole prompt are needed.",
        "salted can skip none of its 40 tokens: no prefix of it is cached.",
    ]
    assert fields(recorder.events("request_options"), "rid", "priority", "extra_key") == [("salted", 0, "tenant")]


# --- who got in, and who had to go ------------------------------------------------------------------------------------


def test_who_must_wait_is_told_which_limit_stands_in_the_way(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(2, tokens=40, policy="fcfs"))
    engine.generate(ids(17), greedy(1))
    for rid, prompt in (("a", ids(6, 50)), ("hit", ids(18)), ("c", ids(1, 70))):
        engine.add_request(prompt, greedy(12), request_id=rid)
    engine.step()
    (waits,) = recorder.events("not_admitted")
    assert (waits.rid, waits.limit, waits.is_locked, waits.prefix) == ("hit", "memory", True, 16)
    assert waits.needed >= waits.available and "once its 16 cached tokens are locked" in (waits.explain())
    run(engine)
    engine, recorder = traced(make_engine, **setting(2))
    for rid in ("a", "b", "c"):
        engine.add_request(ids(3), greedy(3), request_id=rid)
        engine.step()
    assert recorder.events("not_admitted") == [], "with no place free nobody is even asked"
    run(engine)
    assert fields(recorder.events("admit"), "rid") == [("a",), ("b",), ("c",)]


def test_a_retraction_says_who_why_and_what_is_expected_now(make_engine: MakeEngine, cache: str) -> None:
    engine, recorder = traced(make_engine, **setting(2, tokens=28, cache=cache, conservativeness=0.0))
    engine.add_request(ids(4), greedy(11), request_id="old")
    engine.step()
    engine.add_request(ids(5, 50), greedy(11), request_id="new")
    outputs = run(engine)
    event, *_ = recorder.events("retract")
    assert (event.rid, event.needed) == ("new", 4) and event.available < event.needed
    assert 0 < event.new_token_ratio <= 1 and event.num_tokens == 5 + event.num_output_tokens - 1
    step = next(record.step for record in recorder.records if record.event is event)
    assert all(record.step != step for record in recorder.records if record.event.kind == "admit")
    back = next(admit for admit in recorder.events("admit") if admit.num_output_tokens)
    assert (back.rid, back.num_output_tokens) == ("new", event.num_output_tokens)
    assert back.prefix + back.extend == event.num_tokens + 1
    assert {rid: output.metrics.num_output_tokens for rid, output in outputs.items()} == {"old": 11, "new": 11}


# --- whose each page is -----------------------------------------------------------------------------------------------


class Books:
    """The cache and its pages, kept from the trace alone; fails where an event cannot be true."""

    def __init__(self, page_size: int, *, is_tree: bool) -> None:
        self.page_size, self.is_tree = page_size, is_tree
        self.owner: dict[int, str | None] = {}  # of each page that is not free; None: the cache
        self.slots: dict[str, dict[int, int]] = {}  # of the tokens that a request computed
        self.pages: dict[int, list[int]] = {}  # of each node
        self.parent: dict[int, int] = {}
        self.locks: Counter[int] = Counter()

    def read(self, event: Any) -> None:
        getattr(self, event.kind, lambda event: None)(event)

    def batch(self, event: Any) -> None:
        slots = iter(event.out_slots)
        for rid, start, end in zip(event.rids, event.prefix_lens, event.seq_lens, strict=True):
            own = self.slots.setdefault(rid, {})
            for position in range(start, end):
                own[position] = slot = next(slots)
                page, is_first = slot // self.page_size, position % self.page_size == 0
                assert slot % self.page_size == position % self.page_size
                assert self.owner.get(page, "nobody") == ("nobody" if is_first else rid), "written into another's page"
                self.owner[page] = rid

    def inserted(self, event: Any) -> None:
        assert event.num_new == len(event.pages) * self.page_size
        for page in event.pages:
            assert self.owner[page] is not None, "the cache had it already"
            self.owner[page] = None
        if event.pages and self.is_tree:
            self.pages[event.node], self.parent[event.node] = list(event.pages), event.parent
        self.check_sizes(event)

    def split(self, event: Any) -> None:
        pages, number = self.pages[event.node], event.head // self.page_size
        self.pages[event.upper], self.pages[event.node] = pages[:number], pages[number:]
        self.parent[event.upper], self.parent[event.node] = self.parent[event.node], event.upper
        self.locks[event.upper] = self.locks[event.node]
        assert (event.tail, event.lock_ref) == (len(pages[number:]) * self.page_size, self.locks[event.node])

    def locked(self, event: Any) -> None:
        moved, node = 0, event.node
        while self.is_tree and node:
            before = self.locks[node]
            self.locks[node] += event.delta
            moved += len(self.pages[node]) * self.page_size if not (before and self.locks[node]) else 0
            assert self.locks[node] >= 0
            node = self.parent[node]
        assert not self.is_tree or moved == event.num_tokens
        self.check_sizes(event)

    def duplicates_freed(self, event: Any) -> None:
        self.free(event.rid, [self.slots[event.rid][event.start + each] for each in range(event.num_tokens)])

    def released(self, event: Any) -> None:
        slots = [self.slots[event.rid][event.start + each] for each in range(event.num_tokens)]
        assert list(dict.fromkeys(slot // self.page_size for slot in slots)) == list(event.pages)
        self.free(event.rid, slots)

    def evicted(self, event: Any) -> None:
        for node, count in zip(event.nodes, event.token_counts, strict=True):
            pages = self.pages.pop(node) if self.is_tree else [node]
            assert len(pages) * self.page_size == count and not self.locks[node], "in use"
            for page in pages:
                assert self.owner.pop(page) is None
        self.check_sizes(event)

    def cache_flushed(self, event: Any) -> None:
        self.__init__(self.page_size, is_tree=self.is_tree)  # type: ignore[misc]

    def audit(self, event: Any) -> None:
        self.check_sizes(event)
        assert event.holds and event.available == event.total - len(self.owner) * self.page_size

    def free(self, rid: str, slots: Iterable[int]) -> None:
        for page in {slot // self.page_size for slot in slots}:
            assert self.owner.pop(page) == rid

    def check_sizes(self, event: Any) -> None:
        assert event.evictable + event.protected == self.num_cached * self.page_size
        if self.is_tree:
            locked = sum(len(pages) for node, pages in self.pages.items() if self.locks[node])
            assert event.protected == locked * self.page_size

    @property
    def num_cached(self) -> int:
        return sum(owner is None for owner in self.owner.values())


@pytest.mark.sample(2)
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_trace_alone_tells_whose_each_page_is(make_engine: MakeEngine, cache: str, page_size: int) -> None:
    """After every step, through sharing, splits, duplicates, evictions, retractions and an abort."""
    engine, recorder = traced(make_engine, **setting(3, cache=cache, page_size=page_size, **CROWDED))
    scheduler, books, seen = scheduler_of(engine), Books(page_size, is_tree=cache == "radix"), 0
    crowd(engine)
    for number, _ in enumerate(unfinished(engine)):
        if number == 12:
            engine.abort_request("two")
        engine.step()
        for record in recorder.records[seen:]:
            books.read(record.event)
        seen = len(recorder.records)
        assert set(books.owner) == set(scheduler.pools.token_to_kv_pool_allocator.owned_pages().tolist())
        _, own = pages_of(scheduler.running, scheduler.pools)
        assert sorted(page for page, owner in books.owner.items() if owner is not None) == sorted(own)
        tree = scheduler.tree_cache
        if isinstance(tree, RadixCache):
            nodes = {node.id: (node.value[::page_size] // page_size).tolist() for node in tree.nodes()}
            assert books.pages == nodes
            assert {node.id: node.lock_ref for node in tree.nodes()} == {node: books.locks[node] for node in nodes}
    assert not +books.locks
    check_flushed(engine)
    books.read(recorder.events("cache_flushed")[-1])
    assert not books.owner
    wanted = {"radix": {"inserted", "split", "locked", "evicted"}, "hash": {"inserted", "locked", "evicted"}}
    seen_kinds = set(recorder.kinds())
    assert seen_kinds >= wanted.get(cache, set()) | {"batch", "released", "audit", "abort"}
    assert "retract" in seen_kinds or page_size == 1


def test_a_lock_that_stays_where_it_is_and_one_on_the_root_are_not_told(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(2))
    engine.generate(ids(6), greedy(2))
    wanted = ("delta", "num_tokens", "protected")
    assert fields(recorder.events("locked"), *wanted) == [(1, 4, 4), (-1, 4, 0)]
    engine.generate(ids(6), greedy(2))  # it finds the page that it would cache
    assert fields(recorder.events("locked"), *wanted) == [(1, 4, 4), (-1, 4, 0)] * 2


def test_an_audit_that_fails_tells_the_equation_first(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(2, tokens=80))
    engine.add_request(ids(6), greedy(3))
    engine.step()
    lost = scheduler_of(engine).pools.token_to_kv_pool_allocator.alloc(8)
    with pytest.raises(AssertionError, match="72 of 80 tokens are accounted for"):
        engine.step()
    assert recorder.events("audit")[-1].explain() == (
        "64 free + 0 evictable + 4 protected + 4 owned by requests is not 80 slots: 8 slots lost."
    )
    assert lost is not None
    scheduler_of(engine).pools.token_to_kv_pool_allocator.free(lost)
    run(engine)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_without_debug_nothing_is_audited(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(2, debug=False))
    engine.generate(ids(6), greedy(3))
    assert recorder.events("audit") == [] and len(recorder.events("step_done")) == 3


# --- readers, and nobody who reads ------------------------------------------------------------------------------------


def test_without_a_reader_no_event_is_built(
    make_engine: MakeEngine, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"{type(self).__name__} was built")

    engine = make_engine(**setting(3, cache=cache, **CROWDED))
    for event_class in (one for milestone in MILESTONES for one in event_classes(milestone)):
        monkeypatch.setattr(event_class, "__init__", built)
    crowd(engine)
    run(engine)
    assert engine.stats().num_retractions > 0
    check_flushed(engine)


@pytest.mark.parametrize("verbose", [True, False], ids=["verbose", "summary"])
def test_the_consoles_show_what_is_shared(
    make_engine: MakeEngine, capsys: pytest.CaptureFixture[str], verbose: bool
) -> None:
    console = TraceConfig(readers=(ConsoleReader(verbose=verbose),))
    engine = make_engine(trace_config=console, **setting(3, **CROWDED))
    crowd(engine)
    run(engine)
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    for part in (
        [
            "salted has priority 2 and shares KV only with requests under the salt 'tenant'.",
            "because a request before them computes the same prefix: b (12), whole (12), two/1 (0).",
            "b can skip 40 of its 43 tokens, whose KV is in the cache",
            "b joins: 3 tokens to compute, 40 more are in the cache.",
            "is split, because a request shares only its first",
            "under the salt 'tenant'",
            "chosen by lru",
            "is retracted: the next tokens need",
            "= 88 slots: none is lost, none counted twice.",
        ]
        if verbose
        else ["more cached", "evicted: ", "retracted: "]
    ):
        assert part in said
    assert "path to node 0" not in said and not re.search(r"\bNone\b|\(\)|: 0 tokens are (protected|evictable)", said)
    if not verbose:
        assert len(said.split("step ")) - 1 == engine.stats().num_steps


def test_a_salt_of_any_characters_is_told(make_engine: MakeEngine, tmp_path: Path, cache: str) -> None:
    path = tmp_path / "trace.jsonl"
    readers = (JsonlReader(path), ConsoleReader())
    engine = make_engine(trace_config=TraceConfig(readers=readers), **setting(2, cache=cache))
    for salt in ("\x00", "\n", "ü" * 100, "]"):
        assert engine.generate(ids(9), greedy(2), cache_salt=salt).finish_reason == "length"
        assert engine.generate(ids(9), greedy(2), cache_salt=salt).metrics.cached_tokens == (cache != "chunk") * 8
    engine.close()
    assert len(path.read_text(encoding="utf-8").splitlines()) > 20
