"""Two pictures of real engines: the tree turn by turn, and the owners of a request's KV in each of its stages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.plots import bare, box, legend, panels, save, shortened
from m4_radix_cache import CacheConfig, LLMEngine, SamplingParams
from m4_radix_cache.mem_cache.radix_key import decode
from m4_radix_cache.request import Req

PAGE_SIZE = 4
SYSTEM = "You answer questions about LLM inference."
CHAT = (
    ("Ann", "What is a page?"),
    ("Bob", "What is prefill?"),
    ("Ann", "And a block?"),
    ("Bob", "What is a token?"),
)
"""Turns of two conversations: user and question."""
FOUND, NEW, OTHERS = "#8fd6c2", "#ffb870", "0.85"


# --- the tree ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A node of the tree as it was after a turn."""

    start: int
    """Number of tokens before it."""
    length: int
    row: int
    parent_row: int
    text: str
    slots: str
    color: str


def chat() -> dict[str, list[Node]]:
    """Run the conversations on the engine that ships; return the tree after each turn, by the turn's title."""
    messages: dict[str, list[dict[str, str]]] = {name: [{"role": "system", "content": SYSTEM}] for name, _ in CHAT}
    turns = {}
    with LLMEngine(cache_config=CacheConfig(page_size=PAGE_SIZE, max_total_tokens=4096)) as engine:
        for number, (name, question) in enumerate(CHAT, 1):
            messages[name].append({"role": "user", "content": question})
            output = engine.chat(messages[name], SamplingParams(max_tokens=10))
            messages[name].append({"role": "assistant", "content": output.text})
            found = output.metrics.cached_tokens
            computed = len(output.prompt_token_ids) - found
            title = f"Turn {number}, {name}: “{question}”   found {found} tokens, computed {computed}"
            turns[title] = nodes_of(engine, [*output.prompt_token_ids, *output.token_ids], found)
    return turns


def nodes_of(engine: LLMEngine, tokens: list[int], found: int) -> list[Node]:
    """Lay out the tree: a row for each branch, the oldest first."""
    core = engine.engine_core
    tokenizer, places, nodes = core.input_processor.tokenizer, {core.scheduler.tree_cache.root: (0, 0)}, []
    rows = 0
    for node in core.scheduler.tree_cache.nodes():
        start, above = places[node.parent]
        ids = decode(node.key)
        row = above if next(iter(node.parent.children.values())) is node else rows
        rows = max(rows, row + 1)
        places[node] = (start + len(ids), row)
        color = OTHERS if tokens[start : start + len(ids)] != ids else FOUND if start < found else NEW
        text = tokenizer.decode(ids, skip_special_tokens=False).replace("\n", "⏎")
        first, last = int(node.value[0]), int(node.value[-1])
        slots = f"{first}-{last}" if last - first == len(ids) - 1 else f"{first} ... {last}"
        nodes.append(Node(start, len(ids), row, above, text, slots, color))
    return nodes


def growing_tree(turns: dict[str, list[Node]]) -> Figure:
    """Draw the tree after each turn; a node stands at the positions of its tokens."""
    heights = [1 + max(node.row for node in nodes) for nodes in turns.values()]
    size = (10, 1.2 + 0.55 * sum(heights) + 0.35 * len(turns))
    figure, axes = panels(*size, len(turns), 1, sharex=True, height_ratios=[height + 0.6 for height in heights])
    width = max(node.start + node.length for nodes in turns.values() for node in nodes)
    for axis, (title, nodes), height in zip(axes, turns.items(), heights, strict=True):
        for node in nodes:
            room = int(node.length * 172 / width)
            numbers = f"{node.length} tokens, slots {node.slots}"
            text = shortened(node.text, room - 1) + "\n" + (numbers if room > len(numbers) else "")
            box(axis, node.start, node.row, (node.length, 0.8), text, node.color, fontsize=6, family="monospace")
            if node.row != node.parent_row:
                axis.plot([node.start] * 2, [node.parent_row + 0.8, node.row + 0.8], color="0.3", lw=1)
        axis.set(xlim=(-0.5, width + 0.5), ylim=(height, -0.15), yticks=[])
        axis.set_title(title, fontsize=9, loc="left")
        bare(axis, "top", "right", "left", *([] if axis is axes[-1] else ["bottom"]))
        axis.tick_params(length=0, labelsize=8)
    axes[-1].set_xlabel("position of the tokens", fontsize=9)
    kinds = {"found in the tree": FOUND, "computed in this turn, prompt or answer": NEW, "of others": OTHERS}
    legend(figure, kinds)
    return figure


