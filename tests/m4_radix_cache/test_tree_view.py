"""The picture of the prefix cache: what stands in it, what is marked, and that looking changes nothing."""

import io
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType
from transformers import AutoTokenizer

from m4_radix_cache import DEFAULT_MODEL
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.tree_view import TreeView, draw_tree, shorten
from tests.m4_radix_cache.caches import CACHES, find, make_cache, put
from tests.m4_radix_cache.engines import MakeEngine, greedy, ids, setting

TOKENIZER = AutoTokenizer.from_pretrained(DEFAULT_MODEL)


def engine_of(cache: BasePrefixCache, tokenizer: Any = TOKENIZER) -> Any:
    """As much of an engine as a view looks at."""
    return SimpleNamespace(
        engine_core=SimpleNamespace(
            scheduler=SimpleNamespace(tree_cache=cache), input_processor=SimpleNamespace(tokenizer=tokenizer)
        )
    )


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
    cache = make_cache(page_size=4)
    put(cache, COMMON)
    title, text, numbers, legend, *_ = lines(draw_tree(engine_of(cache)))
    assert title == "tree of 1 node: 8 tokens cached (0 locked), 248 of 256 slots free"
    assert text == f'└──   1  "{said(COMMON)}"'
    assert numbers.strip() == "8 tokens, slots 4-11, 0 hits, used 2"
    assert legend.startswith("(in front: the number of the node") and "locks" not in legend


def test_what_two_share_stands_once_and_what_they_do_not_hangs_below_it() -> None:
    cache = make_cache(page_size=4)
    put(cache, COMMON + LEFT)
    put(cache, COMMON + RIGHT)
    shown = lines(draw_tree(engine_of(cache)))
    assert [line.split('"')[0] for line in shown if '"' in line] == ["└──   2  ", "    ├──   1  ", "    └──   3  "]
    assert [line.split('"')[1] for line in shown if '"' in line] == [said(COMMON), said(LEFT), said(RIGHT)]


def test_a_path_without_a_fork_is_not_indented() -> None:
    cache = make_cache(page_size=4)
    for length in (4, 8, 12):
        put(cache, [*COMMON, *LEFT][:length])
    assert [line[:8] for line in lines(draw_tree(engine_of(cache))) if '"' in line] == [
        "└──   1 ",
        "      2 ",
        "      3 ",
    ]


def test_locks_hits_and_priorities_are_shown_where_there_are_any() -> None:
    cache = make_cache(page_size=4)
    put(cache, COMMON, priority=3)
    node = find(cache, COMMON).last_device_node
    cache.inc_lock_ref(node)
    cache.record_hit(node)
    shown = drawn(draw_tree(engine_of(cache)))
    assert "8 tokens cached (8 locked)" in shown
    assert "8 tokens, slots 4-11, 1 lock, 1 hit, used 3, priority 3" in shown
    assert "locks: requests that use it now" in " ".join(shown.split())


def test_slots_that_are_not_neighbours_are_told_in_stretches() -> None:
    cache = make_cache(page_size=1, num_pages=16)
    allocator = cache.token_to_kv_pool_allocator
    slots = allocator.alloc(14)
    allocator.free(slots[1::2])  # 7 stay, with a gap behind each
    put(cache, ids(9))
    assert "slots 15-16 2 4 and 5 more" in drawn(draw_tree(engine_of(cache)))


def test_tenants_stand_apart_under_their_salt() -> None:
    cache = make_cache(page_size=4)
    put(cache, COMMON)
    put(cache, COMMON, extra_key="alice")
    put(cache, COMMON + LEFT, extra_key="alice")
    shown = [
        line.split('"')[0].rstrip() for line in lines(draw_tree(engine_of(cache))) if '"' in line or "salt" in line
    ]
    assert shown == ["├── cache_salt 'alice'", "│   └──   2", "│         3", "└──   1"]


def test_an_empty_cache_is_one_line() -> None:
    assert lines(draw_tree(engine_of(make_cache()))) == [
        "tree of 0 nodes: 0 tokens cached (0 locked), 64 of 64 slots free"
    ]


