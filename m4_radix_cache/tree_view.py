"""The prefix cache drawn as what it is: a tree of texts, with the slots, locks and last use of each.

    console.print(draw_tree(engine))      # what is cached now
    view = TreeView(engine)               # a picture now and then, which marks what has changed since the last one
    console.print(view.draw())

    tree of 3 nodes: 512 tokens cached (0 locked), 7,680 of 8,192 slots free
    `-- * 1  "<|im_start|>system\\nYou answer ques ... |>user\\nWhat is"
             480 tokens, slots 16-495, 2 hits, used 9
        |-- + 2  " the code of lamp?<|im_end|>\\n<|i ... istant\\n"
        `-- + 3  " prefix caching?<|im_end|>\\n<|im_ ... istant\\n"

m3's map of blocks followed the trace. This view asks the cache itself, between two steps, because only the cache knows
the tokens; to look changes nothing, no access time either. Runs that follow each other stand below each other, and only
a fork is drawn as one. A table of hashes is drawn as chains of pages: it keeps no tokens. SGLang: `pretty_print` of its
`RadixCache`; vLLM can only count.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text
from rich.tree import Tree

from m1_single_request.events import some
from m4_radix_cache.llm_engine import LLMEngine
from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.block_hash_cache import Block, BlockHashCache
from m4_radix_cache.mem_cache.radix_cache import RadixCache, TreeNode
from m4_radix_cache.mem_cache.radix_key import decode

MOST_NODES = 40  # more are counted, not drawn
MOST_FORKS = 8  # deeper ones likewise: every fork indents what is below it
MOST_RANGES = 3  # of slots that are named
MOST_TOKENS = 120  # of each end of a run that are made text
LEAST_ROOM = 12  # columns of a text that is worth to be shown
GAP = " ... "

Page = tuple[int, int, bytes]
"""The page before it (0: none), its own number, and what tells its content apart."""


@dataclass(frozen=True)
class Run:
    """A node of the tree, or pages of a hash table that follow each other, as they were when somebody looked."""

    number: int
    """Of the node, or of the first page."""
    parent: int
    """The number of the run before it; 0: none."""
    text: str | None
    """Its tokens, of a long run both ends; None if the cache does not know them."""
    slots: Slots
    lock_ref: int
    pages: tuple[Page, ...]
    hit_count: int | None = None
    last_access_time: int | None = None
    priority: int = 0
    namespace: str | None = None
    """Its `cache_salt`, if the run has no parent."""


class TreeView:
    """Draws the cache of an engine again and again. What is there when the view is made is nothing new to it."""

    def __init__(self, engine: LLMEngine, *, most_nodes: int = MOST_NODES) -> None:
        self.engine = engine
        self.most_nodes = most_nodes
        self._seen: dict[Page, int] = {}
        self._explained: list[str] = []
        self.look()

    def look(self) -> None:
        """Take what is cached now as seen, as if it had been drawn."""
        self._seen = _hits_by_page(runs_of(self.engine))

    def draw(self) -> RenderableType:
        """The cache as it is now, in the console's width. Marks what is new or was used since the last drawing.

        Below it stands how to read it, as far as no drawing before had to say that.
        """
        cache: BasePrefixCache = self.engine.engine_core.scheduler.tree_cache
        if cache.disable:
            return Text(f"{type(cache).__name__}: nothing is kept. What a request computes is free when it ends.")
        runs = runs_of(self.engine, self._seen)
        seen, self._seen = self._seen, _hits_by_page(runs)
        marks = {run.number: _mark(run, seen) for run in runs}
        num_gone = len(seen.keys() - self._seen.keys()) * cache.page_size
        root = Tree(_title(cache, runs, num_gone), guide_style="dim")
        _grow(root, runs, marks, self.most_nodes)
        news = [part for part in _legend(runs, marks) if part not in self._explained]
        self._explained += news
        return Group(root, Text(f"({'; '.join(news)})", style="dim")) if news else root


def draw_tree(engine: LLMEngine) -> RenderableType:
    """What the prefix cache of an engine holds now, for `console.print`: a tree, chains of pages, or a sentence."""
    return TreeView(engine).draw()


# --- looking at the caches --------------------------------------------------------------------------------------------


def runs_of(engine: LLMEngine, seen: Container[Page] = ()) -> list[Run]:
    """What is cached, each run behind its parent; nothing if the cache does not say.

    Pages of a table make one run as long as all or none of them are `seen`.
    """
    cache = engine.engine_core.scheduler.tree_cache
    if isinstance(cache, RadixCache):
        tokenizer = engine.engine_core.input_processor.tokenizer
        return [_run_of_node(node, cache.page_size, tokenizer) for node in cache.nodes()]
    if isinstance(cache, BlockHashCache):
        return list(_runs_of_blocks(list(cache.blocks()), cache.page_size, seen))
    return []


def _run_of_node(node: TreeNode, page_size: int, tokenizer: Any) -> Run:
    assert node.parent is not None, "the root holds no tokens"
    page_bytes = len(node.key) // len(node.value) * page_size
    before = int(node.parent.value[-1]) // page_size if len(node.parent.value) else 0
    pages: list[int] = (node.value[::page_size] // page_size).tolist()
    contents = [node.key[start : start + page_bytes] for start in range(0, len(node.key), page_bytes)]
    return Run(
        number=node.id,
        parent=node.parent.id,
        text=_text(decode(node.key), tokenizer),
        slots=node.value.copy(),
        lock_ref=node.lock_ref,
        pages=tuple(zip([before, *pages[:-1]], pages, contents, strict=True)),
        hit_count=node.hit_count,
        last_access_time=node.last_access_time,
        priority=node.priority,
        namespace=node.edge[0] if isinstance(node.edge, tuple) else None,
    )


def _text(token_ids: Sequence[int], tokenizer: Any) -> str:
    """Tokens as text, with line breaks and the like as escapes."""

    def said(ids: Sequence[int]) -> str:
        return repr(tokenizer.decode(ids, skip_special_tokens=False))[1:-1]

    if len(token_ids) <= 2 * MOST_TOKENS:
        return said(token_ids)
    return f"{said(token_ids[:MOST_TOKENS])}{GAP}{said(token_ids[-MOST_TOKENS:])}"


def _runs_of_blocks(blocks: Sequence[Block], page_size: int, seen: Container[Page]) -> Iterator[Run]:
    """Pages that follow each other, without a fork and alike, as one run."""
    behind: dict[int, list[Block]] = {}  # which pages follow a page; page 0 is nobody's, so it stands for the root
    for block in blocks:
        assert block.parent is not None, "the root holds no page"
        behind.setdefault(block.parent.page, []).append(block)

    def kind(block: Block) -> tuple[int, bool]:
        return block.lock_ref, _page(block) in seen

    starts = [(block, 0) for block in reversed(behind.get(0, []))]
    while starts:
        first, parent = starts.pop()
        chain = [first]
        while len(after := behind.get(chain[-1].page, [])) == 1 and kind(after[0]) == kind(first):
            chain += after
        numbers = np.array([block.page for block in chain])
        yield Run(
            number=first.page,
            parent=parent,
            text=None,
            slots=(numbers[:, None] * page_size + np.arange(page_size)).ravel(),
            lock_ref=first.lock_ref,
            pages=tuple(map(_page, chain)),
        )
        starts += [(block, first.page) for block in reversed(after)]


def _page(block: Block) -> Page:
    return block.parent.page if block.parent is not None else 0, block.page, block.digest


def _hits_by_page(runs: Iterable[Run]) -> dict[Page, int]:
    """Every cached page, with the hits of its node. By page, because nodes are split and pages are not."""
    return {page: run.hit_count or 0 for run in runs for page in run.pages}


def _mark(run: Run, seen: dict[Page, int]) -> str:
    """`+`: some of it is new; `*`: somebody has started from it meanwhile."""
    if any(page not in seen for page in run.pages):
        return "+"
    return "*" if (run.hit_count or 0) > seen[run.pages[0]] else " "


# --- drawing ----------------------------------------------------------------------------------------------------------

STYLES = {"+": "green", "*": "cyan", " ": ""}


@dataclass
class _Branch:
    """A place in the picture: runs below each other. What hangs below them is indented."""

    tree: Tree
    depth: int
    chain: list["_Shown"] = field(default_factory=list)
    num_left_out: int = 0
    tokens_left_out: int = 0

    def fork(self) -> "_Branch":
        return _Branch(self.tree.add(""), self.depth + 1)

    def close(self) -> None:
        """Everything that belongs here is known: put it into the picture."""
        if self.chain:
            self.tree.label = Group(*self.chain)
        if self.num_left_out:
            said = f"... {some(self.num_left_out, 'node')} more with {some(self.tokens_left_out, 'token')}"
            self.tree.add(Text(said, style="dim"))


def _grow(root: Tree, runs: Sequence[Run], marks: dict[int, str], most_nodes: int) -> None:
    """Hang every run where it belongs; beyond the limits they are counted."""
    num_behind: dict[int, int] = {}
    for run in runs:
        num_behind[run.parent] = num_behind.get(run.parent, 0) + 1
    trunks = {None: _Branch(root, depth=0)} | {
        name: _Branch(root.add(Text(f"cache_salt {name!r}", style="magenta")), depth=0)
        for name in dict.fromkeys(run.namespace for run in runs)
        if name is not None
    }
    branches: dict[int, _Branch] = {}
    left_out: dict[int, _Branch] = {}
    for run in runs:
        above = branches.get(run.parent) or left_out.get(run.parent) or trunks[run.namespace]
        follows = run.parent in branches and num_behind[run.parent] == 1
        is_too_deep = not follows and above.depth >= MOST_FORKS
        if run.parent in left_out or len(branches) >= most_nodes or is_too_deep:
            left_out[run.number] = above
            above.num_left_out += 1
            above.tokens_left_out += len(run.slots)
            continue
        branches[run.number] = branch = above if follows else above.fork()
        branch.chain.append(_Shown(run, marks[run.number]))
    for branch in {id(branch): branch for branch in [*branches.values(), *trunks.values()]}.values():
        branch.close()


@dataclass(frozen=True)
class _Shown:
    """A run in two lines: its text, as much of both ends as there is room for, and its numbers."""

    run: Run
    mark: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head, style = f"{self.mark} {self.run.number}  ", STYLES[self.mark]
        if self.run.text is not None:
            room = max(LEAST_ROOM, options.max_width - len(head) - 2)
            line = Text.assemble((head, f"bold {style}"), (f'"{shorten(self.run.text, room)}"', style))
            line.truncate(options.max_width, overflow="ellipsis")  # of characters that are two columns wide
            yield line
            head = " " * len(head)
        numbers = Text(", ").join(_numbers(self.run))
        wrapped = numbers.wrap(console, max(LEAST_ROOM, options.max_width - len(head)))
        for line in wrapped:
            yield Text.assemble((head, f"bold {style}"), line)
            head = " " * len(head)


def shorten(text: str, width: int) -> str:
    """A text of at most `width` characters: its beginning and its end, where all of it is too long."""
    if len(text) <= width:
        return text
    tail = max(0, (width - len(GAP)) // 2)
    return f"{text[: max(0, width - len(GAP) - tail)]}{GAP}{text[len(text) - tail :]}"[:width]


def _numbers(run: Run) -> Iterator[Text]:
    yield Text(some(len(run.slots), "token"), style="dim")
    yield Text(f"slots {_ranges(run.slots)}", style="dim")
    if run.lock_ref:
        yield Text(some(run.lock_ref, "lock"), style="bold yellow")
    if run.hit_count is not None:
        yield Text(some(run.hit_count, "hit"), style="dim")
    if run.last_access_time is not None:
        yield Text(f"used {run.last_access_time}", style="dim")
    if run.priority:
        yield Text(f"priority {run.priority}", style="dim")


def _ranges(slots: Slots) -> str:
    """`16-31`, or `16-31 48-63`: the slots in the order of the tokens."""
    stretches = np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1)
    named = [f"{each[0]}-{each[-1]}" if len(each) > 1 else str(each[0]) for each in stretches[:MOST_RANGES]]
    return " ".join(named) + (f" and {len(stretches) - MOST_RANGES} more" if len(stretches) > MOST_RANGES else "")


def _title(cache: BasePrefixCache, runs: Sequence[Run], num_gone: int) -> Text:
    allocator = cache.token_to_kv_pool_allocator
    locked, num_tokens = cache.protected_size(), cache.protected_size() + cache.evictable_size()
    what = {
        RadixCache: f"tree of {some(len(runs), 'node')}",
        BlockHashCache: f"table of {some(num_tokens // cache.page_size, 'hashed page')}",
    }.get(type(cache), type(cache).__name__)
    gone = f"; {some(num_gone, 'token')} gone since the last drawing" if num_gone else ""
    return Text.assemble(
        (what, "bold"),
        f": {some(num_tokens, 'token')} cached ({locked:,} locked), {allocator.available_size():,} of "
        f"{some(allocator.size, 'slot')} free",
        (gone, "yellow"),
    )


def _legend(runs: Sequence[Run], marks: dict[int, str]) -> Iterator[str]:
    """How to read what is drawn, and nothing else."""
    if "+" in marks.values():
        yield "+ new since the last drawing"
    if "*" in marks.values():
        yield "* a request has started from it since the last drawing"
    if runs and runs[0].text is None:
        yield "in front: the number of the first page; a table keeps digests, not text"
    if runs and runs[0].text is not None:
        yield "in front: the number of the node; its text goes on in the nodes below it"
        yield "hits: requests that started from it"
        yield "used: when, counted in look-ups of the cache"
    if any(run.lock_ref for run in runs):
        yield "locks: requests that use it now"
