"""The prefix cache drawn as a tree of texts, with the slots, locks and last use of each, from the trace alone.

    view = TreeView()                     # a reader of the trace: TraceConfig(readers=(view,))
    console.print(view.draw(tokenizer))   # what is cached now; marks the changes since the last drawing

    tree of 3 nodes: 512 tokens cached (0 locked), 7,680 of 8,192 slots free
    `-- * 1  "<|im_start|>system\\nYou answer ques ... |>user\\nWhat is"
             480 tokens, slots 16-495, 2 hits, used 9
        |-- + 2  " the code of lamp?<|im_end|>\\n<|i ... istant\\n"
        `-- + 3  " prefix caching?<|im_end|>\\n<|im_ ... istant\\n"

Nodes that follow each other without a fork are below each other; only a fork is indented. A table of hashes is drawn as
chains of pages. New in m4: m3's block map showed blocks, not tokens. SGLang: `pretty_print` of its `RadixCache`; vLLM
reports counts only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text
from rich.tree import Tree

from m1_single_request.events import StepDone
from m1_single_request.trace_event import some
from m1_single_request.tracer import TraceRecord
from m3_paged_attention.events import KVSized
from m4_radix_cache.events import Admit
from m4_radix_cache.mem_cache.events import CacheFlushed, Evicted, Inserted, Locked, Split

MOST_FORKS = 8  # deeper nodes are counted, not drawn: every fork indents the nodes below it
MOST_RANGES = 3  # of slots that are listed
MOST_TOKENS = 120  # at each end of a node that are decoded
LEAST_ROOM = 12  # columns of a text
GAP = " ... "
STYLES = {"+": "green", "*": "cyan", " ": ""}


@dataclass(eq=False)
class Node:
    """A node of the tree, or a page of the table, as far as the trace has come."""

    number: int
    parent: "Node | None"
    token_ids: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()
    namespace: str | None = None
    """Its `cache_salt`."""
    last_access_time: int | None = None
    """Last use by a request, in counted lookups; None in a table."""
    lock_ref: int = 0
    hit_count: int = 0
    priority: int = 0
    children: list["Node"] = field(default_factory=list)
    is_reused: bool = False
    """Whether a request has started from it since the last drawing."""

    @property
    def slots(self) -> np.ndarray:
        """Its slots, `[num_tokens]`, int64."""
        size = len(self.token_ids) // len(self.pages)
        return (np.array(self.pages)[:, None] * size + np.arange(size)).ravel()


class TreeView:
    """Keeps the cache as a tree of nodes. Attach it before the first request; it needs the whole trace."""

    most_nodes = 40
    """Maximum number of nodes that are drawn; the others are counted."""

    def __init__(self) -> None:
        self._nodes = {0: Node(0, None)}
        self._new_pages: set[int] = set()
        self._num_gone = 0  # tokens evicted since the last drawing, of those that it showed
        self._num_slots = self._num_held = 0  # all; held by requests, at the end of the last step
        self._explained: list[str] = []

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, record: TraceRecord) -> None:
        """Apply an event to the tree."""
        match record.event:
            case Inserted() as event:
                self._insert(event)
            case Split() as event:
                self._split(event)
            case Evicted() as event:
                for number in event.nodes:
                    self._remove(number)
            case CacheFlushed():
                for number in [number for number in self._nodes if number]:
                    self._remove(number)
            case Locked() as event:
                for node in self._path(event.node):
                    node.lock_ref += event.delta
                self._touch(event.node, event.last_access_time)
            case Admit() as event:
                for node in self._path(event.node):
                    node.hit_count, node.is_reused = node.hit_count + 1, True
            case KVSized() as event:
                self._num_slots = event.num_blocks * event.block_size
            case StepDone() as event:
                self._num_held = event.kv_tokens

    def close(self) -> None:
        """Do nothing: the view can be drawn after the run."""

    def _insert(self, event: Inserted) -> None:
        parent = self._nodes[event.parent]
        for number, token_ids, pages in _parts(event):
            self._nodes[number] = node = Node(number, parent, token_ids, pages, event.extra_key)
            parent.children.append(node)
            parent = node
        self._new_pages.update(event.pages)
        for node in self._path(event.node):
            node.priority = max(node.priority, event.priority)
        self._touch(event.node, event.last_access_time)

    def _split(self, event: Split) -> None:
        node = self._nodes[event.node]
        above, head = node.parent, len(node.pages) * event.head // len(node.token_ids)
        assert above is not None, "the root holds no tokens"
        upper = Node(event.upper, above, node.token_ids[: event.head], node.pages[:head], node.namespace)
        upper.lock_ref, upper.hit_count, upper.priority = node.lock_ref, node.hit_count, node.priority
        upper.is_reused, upper.last_access_time = node.is_reused, node.last_access_time
        self._nodes[upper.number] = above.children[above.children.index(node)] = upper
        upper.children.append(node)
        node.parent, node.token_ids, node.pages = upper, node.token_ids[event.head :], node.pages[head:]
        self._touch(event.node, event.last_access_time)

    def _remove(self, number: int) -> None:
        node = self._nodes.pop(number)
        if node.parent is not None and node in node.parent.children:
            node.parent.children.remove(node)
        seen = sum(page not in self._new_pages for page in node.pages)
        self._num_gone += seen * len(node.token_ids) // len(node.pages)
        self._new_pages.difference_update(node.pages)

    def _path(self, number: int) -> Iterator[Node]:
        """Yield a node and all above it, the root excluded."""
        node = self._nodes[number]
        while node.parent is not None:
            yield node
            node = node.parent

    def _touch(self, number: int, last_access_time: int | None) -> None:
        """Set the access time of a node and all above it; a table has none."""
        if last_access_time is not None:
            for node in self._path(number):
                node.last_access_time = max(node.last_access_time or 0, last_access_time)

    # --- drawing ------------------------------------------------------------------------------------------------------

    def draw(self, tokenizer: Any) -> RenderableType:
        """Draw the cache in the console's width, with marks for the changes since the last drawing.

        Below it is a legend of the marks and numbers that no earlier drawing has explained.
        """
        picture = _Picture(tokenizer, self._new_pages, self.most_nodes)
        root = picture.draw(self._title(), self._nodes[0].children)
        news = [part for part in picture.legend() if part not in self._explained]
        self._explained += news
        self.look()
        return Group(root, Text(f"({'; '.join(news)})", style="dim")) if news else root

    def look(self) -> None:
        """Forget the changes, as if the cache had been drawn."""
        self._new_pages.clear()
        self._num_gone = 0
        for node in self._nodes.values():
            node.is_reused = False

    def texts(self, tokenizer: Any) -> dict[int, str]:
        """Return the texts of the nodes of a tree, by number."""
        nodes = (node for node in self._nodes.values() if node.last_access_time is not None)
        return {node.number: text_of(node.token_ids, tokenizer) for node in nodes}

    def _title(self) -> Text:
        nodes = [node for number, node in self._nodes.items() if number]
        is_table = bool(nodes) and nodes[0].last_access_time is None
        what = f"table of {some(len(nodes), 'hashed page')}" if is_table else f"tree of {some(len(nodes), 'node')}"
        num_tokens = sum(len(node.token_ids) for node in nodes)
        locked = sum(len(node.token_ids) for node in nodes if node.lock_ref)
        free = self._num_slots - self._num_held - (num_tokens - locked)
        return Text.assemble(
            (what if nodes else "empty cache", "bold"),
            f": {some(num_tokens, 'token')} cached ({locked:,} locked)",
            f", {free:,} of {some(self._num_slots, 'slot')} free" if self._num_slots else "",
            (f"; {some(self._num_gone, 'token')} gone since the last drawing" if self._num_gone else "", "yellow"),
        )


def _parts(event: Inserted) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield number, tokens and pages of the new nodes: one in a tree, one for each page in a table."""
    if event.last_access_time is not None:
        if event.pages:
            yield event.node, event.token_ids, event.pages
        return
    for index, page in enumerate(event.pages):
        size = event.num_new // len(event.pages)
        yield page, event.token_ids[index * size : (index + 1) * size], (page,)


