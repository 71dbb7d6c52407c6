"""The prefix cache drawn as a tree of texts, with the slots, locks and last use of each, from the trace alone.

    view = RadixTreeView()                # a reader of the trace: TraceConfig(readers=(view,))
    console.print(view.draw(tokenizer))   # the cached tokens now, with marks for the changes since the last drawing

    tree of 3 nodes: 512 tokens cached (0 locked), 7,680 of 8,192 slots free
    `-- * 1  "<|im_start|>system\\nYou answer ques ... |>user\\nWhat is"
             480 tokens, slots 16-495, 2 hits, used 9
        |-- + 2  " the code of lamp?<|im_end|>\\n<|i ... istant\\n"
        `-- + 3  " prefix caching?<|im_end|>\\n<|im_ ... istant\\n"

Nodes that follow each other without a fork are below each other; only a fork is indented. A table of hashes is drawn as
chains of pages. With tiers, the numbers of a node name its tier, and the title counts the tokens in host memory. New in
m4: m3's block map showed blocks, not tokens. SGLang: `pretty_print` of its `RadixCache`; vLLM reports counts only.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from m1_single_request.events import EngineStarted, StepDone, some
from m1_single_request.tracer import TraceReader, TraceRecord
from m3_paged_attention.events import KVSized
from m4_radix_cache.events import Admit
from m4_radix_cache.mem_cache.disk_events import Prefetched
from m4_radix_cache.mem_cache.events import CacheFlushed, Evicted, Inserted, Locked, Split
from m4_radix_cache.mem_cache.host_events import (
    Acknowledged,
    Demoted,
    HostEvicted,
    HostFlushed,
    LoadBack,
    Reattached,
    WriteStarted,
)

MOST_FORKS = 8  # deeper nodes are counted, not drawn: every fork indents the nodes below it
MOST_RANGES = 3  # of slots that are listed
MOST_TEXT = 60  # characters of a node's text
STYLES = {"+": "green", "*": "cyan", " ": ""}
TIERS = {
    "device": "",
    "writing": ", being copied to host memory",
    "both": ", also in host memory",
    "loading": ", being copied from host memory",
    "host": ", in host memory only",
}
"""What a drawing adds to a node, by the state of a `TieredNode`."""
KEY = (
    "(+ new since the last drawing; * a request has started from it since then; in front: the number of the node, or "
    "of the first page; its text goes on in the nodes below it; hits: requests that started from it; used: last use by "
    "a request, counted in look-ups of the cache; locks: requests that use it now)"
)
"""Meaning of the marks and numbers."""


@dataclass(eq=False)
class Node:
    """A node of the tree, or a page of the table."""

    number: int
    parent: Any = None
    """The node above it; None for the root."""
    token_ids: Sequence[int] = ()
    pages: Sequence[int] = ()
    """Its pages on the device; empty if it is in host memory only."""
    namespace: str | None = None
    """Its `cache_salt`."""
    last_access_time: int | None = None
    """Last use by a request, in counted lookups; None in a table."""
    lock_ref: int = 0
    hit_count: int = 0
    is_on_host: bool = False
    """Whether host memory has its pages, or gets them."""
    copying: str = ""
    """`writing` or `loading`: a copy is not acknowledged."""
    mark: str = " "
    """`+`: new since the last drawing; `*`: a request has started from it since then."""
    children: list["Node"] = field(default_factory=list)

    @property
    def tier(self) -> str:
        """Where its KV is: one of `TIERS`."""
        if not self.pages:
            return "host"
        return self.copying or ("both" if self.is_on_host else "device")

    @property
    def slots(self) -> np.ndarray:
        """Its slots on the device, `[num_tokens]`, int64."""
        page_size = len(self.token_ids) // max(1, len(self.pages))
        return (np.array(self.pages)[:, None] * page_size + np.arange(page_size)).ravel()

    def path(self) -> Iterator["Node"]:
        """Yield this node and all above it, the root excluded."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixTreeView(TraceReader):
    """Keeps the cache as a tree of nodes. Attach it before the first request; it needs the whole trace.

    A trace may have several engines, one after the other: the tree is that of the last one.
    """

    most_nodes = 40
    """Maximum number of nodes that are drawn; the others are counted."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin with the empty cache of an engine."""
        self.nodes = {0: Node(0)}
        """The root, and every cached node or page by its number."""
        self._num_gone = 0  # tokens evicted since the last drawing, of those that it showed
        self._num_slots = self._num_held = 0  # all; held by requests, at the end of the last step

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, record: TraceRecord) -> None:
        """Apply an event to the tree."""
        match record.event:
            case EngineStarted():
                self.begin()
            case Inserted() as event:
                self._insert(event)
            case Split() as event:
                self._split(event)
            case Evicted() | HostEvicted() as event:
                self._remove(event.nodes)
            case CacheFlushed():
                self._remove([number for number in self.nodes if number])
            case WriteStarted() | Acknowledged() | Demoted() | HostFlushed() | LoadBack() | Reattached() as event:
                self._move(event)
            case Prefetched() as event:
                self._prefetch(event)
            case Locked() as event:
                for node in self._touched(event):
                    node.lock_ref += event.delta
            case Admit() as event:
                for node in self.nodes[event.node].path():
                    node.hit_count += 1
                    node.mark = "+" if node.mark == "+" else "*"
            case KVSized() as event:
                self._num_slots = event.num_blocks * event.block_size
            case StepDone() as event:
                self._num_held = event.kv_tokens

    def _insert(self, event: Inserted) -> None:
        """Add one node in a tree, or one for each page in a table."""
        is_table, parent = event.last_access_time is None, self.nodes[event.parent]
        pages = [[page] for page in event.pages] if is_table else [event.pages] * bool(event.pages)
        size = event.num_new // max(1, len(pages))
        for index, own in enumerate(pages):
            number, token_ids = own[0] if is_table else event.node, event.token_ids[index * size : (index + 1) * size]
            self.nodes[number] = node = Node(number, parent, token_ids, own, event.extra_key, mark="+")
            parent.children.append(node)
            parent = node
        self._touched(event)

    def _split(self, event: Split) -> None:
        node = self.nodes[event.node]
        pages = len(node.pages) * event.head // len(node.token_ids)
        upper = replace(
            node, number=event.upper, token_ids=node.token_ids[: event.head], pages=node.pages[:pages], children=[node]
        )
        siblings = node.parent.children
        siblings[siblings.index(node)] = self.nodes[upper.number] = upper
        node.parent, node.token_ids, node.pages = upper, node.token_ids[event.head :], node.pages[pages:]
        self._touched(event)

    def _remove(self, numbers: Iterable[int]) -> None:
        """Remove nodes; one that is evicted from host memory, too, by the same need, was removed by that event."""
        for number in numbers:
            if (node := self.nodes.pop(number, None)) is not None:
                node.parent.children.remove(node)
                self._num_gone += len(node.token_ids) * (node.mark != "+")

    def _prefetch(self, event: Prefetched) -> None:
        """Add the node of tokens that come from the disk."""
        if event.node is not None:
            parent, salt = self.nodes[event.parent or 0], event.extra_key
            node = Node(event.node, parent, event.token_ids, is_on_host=True, namespace=salt, mark="+")
            node.last_access_time = event.last_access_time
            self.nodes[node.number] = node
            parent.children.append(node)

    def _move(self, event: Any) -> None:
        """Apply an event of the host tier to its nodes."""
        end = 0
        for node in [self.nodes[number] for number in event.nodes]:
            match event:
                case WriteStarted():
                    node.is_on_host, node.copying = True, "writing"
                case Acknowledged():
                    node.is_on_host, node.copying = event.error is None, ""
                case Demoted():
                    node.pages = ()
                case HostFlushed():
                    node.is_on_host = False
                case LoadBack() | Reattached():
                    start, end = end, end + len(event.pages) * len(node.token_ids) // event.num_tokens
                    node.pages, node.copying = event.pages[start:end], "loading" * isinstance(event, LoadBack)

    def _touched(self, event: Inserted | Split | Locked) -> list[Node]:
        """Set the access times up to the node of the event; a table has none. Return these nodes."""
        path = list(self.nodes[event.node].path())
        for node in path:
            if event.last_access_time is not None:
                node.last_access_time = max(node.last_access_time or 0, event.last_access_time)
        return path

    # --- drawing ------------------------------------------------------------------------------------------------------

    def draw(self, tokenizer: Any) -> Tree:
        """Draw the cache, with marks for the changes since the last drawing."""
        root, shown, top = Tree(self._title(), guide_style="dim"), list[list[Node]](), self.nodes[0].children
        for salt in sorted({node.namespace for node in top}, key=lambda salt: (salt is None, salt)):
            branches = [root if salt is None else root.add(Text(f"cache_salt {salt!r}", style="magenta"))]
            for depth, runs in _chains([node for node in top if node.namespace == salt]):
                if runs := runs[: self.most_nodes - len(shown)]:
                    branches[depth:] = [branches[depth - 1].add(Group(*(_row(run, tokenizer) for run in runs)))]
                    shown += runs
        drawn = [node for run in shown for node in run]
        if left := len(self.nodes) - 1 - len(drawn):
            num_tokens = _num_tokens(self.nodes.values()) - _num_tokens(drawn)
            root.add(Text(f"... {some(left, 'node')} more with {some(num_tokens, 'token')}", style="dim"))
        self._num_gone = 0
        for node in self.nodes.values():
            node.mark = " "
        return root

    def _title(self) -> Text:
        nodes = [node for number, node in self.nodes.items() if number]
        is_table = bool(nodes) and nodes[0].last_access_time is None
        kind = f"table of {some(len(nodes), 'hashed page')}" if is_table else f"tree of {some(len(nodes), 'node')}"
        on_device = [node for node in nodes if node.pages]
        cached, locked = _num_tokens(on_device), _num_tokens(node for node in on_device if node.lock_ref)
        on_host = _num_tokens(node for node in nodes if node.is_on_host)
        free = self._num_slots - self._num_held - (cached - locked)
        return Text.assemble(
            (kind if nodes else "empty cache", "bold"),
            f": {some(cached, 'token')} cached ({locked:,} locked)",
            f", {free:,} of {some(self._num_slots, 'slot')} free" if self._num_slots else "",
            f", {some(on_host, 'token')} in host memory" if on_host else "",
            (f"; {some(self._num_gone, 'token')} gone since the last drawing" if self._num_gone else "", "yellow"),
        )


