"""The picture of the prefix cache, drawn from the trace: its nodes, their numbers, and the marks of changes."""

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from m1_single_request.trace_event import Event
from m1_single_request.trace_file import read_trace
from m1_single_request.tracer import Tracer
from m4_radix_cache import DEFAULT_MODEL, TraceConfig
from m4_radix_cache.events import Admit
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.host_events import Acknowledged, Demoted, HostEvicted, LoadBack, Reattached, WriteStarted
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.views.radix_tree import RadixTreeView
from tests.m4_radix_cache.caches import find, make_cache, put
from tests.m4_radix_cache.engines import MakeEngine, cache_of, greedy, ids, setting
from tests.m4_radix_cache.tiers import Tiers, count_copies
from tests.support.views import text_of

TOKENIZER = AutoTokenizer.from_pretrained(DEFAULT_MODEL)


def viewed(kind: str = "radix", **sizes: Any) -> tuple[BasePrefixCache, RadixTreeView]:
    """A cache that belongs to no engine, and a view that reads its trace."""
    tracer, view = Tracer(), RadixTreeView()
    tracer.attach(view)
    return make_cache(kind, tracer=tracer, **{"page_size": 4} | sizes), view


def reuse(cache: BasePrefixCache, token_ids: Sequence[int]) -> None:
    """Admit a request that starts from the cached ones of these tokens."""
    node = find(cache, token_ids).last_device_node
    numbers = {"prefix": 0, "extend": 1, "num_waiting": 0, "num_output_tokens": 0, "need": 1, "rem_total": 9}
    rest: dict[str, Any] = {"cur_rem": 9, "rem_input": 9, "evictable": 0, "result": "continue"}
    cache.record_hit(node)
    cache.tracer.emit(Admit, rid="r", node=node.id, **numbers, **rest)


def printed(picture: Any, width: int = 100) -> list[str]:
    return [line.rstrip() for line in text_of(picture, width).splitlines()]


def drawn(view: RadixTreeView, width: int = 100) -> list[str]:
    return printed(view.draw(TOKENIZER), width)


def texts(lines: Sequence[str]) -> list[str]:
    """The lines with a text, up to it."""
    return [line.split('"')[0] for line in lines if '"' in line]


def text_ids(text: str, length: int) -> list[int]:
    token_ids: list[int] = TOKENIZER.encode(text)
    assert len(token_ids) >= length
    return token_ids[:length]


def decoded(token_ids: Sequence[int]) -> str:
    return repr(TOKENIZER.decode(token_ids))[1:-1]


COMMON = text_ids("The KV of a shared prompt is computed once and read by all of them after that.", 8)
LEFT, RIGHT = text_ids("One user asks about paged attention today.", 4), text_ids("Another one about LRU.", 4)


# --- nodes and their numbers ------------------------------------------------------------------------------------------


def test_a_node_has_its_text_its_slots_and_its_last_use() -> None:
    cache, view = viewed()
    put(cache, COMMON)
    assert drawn(view) == [
        "tree of 1 node: 8 tokens cached (0 locked)",
        f'└── + 1  "{decoded(COMMON)}"',
        "         8 tokens, slots 4-11, 0 hits, used 1",
    ]


def test_common_tokens_are_drawn_once_with_a_branch_for_each_continuation() -> None:
    cache, view = viewed()
    put(cache, COMMON + LEFT)
    put(cache, COMMON + RIGHT)
    view.draw(TOKENIZER)
    lines = drawn(view)
    assert texts(lines) == ["└──   2  ", "    ├──   1  ", "    └──   3  "]
    assert [line.split('"')[1] for line in lines if '"' in line] == [decoded(COMMON), decoded(LEFT), decoded(RIGHT)]


def test_slots_that_are_not_neighbours_are_listed_in_ranges() -> None:
    cache, view = viewed(page_size=1, num_pages=16)
    allocator = cache.token_to_kv_pool_allocator
    slots = allocator.alloc(14)
    allocator.free(slots[1::2])  # 7 stay, with a gap behind each
    put(cache, ids(9))
    assert "slots 15-16 2 4 and 5 more" in drawn(view)[2]


def test_tenants_have_branches_under_their_salts() -> None:
    cache, view = viewed()
    put(cache, COMMON)
    for salt in ("bob", "alice"):
        put(cache, COMMON, extra_key=salt)
    assert [line.split('"')[0].rstrip() for line in drawn(view) if "slots" not in line][1:] == [
        "├── cache_salt 'alice'", "│   └── + 3", "├── cache_salt 'bob'", "│   └── + 2", "└── + 1",
    ]  # fmt: skip


def test_a_table_of_hashes_is_drawn_as_chains_of_pages() -> None:
    cache, view = viewed("block_hash")
    put(cache, COMMON + LEFT)
    view.draw(TOKENIZER)
    put(cache, COMMON + RIGHT)
    cache.inc_lock_ref(find(cache, COMMON).last_device_node)
    assert drawn(view) == [
        "table of 4 hashed pages: 16 tokens cached (8 locked)",
        f'└──   1  "{decoded(COMMON)}"',
        "         8 tokens, slots 4-11, 1 lock, 0 hits",
        f'    ├──   3  "{decoded(LEFT)}"',
        "    │        4 tokens, slots 12-15, 0 hits",
        f'    └── + 6  "{decoded(RIGHT)}"',
        "             4 tokens, slots 24-27, 0 hits",
    ]