class _Picture:
    """One drawing: hangs nodes into rich's tree, as long as there is room."""

    def __init__(self, tokenizer: Any, new_pages: set[int], room: int) -> None:
        self.tokenizer, self.new_pages, self.room = tokenizer, new_pages, room
        self.shown: list[_Shown] = []

    def draw(self, title: Text, nodes: Sequence[Node]) -> Tree:
        root = Tree(title, guide_style="dim")
        for name in dict.fromkeys(node.namespace for node in nodes if node.namespace is not None):
            salt = root.add(Text(f"cache_salt {name!r}", style="magenta"))
            self._fork(salt, [node for node in nodes if node.namespace == name], 1)
        self._fork(root, [node for node in nodes if node.namespace is None], 1)
        return root

    def _fork(self, tree: Tree, nodes: Sequence[Node], depth: int) -> None:
        """Draw each node as a branch of `tree`, with what is below it; count those beyond the limits."""
        left_out = []
        for node in nodes:
            if self.room and depth <= MOST_FORKS:
                self._hang(tree.add(""), node, depth)
            else:
                left_out.append(node)
        if left_out:
            number, num_tokens = _count(left_out)
            tree.add(Text(f"... {some(number, 'node')} more with {some(num_tokens, 'token')}", style="dim"))

    def _hang(self, tree: Tree, node: Node, depth: int) -> None:
        """Draw a node and those that follow it without a fork, below each other."""
        chain, following = [], [node]
        while len(following) == 1 and self.room:
            run = self._run(following[0])
            chain.append(_Shown.of(run, self._mark(run[0]), self.tokenizer))
            self.room -= 1
            following = run[-1].children
        self.shown += chain
        tree.label = Group(*chain)
        self._fork(tree, following, depth + 1)

    def _run(self, node: Node) -> list[Node]:
        """Return the node; in a table, with the pages that follow it without a fork, locks and mark being the same."""
        run = [node]
        while node.last_access_time is None and len(node.children) == 1:
            after = node.children[0]
            if (after.lock_ref, after.hit_count) != (node.lock_ref, node.hit_count):
                break
            if self._mark(after) != self._mark(node):
                break
            run.append(node := after)
        return run

    def _mark(self, node: Node) -> str:
        """Return `+` for a node with new pages, `*` for one from which a request has started, or a blank."""
        return "+" if not self.new_pages.isdisjoint(node.pages) else "*" if node.is_reused else " "

    def legend(self) -> Iterator[str]:
        """Yield explanations of the marks and numbers in the picture."""
        marks = {each.mark for each in self.shown}
        if "+" in marks:
            yield "+ new since the last drawing"
        if "*" in marks:
            yield "* a request has started from it since the last drawing"
        if self.shown:
            yield "in front: the number of the node, or of the first page; its text goes on in the nodes below it"
            yield "hits: requests that started from it"
        if any(each.is_of_tree for each in self.shown):
            yield "used: last use by a request, counted in look-ups of the cache"
        if any(each.is_locked for each in self.shown):
            yield "locks: requests that use it now"


