"""The picture of the prefix cache, drawn from the trace: what is in it, and what is marked."""

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console, RenderableType
from transformers import AutoTokenizer

from m1_single_request.tracer import Tracer
from m4_radix_cache import DEFAULT_MODEL, TraceConfig
from m4_radix_cache.events import Admit
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.tree_view import TreeView, shorten
from tests.m4_radix_cache.caches import find, make_cache, put
from tests.m4_radix_cache.engines import MakeEngine, cache_of, greedy, ids, setting

TOKENIZER = AutoTokenizer.from_pretrained(DEFAULT_MODEL)


def viewed(kind: str = "radix", **sizes: Any) -> tuple[BasePrefixCache, TreeView]:
    """A cache that belongs to no engine, and a view that reads its trace."""
    tracer, view = Tracer(), TreeView()
    tracer.attach(view)
    return make_cache(kind, tracer=tracer, **sizes), view


def reuse(cache: BasePrefixCache, token_ids: Sequence[int]) -> None:
    """A request is admitted that starts from the cached ones of these tokens."""
    node = find(cache, token_ids).last_device_node
    numbers = {"prefix": 0, "extend": 1, "num_waiting": 0, "num_output_tokens": 0, "need": 1, "rem_total": 9}
    rest: dict[str, Any] = {"cur_rem": 9, "rem_input": 9, "evictable": 0, "result": "continue"}
    cache.record_hit(node)
    cache.tracer.emit(Admit, rid="r", node=node.id, **numbers, **rest)


def draw(view: TreeView) -> RenderableType:
    return view.draw(TOKENIZER)