# --- whose KV it is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """The lengths of a request's KV at one moment."""

    name: str
    shared: int
    """Tokens that it found: the cache's, and others' too."""
    protected: int
    """Tokens that are the cache's and locked, the shared ones included."""
    committed: int
    allocated: int


PREFIX, OWN, OUTPUTS, INTERVAL_PAGE = 48, 37, 14, 16
ENDED = "it has ended"


def stages() -> list[Stage]:
    """Run a request that finds what another one has left, from admission to its end, on a real engine."""
    common, own = list(range(300, 300 + PREFIX)), list(range(400, 400 + OWN))
    found: list[Stage] = []
    with LLMEngine(cache_config=CacheConfig(page_size=INTERVAL_PAGE, max_total_tokens=1024)) as engine:
        engine.generate([*common, 999], SamplingParams(max_tokens=1, ignore_eos=True))
        core = engine.engine_core
        rid = engine.add_request([*common, *own], SamplingParams(max_tokens=OUTPUTS + 1, ignore_eos=True))
        req, execute = core.scheduler.requests[rid], core.executor.execute_model

        def in_flight(batch: Any) -> Any:
            if not found:
                found.append(stage_of(req, "its prompt is in flight"))
            elif len(req.output_ids) == OUTPUTS:
                found.append(stage_of(req, "its last decode is in flight"))
            return execute(batch)

        core.executor.execute_model = in_flight
        names = {1: "its prompt has run", OUTPUTS // 2: f"{OUTPUTS // 2} tokens of its answer"}
        while engine.has_unfinished_requests():
            engine.step()
            if len(req.output_ids) in names:
                found.append(stage_of(req, names[len(req.output_ids)]))
        cached = len(core.scheduler.tree_cache.match_prefix(req.key).device_indices)
        return [*found, Stage(ENDED, cached, cached, cached, cached)]


def stage_of(req: Req, name: str) -> Stage:
    """Return the present lengths of a request."""
    shared = req.cached_tokens if req.cached_tokens else len(req.prefix_indices)
    return Stage(name, shared, req.cache_protected_len, req.kv_committed_len, req.kv_allocated_len)


def intervals(found: list[Stage]) -> Figure:
    """Draw each stage as a bar over the request's tokens, colored by the owner of their slots."""
    figure, axis = panels(9, 3.4)
    colors = {
        "found: the tree's, locked": "C2",
        "computed, in the tree: locked": "C0",
        "its own, whole pages": "C1",
        "its own, tail of a page": "#ffd39b",
        "in flight: slots, no KV yet": "0.75",
        "evictable": "#bfe3d8",
    }
    for row, stage in enumerate(found):
        whole = max(stage.protected, stage.committed // INTERVAL_PAGE * INTERVAL_PAGE)
        ends = [stage.shared, stage.protected, whole, stage.committed, stage.allocated]
        names = list(colors)[:5] if stage.name != ENDED else ["evictable"]
        start = 0
        for name, end in zip(names, ends, strict=False):
            if end > start:
                box(axis, start, row - 0.31, (end - start, 0.62), str(end - start), colors[name])
                start = end
    longest = max(stage.allocated for stage in found)
    pages = range(0, longest + INTERVAL_PAGE, INTERVAL_PAGE)
    for page in pages:
        axis.axvline(page, color="0.55", lw=0.6, ls=":", zorder=0)
    axis.set_yticks(range(len(found)), [stage.name for stage in found], fontsize=9)
    axis.set_xticks(pages)
    axis.set_xlabel(f"tokens of the request; dotted: pages of {INTERVAL_PAGE}", fontsize=9)
    axis.set(xlim=(0, pages[-1]), ylim=(len(found) - 0.5, -0.5))
    bare(axis, "top", "right", "left")
    legend(figure, colors, columns=3)
    return figure


def draw_pictures(folder: Path) -> None:
    """Draw the pictures into a folder."""
    save(growing_tree(chat()), folder / "m4_tree.svg")
    save(intervals(stages()), folder / "m4_intervals.svg")