# --- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_long_text_loses_its_middle_so_that_it_fits(width: int) -> None:
    cache = make_cache(page_size=4, num_pages=200)
    start, end = text_ids("A long prompt begins like this, with words.", 8), text_ids("and it ends with these.", 4)
    put(cache, [*start, *(ids(1) * 500), *end])
    text = next(line for line in lines(draw_tree(engine_of(cache)), width) if '"' in line)
    assert max(map(len, lines(draw_tree(engine_of(cache)), width))) <= width and len(text) == width
    assert text.split('"')[1].startswith("A long ") and text.endswith(f'{said(end)[-8:]}"') and " ... " in text


def test_control_characters_of_a_text_do_not_reach_the_terminal() -> None:
    cache = make_cache(page_size=1)
    put(cache, TOKENIZER.encode("a\n\x1b[2J\x07"))
    assert "\x1b" not in drawn(draw_tree(engine_of(cache))) and "\\n\\x1b[2J\\x07" in drawn(draw_tree(engine_of(cache)))


def test_markup_in_a_text_is_text() -> None:
    cache = make_cache(page_size=1)
    put(cache, TOKENIZER.encode("[red]hot[/red] [/]"))
    assert "[red]hot[/red] [/]" in drawn(draw_tree(engine_of(cache)))


def test_a_terminal_without_lines_gets_others() -> None:
    cache = make_cache(page_size=4)
    put(cache, COMMON)
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", errors="replace"), width=80, legacy_windows=False)
    console.print(draw_tree(engine_of(cache)))
    console.file.flush()
    assert b"`--   1" in raw.getvalue() and b"?" not in raw.getvalue()


def test_what_is_too_much_is_counted() -> None:
    cache = make_cache(page_size=1, num_pages=64)
    for first in range(10, 40):
        put(cache, [first, first + 1])
    shown = lines(TreeView(engine_of(cache), most_nodes=4).draw())
    assert sum('"' in line for line in shown) == 4 and shown[0].startswith("tree of 30 nodes: 60 tokens")
    assert "└── ... 26 nodes more with 52 tokens" in shown


def test_forks_that_are_too_deep_are_counted() -> None:
    cache = make_cache(page_size=1, num_pages=64)
    for depth in range(14):
        put(cache, [*ids(depth), 100 + depth])
    put(cache, ids(15))
    shown = drawn(draw_tree(engine_of(cache)), 80)
    assert "tree of 28 nodes" in shown and max(map(len, shown.splitlines())) <= 80
    named = sum('"' in line for line in shown.splitlines())
    left_out = [line.split("... ")[1] for line in shown.splitlines() if "... " in line]
    assert named < 28 and len(left_out) == 1 and left_out[0].startswith(f"{28 - named} nodes more")


def test_shorten_keeps_both_ends() -> None:
    assert shorten("abc", 3) == "abc" and shorten("abcdefghijklmnop", 11) == "abc ... nop"
    assert [len(shorten("x" * 30, width)) for width in range(0, 31)] == list(range(0, 31))


# --- what is marked ---------------------------------------------------------------------------------------------------


def test_only_what_came_since_the_last_drawing_is_new() -> None:
    cache = make_cache(page_size=4)
    view = TreeView(engine_of(cache))
    put(cache, COMMON + LEFT)
    first = drawn(view.draw())
    assert '+ 1  "' in first and "+ new since the last drawing" in first
    put(cache, COMMON + RIGHT)  # splits node 1
    second = drawn(view.draw())
    assert '+ 3  "' in second and '  1  "' in second and '  2  "' in second
    assert '+ 1  "' not in second and '+ 2  "' not in second, "a split makes nothing new"
    assert "+" not in drawn(view.draw()), "and now nothing has changed"


def test_what_a_request_started_from_is_marked_even_if_it_was_split_for_that() -> None:
    cache = make_cache(page_size=4)
    put(cache, COMMON + LEFT)
    view = TreeView(engine_of(cache))
    cache.record_hit(find(cache, COMMON + RIGHT).last_device_node)
    shown = drawn(view.draw())
    assert '* 2  "' in shown and '  1  "' in shown and "* a request has started from it" in shown