def drawn(picture: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(picture)
    return console.file.getvalue()  # type: ignore[attr-defined]


def lines(picture: RenderableType, width: int = 100) -> list[str]:
    return [line.rstrip() for line in drawn(picture, width).splitlines()]


def text_ids(text: str, length: int) -> list[int]:
    """The first tokens of a text."""
    token_ids: list[int] = TOKENIZER.encode(text)
    assert len(token_ids) >= length
    return token_ids[:length]


def said(token_ids: Sequence[int]) -> str:
    return repr(TOKENIZER.decode(token_ids))[1:-1]


COMMON = text_ids("The KV of a shared prompt is computed once and read by all of them after that.", 8)
LEFT, RIGHT = text_ids("One user asks about paged attention today.", 4), text_ids("Another one about LRU.", 4)


# --- what stands in it ------------------------------------------------------------------------------------------------


def test_a_node_shows_its_tokens_as_text_and_where_they_lie() -> None:
    cache, view = viewed(page_size=4)
    put(cache, COMMON)
    view.look()
    title, text, numbers, legend, *_ = lines(draw(view))
    assert title == "tree of 1 node: 8 tokens cached (0 locked)"
    assert text == f'└──   1  "{said(COMMON)}"'
    assert numbers.strip() == "8 tokens, slots 4-11, 0 hits, used 1"
    assert legend.startswith("(in front: the number of the node") and "locks" not in legend


def test_what_two_share_stands_once_and_what_they_do_not_hangs_below_it() -> None:
    cache, view = viewed(page_size=4)
    put(cache, COMMON + LEFT)
    put(cache, COMMON + RIGHT)
    view.look()
    shown = lines(draw(view))
    assert [line.split('"')[0] for line in shown if '"' in line] == ["└──   2  ", "    ├──   1  ", "    └──   3  "]
    assert [line.split('"')[1] for line in shown if '"' in line] == [said(COMMON), said(LEFT), said(RIGHT)]


def test_a_path_without_a_fork_is_not_indented() -> None:
    cache, view = viewed(page_size=4)
    for length in (4, 8, 12):
        put(cache, [*COMMON, *LEFT][:length])
    view.look()
    assert [line[:8] for line in lines(draw(view)) if '"' in line] == [
        "└──   1 ",
        "      2 ",
        "      3 ",
    ]


def test_locks_hits_and_priorities_are_shown_where_there_are_any() -> None:
    cache, view = viewed(page_size=4)
    put(cache, COMMON, priority=3)
    cache.inc_lock_ref(find(cache, COMMON).last_device_node)
    reuse(cache, COMMON)
    shown = drawn(draw(view))
    assert "8 tokens cached (8 locked)" in shown
    assert "8 tokens, slots 4-11, 1 lock, 1 hit, used 3, priority 3" in shown
    assert "locks: requests that use it now" in " ".join(shown.split())


def test_slots_that_are_not_neighbours_are_told_in_stretches() -> None:
    cache, view = viewed(page_size=1, num_pages=16)
    allocator = cache.token_to_kv_pool_allocator
    slots = allocator.alloc(14)
    allocator.free(slots[1::2])  # 7 stay, with a gap behind each
    put(cache, ids(9))
    assert "slots 15-16 2 4 and 5 more" in drawn(draw(view))


def test_tenants_stand_apart_under_their_salt() -> None:
    cache, view = viewed(page_size=4)
    put(cache, COMMON)
    put(cache, COMMON, extra_key="alice")
    put(cache, COMMON + LEFT, extra_key="alice")
    view.look()
    shown = [line.split('"')[0].rstrip() for line in lines(draw(view)) if '"' in line or "salt" in line]
    assert shown == ["├── cache_salt 'alice'", "│   └──   2", "│         3", "└──   1"]


@pytest.mark.parametrize("kind", ["radix", "block_hash", "chunk"])
def test_an_empty_cache_is_one_line(kind: str) -> None:
    assert lines(draw(viewed(kind)[1])) == ["empty cache: 0 tokens cached (0 locked)"]


# --- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_long_text_loses_its_middle_so_that_it_fits(width: int) -> None:
    cache, view = viewed(page_size=4, num_pages=200)
    start, end = text_ids("A long prompt begins like this, with words.", 8), text_ids("and it ends with these.", 4)
    put(cache, [*start, *(ids(1) * 500), *end])
    text = next(line for line in lines(draw(view), width) if '"' in line)
    assert max(map(len, lines(draw(view), width))) <= width and len(text) == width
    assert text.split('"')[1].startswith("A long ") and text.endswith(f'{said(end)[-8:]}"') and " ... " in text


def test_control_characters_of_a_text_do_not_reach_the_terminal() -> None:
    cache, view = viewed(page_size=1)
    put(cache, TOKENIZER.encode("a\n\x1b[2J\x07"))
    assert "\x1b" not in drawn(draw(view)) and "\\n\\x1b[2J\\x07" in drawn(draw(view))


def test_markup_in_a_text_is_text() -> None:
    cache, view = viewed(page_size=1)
    put(cache, TOKENIZER.encode("[red]hot[/red] [/]"))
    assert "[red]hot[/red] [/]" in drawn(draw(view))


def test_a_terminal_without_lines_gets_others() -> None:
    cache, view = viewed(page_size=4)
    put(cache, COMMON)
    view.look()
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", errors="replace"), width=80, legacy_windows=False)
    console.print(draw(view))
    console.file.flush()
    assert b"`--   1" in raw.getvalue() and b"?" not in raw.getvalue()


def test_what_is_too_much_is_counted() -> None:
    cache, view = viewed(page_size=1, num_pages=64)
    for first in range(10, 40):
        put(cache, [first, first + 1])
    view.most_nodes = 4
    shown = lines(draw(view))
    assert sum('"' in line for line in shown) == 4 and shown[0].startswith("tree of 30 nodes: 60 tokens")
    assert "└── ... 26 nodes more with 52 tokens" in shown


def test_forks_that_are_too_deep_are_counted() -> None:
    cache, view = viewed(page_size=1, num_pages=64)
    for depth in range(14):
        put(cache, [*ids(depth), 100 + depth])
    put(cache, ids(15))
    shown = drawn(draw(view), 80)
    assert "tree of 28 nodes" in shown and max(map(len, shown.splitlines())) <= 80
    named = sum('"' in line for line in shown.splitlines())
    left_out = [line.split("... ")[1] for line in shown.splitlines() if "... " in line]
    assert named < 28 and len(left_out) == 1 and left_out[0].startswith(f"{28 - named} nodes more")


def test_shorten_keeps_both_ends() -> None:
    assert shorten("abc", 3) == "abc" and shorten("abcdefghijklmnop", 11) == "abc ... nop"
    assert [len(shorten("x" * 30, width)) for width in range(0, 31)] == list(range(0, 31))


# --- what is marked ---------------------------------------------------------------------------------------------------


def test_only_what_came_since_the_last_drawing_is_new() -> None:
    cache, view = viewed(page_size=4)
    put(cache, COMMON + LEFT)
    first = drawn(draw(view))
    assert '+ 1  "' in first and "+ new since the last drawing" in first
    put(cache, COMMON + RIGHT)  # splits node 1
    second = drawn(draw(view))
    assert '+ 3  "' in second and '  1  "' in second and '  2  "' in second
    assert '+ 1  "' not in second and '+ 2  "' not in second, "a split makes nothing new"
    assert "+" not in drawn(draw(view)), "and now nothing has changed"


def test_what_a_request_started_from_is_marked_even_if_it_was_split_for_that() -> None:
    cache, view = viewed(page_size=4)
    put(cache, COMMON + LEFT)
    view.look()
    reuse(cache, COMMON + RIGHT)
    shown = drawn(draw(view))
    assert '* 2  "' in shown and '  1  "' in shown and "* a request has started from it" in shown


def test_what_went_is_counted() -> None:
    cache, view = viewed(page_size=4)
    put(cache, COMMON + LEFT)
    put(cache, COMMON + RIGHT)
    view.look()
    cache.evict(1)
    assert lines(draw(view), 120)[0].endswith("; 4 tokens gone since the last drawing")
    assert "gone" not in drawn(draw(view))


def test_a_page_that_holds_something_else_now_is_new() -> None:
    cache, view = viewed(page_size=4, num_pages=1)
    put(cache, LEFT)
    view.look()
    cache.evict(4)
    put(cache, RIGHT)
    title, text, *_ = lines(draw(view))
    assert text.startswith("└── + 2") and "4 tokens gone" in title


def test_what_was_looked_at_counts_as_drawn() -> None:
    cache, view = viewed(page_size=4)
    put(cache, COMMON)
    view.look()
    assert "+" not in drawn(draw(view))


def test_a_legend_is_given_once() -> None:
    cache, view = viewed(page_size=4)
    put(cache, COMMON)
    view.look()
    assert "hits: requests" in drawn(draw(view)) and "hits: requests" not in drawn(draw(view))


def test_colours_say_nothing_that_marks_do_not() -> None:
    cache, view = viewed(page_size=4)
    put(cache, COMMON)
    terminal = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard", _environ={})
    terminal.print(draw(view))
    out = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[32m" in out, "new is green"


# --- other caches, and a real engine ----------------------------------------------------------------------------------


def test_a_table_of_hashes_is_drawn_as_chains_of_pages() -> None:
    cache, view = viewed("block_hash", page_size=4)
    put(cache, COMMON + LEFT)
    view.look()
    put(cache, COMMON + RIGHT)
    cache.inc_lock_ref(find(cache, COMMON).last_device_node)
    shown = [line.rstrip() for line in lines(draw(view)) if not line.startswith("(")]
    assert shown[:7] == [
        "table of 4 hashed pages: 16 tokens cached (8 locked)",
        f'└──   1  "{said(COMMON)}"',
        "         8 tokens, slots 4-11, 1 lock, 0 hits",
        f'    ├──   3  "{said(LEFT)}"',
        "    │        4 tokens, slots 12-15, 0 hits",
        f'    └── + 6  "{said(RIGHT)}"',
        "             4 tokens, slots 24-27, 0 hits",
    ]
    assert view.texts(TOKENIZER) == {}, "a page may hold something else soon"


def test_a_longer_chain_is_new_only_where_it_has_grown() -> None:
    cache, view = viewed("block_hash", page_size=4)
    put(cache, COMMON)
    view.look()
    put(cache, COMMON + LEFT)
    shown = [line.strip() for line in lines(draw(view))]
    assert shown[2] == "8 tokens, slots 4-11, 0 hits" and shown[3].startswith("+ 5  ")
    assert shown[4] == "4 tokens, slots 20-23, 0 hits"


def test_texts_are_those_of_the_nodes() -> None:
    cache, view = viewed(page_size=4)
    put(cache, COMMON + LEFT)
    put(cache, COMMON + RIGHT)
    assert view.texts(TOKENIZER) == {1: said(LEFT), 2: said(COMMON), 3: said(RIGHT)}
    cache.reset()
    assert view.texts(TOKENIZER) == {} and "16 tokens gone" not in drawn(draw(view)), "none of them was drawn"


@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_the_view_of_an_engine_is_what_its_cache_holds(make_engine: MakeEngine, kind: str) -> None:
    """After every step, in little memory, with locks, splits and evictions."""
    view = TreeView()
    engine = make_engine(
        **setting(3, tokens=88, conservativeness=0.0, cache=kind, page_size=4),
        trace_config=TraceConfig(readers=(view,)),
    )
    for first in (5, 5, 40, 5, 60, 40):
        engine.add_request([*ids(9), *ids(9, first)], greedy(12), priority=first)
        for _ in range(3):
            engine.step()
            check_view(engine, view)
    while engine.has_unfinished_requests():
        engine.step()
        check_view(engine, view)
    assert engine.stats().num_evicted_tokens and engine.flush_cache()
    assert lines(draw(view))[0].startswith("empty cache: 0 tokens cached (0 locked), 88 of 88 slots free")


def check_view(engine: Any, view: TreeView) -> None:
    stats, cache = engine.stats(), cache_of(engine)
    num_tokens = stats.evictable_size + stats.protected_size
    title = lines(draw(view), 200)[0]
    if num_tokens:
        assert f"{num_tokens:,} tokens cached ({stats.protected_size:,} locked)" in title
    assert f"{stats.available_size:,} of {stats.max_total_tokens:,} slots free" in title
    if isinstance(cache, RadixCache):
        for node in cache.nodes():
            seen = view._nodes[node.id]
            assert node.parent is not None and seen.parent is not None and seen.parent.number == node.parent.id
            assert (seen.lock_ref, seen.hit_count, seen.priority) == (node.lock_ref, node.hit_count, node.priority)
            assert seen.slots.tolist() == node.value.tolist() and seen.last_access_time is not None
            assert seen.last_access_time <= node.last_access_time, "a look-up without an admission is in no event"
            assert len(seen.token_ids) == len(node.value)


def test_a_picture_stays_what_it_was_when_the_engine_goes_on(make_engine: MakeEngine) -> None:
    view = TreeView()
    engine = make_engine(**setting(page_size=4), trace_config=TraceConfig(readers=(view,)))
    engine.add_request(ids(9), greedy(6))
    engine.step()
    picture = draw(view)
    before = drawn(picture)
    assert "1 lock" in before
    while engine.has_unfinished_requests():
        engine.step()
    engine.generate(ids(30), greedy(3))
    assert drawn(picture) == before != drawn(draw(view))