def _num_tokens(nodes: Iterable[Node]) -> int:
    return sum(len(node.token_ids) for node in nodes)


def _chains(nodes: Sequence[Node], depth: int = 1) -> Iterator[tuple[int, list[list[Node]]]]:
    """Yield each chain of nodes without a fork, with the depth of its branch; a chain is a list of runs, one row each.

    In a tree a run is a node, in a table the pages with the same locks, hits and mark.
    """
    for node in nodes if depth <= MOST_FORKS else ():
        chain = [node]
        while len(chain[-1].children) == 1:
            chain += chain[-1].children
        yield depth, [list(run) for _, run in groupby(chain, key=_look)]
        yield from _chains(chain[-1].children, depth + 1)


def _look(node: Node) -> tuple[Any, ...]:
    return (node.last_access_time is not None and node.number, node.mark, node.lock_ref, node.hit_count)


def _row(run: Sequence[Node], tokenizer: Any) -> Table:
    """Return a run of nodes in two lines: its text, as both ends of a long one, and its numbers."""
    first, slots = run[0], np.concatenate([node.slots for node in run])
    token_ids = [token_id for node in run for token_id in node.token_ids]
    text = repr(tokenizer.decode(token_ids, skip_special_tokens=False))[1:-1]  # line breaks as escapes
    if len(text) > MOST_TEXT:
        text = f"{text[: MOST_TEXT // 2]} ... {text[-MOST_TEXT // 2 :]}"
    numbers = Text(some(len(token_ids), "token"), "dim")
    numbers.append(f", slots {_ranges(slots)}" if len(slots) else "").append(TIERS[first.tier])
    numbers.append(f", {some(first.lock_ref, 'lock')}" if first.lock_ref else "", "bold yellow")
    numbers.append(f", {some(first.hit_count, 'hit')}")
    numbers.append("" if first.last_access_time is None else f", used {first.last_access_time}")
    row, style = Table.grid(padding=(0, 2, 0, 0)), STYLES[first.mark]
    row.add_row(Text(f"{first.mark} {first.number}", f"bold {style}"), Text(f'"{text}"', style, no_wrap=True))
    row.add_row("", numbers)
    return row


def _ranges(slots: np.ndarray) -> str:
    """Return `16-31`, or `16-31 48-63`: the slots in the order of the tokens."""
    stretches = np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1)
    named = [f"{each[0]}-{each[-1]}" if len(each) > 1 else str(each[0]) for each in stretches[:MOST_RANGES]]
    return " ".join(named) + (f" and {len(stretches) - MOST_RANGES} more" if len(stretches) > MOST_RANGES else "")