def _count(nodes: Sequence[Node]) -> tuple[int, int]:
    """Return the number of nodes, with all below them, and the number of their tokens."""
    number, num_tokens, stack = 0, 0, list(nodes)
    while stack:
        node = stack.pop()
        number, num_tokens = number + 1, num_tokens + len(node.token_ids)
        stack += node.children
    return number, num_tokens


@dataclass(frozen=True)
class _Shown:
    """A node in two lines: its text, as much of both ends as there is room for, and its numbers."""

    mark: str
    number: int
    text: str
    numbers: Text
    is_of_tree: bool
    is_locked: bool

    @classmethod
    def of(cls, run: Sequence[Node], mark: str, tokenizer: Any) -> "_Shown":
        first, token_ids = run[0], [token_id for node in run for token_id in node.token_ids]
        numbers = Text(", ").join(_numbers(first, len(token_ids), np.concatenate([node.slots for node in run])))
        is_of_tree = first.last_access_time is not None
        return cls(mark, first.number, text_of(token_ids, tokenizer), numbers, is_of_tree, first.lock_ref > 0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head, style = f"{self.mark} {self.number}  ", STYLES[self.mark]
        room = max(LEAST_ROOM, options.max_width - len(head) - 2)
        line = Text.assemble((head, f"bold {style}"), (f'"{shorten(self.text, room)}"', style))
        line.truncate(options.max_width, overflow="ellipsis")  # for characters that are two columns wide
        yield line
        head = " " * len(head)
        for line in self.numbers.wrap(console, max(LEAST_ROOM, options.max_width - len(head))):
            yield Text.assemble((head, f"bold {style}"), line)


def text_of(token_ids: Sequence[int], tokenizer: Any) -> str:
    """Return tokens as text, of a long run both ends, with line breaks and the like as escapes."""

    def decoded(ids: Sequence[int]) -> str:
        return repr(tokenizer.decode(ids, skip_special_tokens=False))[1:-1]

    if len(token_ids) <= 2 * MOST_TOKENS:
        return decoded(token_ids)
    return f"{decoded(token_ids[:MOST_TOKENS])}{GAP}{decoded(token_ids[-MOST_TOKENS:])}"


def shorten(text: str, width: int) -> str:
    """Return a text of at most `width` characters: its beginning and its end, if it is longer."""
    if len(text) <= width:
        return text
    tail = max(0, (width - len(GAP)) // 2)
    return f"{text[: max(0, width - len(GAP) - tail)]}{GAP}{text[len(text) - tail :]}"[:width]


def _numbers(node: Node, num_tokens: int, slots: np.ndarray) -> Iterator[Text]:
    yield Text(some(num_tokens, "token"), style="dim")
    yield Text(f"slots {_ranges(slots)}", style="dim")
    if node.lock_ref:
        yield Text(some(node.lock_ref, "lock"), style="bold yellow")
    yield Text(some(node.hit_count, "hit"), style="dim")
    if node.last_access_time is not None:
        yield Text(f"used {node.last_access_time}", style="dim")
    if node.priority:
        yield Text(f"priority {node.priority}", style="dim")


def _ranges(slots: np.ndarray) -> str:
    """Return `16-31`, or `16-31 48-63`: the slots in the order of the tokens."""
    stretches = np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1)
    named = [f"{each[0]}-{each[-1]}" if len(each) > 1 else str(each[0]) for each in stretches[:MOST_RANGES]]
    return " ".join(named) + (f" and {len(stretches) - MOST_RANGES} more" if len(stretches) > MOST_RANGES else "")