@pytest.mark.parametrize("kind", ["radix", "block_hash", "chunk"])
def test_an_empty_cache_is_one_line(kind: str) -> None:
    assert drawn(viewed(kind)[1]) == ["empty cache: 0 tokens cached (0 locked)"]


# --- marks ------------------------------------------------------------------------------------------------------------


def test_nodes_since_the_last_drawing_are_new_and_a_split_makes_none() -> None:
    cache, view = viewed()
    put(cache, COMMON + LEFT)
    assert texts(drawn(view)) == ["└── + 1  "]
    put(cache, COMMON + RIGHT)  # splits node 1
    assert texts(drawn(view)) == ["└──   2  ", "    ├──   1  ", "    └── + 3  "]
    assert not any("+" in line for line in drawn(view))


def test_a_node_from_which_a_request_starts_is_marked_also_if_it_is_split_for_that() -> None:
    cache, view = viewed()
    put(cache, COMMON + LEFT)
    view.draw(TOKENIZER)
    reuse(cache, COMMON + RIGHT)
    assert texts(drawn(view)) == ["└── * 2  ", "      1  "]


def test_evicted_tokens_are_counted_once_and_only_if_they_were_drawn() -> None:
    cache, view = viewed()
    put(cache, COMMON + LEFT)
    put(cache, COMMON + RIGHT)
    view.draw(TOKENIZER)
    cache.evict(1)
    assert drawn(view, 120)[0].endswith("; 4 tokens gone since the last drawing")
    put(cache, LEFT)
    cache.evict(1)  # the older leaf
    cache.reset()
    assert "; 12 tokens gone" in drawn(view, 120)[0] and "gone" not in drawn(view)[0]


# --- room, and texts that a terminal would act on ---------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_long_text_keeps_its_ends_and_fits(width: int) -> None:
    cache, view = viewed(num_pages=200)
    start, end = text_ids("A long prompt begins like this, with words.", 8), text_ids("and it ends with these.", 4)
    put(cache, [*start, *(ids(1) * 500), *end])
    lines = drawn(view, width)
    text = next(line for line in lines if '"' in line)
    assert max(map(len, lines)) <= width and text.split('"')[1].startswith("A long ")
    if width >= 80:
        assert text.endswith(f'{decoded(end)[-8:]}"') and " ... " in text


@pytest.mark.parametrize(
    ("text", "shown"), [("a\n\x1b[2J\x07", "a\\n\\x1b[2J\\x07"), ("[red]hot[/red] [/]", "[red]hot[/red] [/]")]
)
def test_control_characters_are_escaped_and_markup_is_text(text: str, shown: str) -> None:
    cache, view = viewed(page_size=1)
    put(cache, TOKENIZER.encode(text))
    assert f'"{shown}"' in drawn(view)[1]


def test_a_terminal_without_line_characters_gets_others() -> None:
    cache, view = viewed()
    put(cache, COMMON)
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", errors="replace"), width=80, legacy_windows=False)
    console.print(view.draw(TOKENIZER))
    console.file.flush()
    assert b"`-- + 1" in raw.getvalue() and b"?" not in raw.getvalue()


def test_nodes_beyond_the_limits_are_counted() -> None:
    cache, view = viewed(page_size=1, num_pages=64)
    for first in range(10, 40):
        put(cache, [first, first + 1])
    view.most_nodes = 4
    lines = drawn(view)
    assert len(texts(lines)) == 4 and lines[0].startswith("tree of 30 nodes: 60 tokens")
    assert lines[-1] == "└── ... 26 nodes more with 52 tokens"
    cache, view = viewed(page_size=1, num_pages=64)
    for depth in range(14):
        put(cache, [*ids(depth), 100 + depth])
    put(cache, ids(15))
    lines = drawn(view, 80)
    assert "tree of 28 nodes" in lines[0] and max(map(len, lines)) <= 80
    assert len(texts(lines)) < 28 and f"... {28 - len(texts(lines))} nodes more" in lines[-1]