def test_what_went_is_counted() -> None:
    cache = make_cache(page_size=4)
    put(cache, COMMON + LEFT)
    put(cache, COMMON + RIGHT)
    view = TreeView(engine_of(cache))
    cache.evict(1)
    assert lines(view.draw(), 120)[0].endswith("; 4 tokens gone since the last drawing")
    assert "gone" not in drawn(view.draw())


def test_a_page_that_holds_something_else_now_is_new() -> None:
    cache = make_cache(page_size=4, num_pages=1)
    put(cache, LEFT)
    view = TreeView(engine_of(cache))
    cache.evict(4)
    put(cache, RIGHT)
    title, text, *_ = lines(view.draw())
    assert text.startswith("└── + 2") and "4 tokens gone" in title


def test_what_was_looked_at_counts_as_drawn() -> None:
    cache = make_cache(page_size=4)
    view = TreeView(engine_of(cache))
    put(cache, COMMON)
    view.look()
    assert "+" not in drawn(view.draw())


def test_a_legend_is_given_once() -> None:
    cache = make_cache(page_size=4)
    put(cache, COMMON)
    view = TreeView(engine_of(cache))
    assert "hits: requests" in drawn(view.draw()) and "hits: requests" not in drawn(view.draw())


def test_colours_say_nothing_that_marks_do_not() -> None:
    cache = make_cache(page_size=4)
    view = TreeView(engine_of(cache))
    put(cache, COMMON)
    terminal = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard", _environ={})
    terminal.print(view.draw())
    out = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[32m" in out, "new is green"


# --- other caches, and a real engine ----------------------------------------------------------------------------------


def test_a_table_of_hashes_is_drawn_as_chains_of_pages() -> None:
    cache = make_cache("block_hash", page_size=4)
    put(cache, COMMON + LEFT)
    view = TreeView(engine_of(cache))
    put(cache, COMMON + RIGHT)
    cache.inc_lock_ref(find(cache, COMMON).last_device_node)
    shown = [line for line in lines(view.draw()) if not line.startswith("(")]
    assert shown[:4] == [
        "table of 4 hashed pages: 16 tokens cached (8 locked), 240 of 256 slots free",
        "└──   1  8 tokens, slots 4-11, 1 lock",
        "    ├──   3  4 tokens, slots 12-15",
        "    └── + 6  4 tokens, slots 24-27",
    ]


def test_a_longer_chain_is_new_only_where_it_has_grown() -> None:
    cache = make_cache("block_hash", page_size=4)
    put(cache, COMMON)
    view = TreeView(engine_of(cache))
    put(cache, COMMON + LEFT)
    assert [line.strip() for line in lines(view.draw())[1:3]] == [
        "└──   1  8 tokens, slots 4-11",
        "+ 5  4 tokens, slots 20-23",
    ]


def test_a_cache_that_keeps_nothing_says_so() -> None:
    assert lines(draw_tree(engine_of(make_cache("chunk")))) == [
        "ChunkCache: nothing is kept. What a request computes is free when it ends."
    ]


def test_a_cache_of_somebody_elses_shows_its_sizes() -> None:
    class MyCache(CACHES["block_hash"]):  # type: ignore[misc, name-defined]
        pass

    cache = make_cache("block_hash", page_size=4)
    cache.__class__ = MyCache
    put(cache, COMMON)
    assert lines(draw_tree(engine_of(cache)))[0].startswith("MyCache: 8 tokens cached (0 locked), 248 of 256")


def test_to_look_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(page_size=4))
    for first in (5, 5, 40):
        engine.generate([*ids(9), *ids(5, first)], greedy(6))
    tree = engine.engine_core.scheduler.tree_cache
    assert isinstance(tree, RadixCache)

    def state() -> list[Any]:
        return [(n.id, n.key, n.lock_ref, n.hit_count, n.last_access_time, n.entry, len(n.value)) for n in tree.nodes()]

    before = state()
    drawn(draw_tree(engine))
    assert state() == before and before


def test_a_picture_stays_what_it_was_when_the_engine_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(page_size=4))
    engine.add_request(ids(9), greedy(6))
    engine.step()
    picture = draw_tree(engine)
    before = drawn(picture)
    assert "1 lock" in before
    while engine.has_unfinished_requests():
        engine.step()
    engine.generate(ids(30), greedy(3))
    assert drawn(picture) == before != drawn(draw_tree(engine))