# --- a real engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_after_every_step_of_a_random_run_the_view_is_the_cache(
    make_engine: MakeEngine, tmp_path: Path, kind: str
) -> None:
    """In little memory, with locks, splits, evictions and salts; and drawn from the file it is the same."""
    random, view, path = Random(4), RadixTreeView(), tmp_path / "trace.jsonl"
    engine = make_engine(
        **setting(3, tokens=88, conservativeness=0.0, cache=kind, page_size=4),
        trace_config=TraceConfig(readers=(view,), jsonl=path),
    )
    for _ in range(12):
        prompt = [*ids(9), *ids(random.choice((4, 9)), random.choice((5, 40, 60)))]
        engine.add_request(prompt, greedy(12), cache_salt=random.choice((None, None, "tenant")))
        for _ in range(random.randrange(6)):
            engine.step()
            check_view(engine, view, random.randrange(20, 120))
    while engine.has_unfinished_requests():
        engine.step()
        check_view(engine, view, 80)
    assert engine.stats().num_evicted_tokens
    later = RadixTreeView()
    for record in read_trace(path, "m4_radix_cache"):
        later.read(record)
    later.draw(TOKENIZER)
    assert drawn(later) == drawn(view)
    assert engine.flush_cache()
    assert drawn(view)[0].startswith("empty cache: 0 tokens cached (0 locked), 88 of 88 slots free")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("write_policy", "failing"), [("write_through_selective", 0.0), ("write_through", 0.2), ("write_back", 0.2)]
)
def test_after_every_step_the_tiers_of_the_view_are_those_of_the_cache(
    make_engine: MakeEngine, tmp_path: Path, write_policy: str, failing: float
) -> None:
    """Copies that are late, out of order or fail, in little memory of both kinds, with a disk; read from the file it is
    the same. Every event names its requests."""
    random, copies, seen = Random(7), Counter[str](), set[str]()
    for seed, prefetch_policy in enumerate((None, "wait_complete", "timeout")):
        view, path = RadixTreeView(), tmp_path / f"{seed}.jsonl"
        tiers = Tiers(64, write_policy, 1, seed, failing, tmp_path / "disk", prefetch_policy)
        engine = make_engine(
            tiers.parts(4),
            **setting(3, tokens=88, conservativeness=0.0, page_size=4, **tiers.settings),
            trace_config=TraceConfig(readers=(view,), jsonl=path),
        )
        for _ in range(16):
            prompt = [*ids(9), *ids(random.choice((4, 9, 20)), random.choice((5, 40, 60)))]
            engine.add_request(prompt, greedy(12), cache_salt=random.choice((None, None, "tenant")))
            for _ in range(random.randrange(6)):
                engine.step()
                check_view(engine, view, random.randrange(20, 120))
        while engine.has_unfinished_requests():
            engine.step()
            check_view(engine, view, 80)
        copies += count_copies(engine)
        for tier in ("host", "device") if write_policy != "write_back" else ("device", "host"):
            assert engine.flush_cache(tier)
            check_view(engine, view, 80)
        later, events = RadixTreeView(), list[Event]()
        for record in read_trace(path, "m4_radix_cache"):
            later.read(record)
            events.append(record.event)
        ends = [index for index, event in enumerate(events) if event.kind == "step_done"]
        for event in events[: ends[-1]]:  # what follows is caused by a call of the user
            if isinstance(event, WriteStarted | Acknowledged | Demoted | HostEvicted | LoadBack | Reattached):
                assert event.request_ids()
                seen.add(event.kind)
        later.draw(TOKENIZER)
        assert drawn(later) == drawn(view)
    assert copies["loaded"] and copies["written"] and copies["evicted from the host"]
    assert (copies["failed"] > 0) == (failing > 0) and copies["from the disk"]
    assert {"write_started", "acknowledged", "demoted", "host_evicted", "load_back"} <= seen


def check_view(engine: Any, view: RadixTreeView, width: int) -> None:
    stats, cache = engine.stats(), cache_of(engine)
    num_tokens = stats.evictable_size + stats.protected_size
    picture = view.draw(TOKENIZER)
    title = printed(picture, 200)[0]
    if on_host := sum(len(node.token_ids) for node in view.nodes.values() if node.is_on_host):
        assert f"slots free, {on_host} tokens in host memory" in title
    assert f"{num_tokens:,} tokens cached ({stats.protected_size:,} locked)" in title
    assert f"{stats.available_size:,} of {stats.max_total_tokens:,} slots free" in title
    assert max(map(len, printed(picture, width))) <= max(width, 40)
    if isinstance(cache, RadixCache):
        assert view.nodes.keys() == {0, *(node.id for node in cache.nodes())}
        for node in cache.nodes():
            shown = view.nodes[node.id]
            assert node.parent is not None and shown.parent is not None and shown.parent.number == node.parent.id
            assert (shown.lock_ref, shown.hit_count) == (node.lock_ref, node.hit_count)
            assert shown.slots.tolist() == node.value.tolist() and len(shown.token_ids) == node.num_tokens
            assert shown.tier == getattr(node, "state", "device")
            assert shown.last_access_time is not None
            assert shown.last_access_time <= node.last_access_time, "a look-up without an admission is in no event"


def test_a_picture_stays_what_it_was_when_the_engine_goes_on(make_engine: MakeEngine) -> None:
    view = RadixTreeView()
    engine = make_engine(**setting(page_size=4), trace_config=TraceConfig(readers=(view,)))
    engine.add_request(ids(9), greedy(6))
    engine.step()
    picture = view.draw(TOKENIZER)
    before = printed(picture)
    assert "1 lock" in " ".join(before)
    while engine.has_unfinished_requests():
        engine.step()
    assert printed(picture) == before != printed(view.draw(TOKENIZER))
