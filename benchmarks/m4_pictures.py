"""Two pictures of real engines: the tree growing turn by turn, and whose KV a request's is in each of its stages.

`python -m benchmarks.m4_trace` draws them. They need matplotlib, which the trace itself does not.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from benchmarks import ASSETS
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
"""Who says what, turn by turn, each in a conversation of their own."""
ANSWER = 10  # tokens
FOUND, NEW, OTHERS = "#8fd18f", "#ffb870", "0.85"


# --- the tree ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A node of the tree as it was after a turn."""

    start: int
    """How many tokens stand before it."""
    length: int
    row: int
    parent_row: int
    text: str
    slots: str
    kind: str
    """The colour: found by the request of this turn, computed by it, or of others."""


@dataclass(frozen=True)
class Turn:
    """What a turn asked, found and computed, and the tree after it."""

    title: str
    nodes: list[Node]


def chat() -> list[Turn]:
    """Run the conversation on the engine that ships."""
    said: dict[str, list[dict[str, str]]] = {name: [{"role": "system", "content": SYSTEM}] for name, _ in CHAT}
    turns = []
    with LLMEngine(cache_config=CacheConfig(page_size=PAGE_SIZE, max_total_tokens=4096)) as engine:
        for number, (name, question) in enumerate(CHAT, 1):
            said[name].append({"role": "user", "content": question})
            output = engine.chat(said[name], SamplingParams(max_tokens=ANSWER))
            said[name].append({"role": "assistant", "content": output.text})
            found = output.metrics.cached_tokens
            computed = len(output.prompt_token_ids) - found
            title = f"Turn {number}, {name}: “{question}”   found {found} tokens, computed {computed}"
            tokens = [*output.prompt_token_ids, *output.token_ids]
            turns.append(Turn(title, nodes_of(engine, tokens, found)))
    return turns


def nodes_of(engine: LLMEngine, tokens: list[int], found: int) -> list[Node]:
    """The tree laid out: a row for each branch, the oldest first."""
    core = engine.engine_core
    tokenizer, places, nodes = core.input_processor.tokenizer, {core.scheduler.tree_cache.root: (0, 0)}, []
    rows = 0
    for node in core.scheduler.tree_cache.nodes():
        start, above = places[node.parent]
        ids = decode(node.key)
        is_first = next(iter(node.parent.children.values())) is node
        row = above if is_first else rows
        rows = max(rows, row + 1)
        places[node] = (start + len(ids), row)
        kind = OTHERS if tokens[start : start + len(ids)] != ids else FOUND if start < found else NEW
        text = tokenizer.decode(ids, skip_special_tokens=False)
        first, last = int(node.value[0]), int(node.value[-1])
        slots = f"{first}-{last}" if last - first == len(ids) - 1 else f"{first} ... {last}"
        nodes.append(Node(start, len(ids), row, above, text, slots, kind))
    return nodes


def growing_tree(turns: list[Turn]) -> Figure:
    """The tree after each turn; the place of a node tells its tokens' positions, the length their number."""
    heights = [1 + max(node.row for node in turn.nodes) for turn in turns]
    figure = Figure(figsize=(10, 1.2 + 0.55 * sum(heights) + 0.35 * len(turns)), layout="constrained")
    axes = figure.subplots(len(turns), sharex=True, height_ratios=[height + 0.6 for height in heights])
    width = max(node.start + node.length for node in turns[-1].nodes)
    for axis, turn, height in zip(axes, turns, heights, strict=True):
        for node in turn.nodes:
            axis.add_patch(Rectangle((node.start, node.row), node.length, 0.8, color=node.kind, ec="white", lw=1.5))
            said = shortened(node.text.replace("\n", "⏎"), int(node.length * 172 / width) - 1)
            axis.text(node.start + 0.4, node.row + 0.27, said, fontsize=6.5, family="monospace", va="center")
            numbers = f"{node.length} tokens, slots {node.slots}"
            if node.length * 172 / width > len(numbers):
                axis.text(node.start + 0.4, node.row + 0.59, numbers, fontsize=6, color="0.25", va="center")
            if node.row != node.parent_row:
                axis.plot([node.start] * 2, [node.parent_row + 0.8, node.row + 0.8], color="0.3", lw=1)
        axis.set(xlim=(-0.5, width + 0.5), ylim=(height, -0.15), yticks=[])
        axis.set_title(turn.title, fontsize=9, loc="left")
        bare(axis)
        axis.spines["bottom"].set_visible(axis is axes[-1])
    axes[-1].set_xlabel("position of the tokens", fontsize=9)
    kinds = {"found in the tree": FOUND, "computed in this turn, prompt or answer": NEW, "of others": OTHERS}
    legend(figure, kinds)
    return figure


def shortened(text: str, room: int) -> str:
    """At most `room` characters: beginning and end."""
    if len(text) <= room:
        return text
    return text[: room - room // 2 - 1] + "…" + text[len(text) - room // 2 :] if room > 4 else ""


# --- whose KV it is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """The four lengths of a request's KV at one moment."""

    name: str
    shared: int
    """Tokens that it found: the cache's, and others' too."""
    protected: int
    """Tokens that are the cache's and locked, the shared ones included."""
    committed: int
    allocated: int
    ended: bool = False


PREFIX, OWN, OUTPUTS, INTERVAL_PAGE = 48, 37, 14, 16


def stages() -> list[Stage]:
    """A request that finds what another one has left, from admission to its end, on a real engine."""
    common, own = list(range(300, 300 + PREFIX)), list(range(400, 400 + OWN))
    found: list[Stage] = []
    with LLMEngine(cache_config=CacheConfig(page_size=INTERVAL_PAGE, max_total_tokens=1024)) as engine:
        engine.generate([*common, 999], SamplingParams(max_tokens=1, ignore_eos=True))
        scheduler = engine.engine_core.scheduler
        rid = engine.add_request([*common, *own], SamplingParams(max_tokens=OUTPUTS + 1, ignore_eos=True))
        req = scheduler.requests[rid]

        def note(name: str) -> None:
            found.append(stage_of(req, name))

        execute = engine.engine_core.executor.execute_model

        def watched(batch: Any) -> Any:
            if not found:
                note("its prompt is in flight")
            elif len(req.output_ids) == OUTPUTS:
                note("its last decode is in flight")
            return execute(batch)

        engine.engine_core.executor.execute_model = watched
        while engine.has_unfinished_requests():
            engine.step()
            if len(req.output_ids) == 1:
                note("its prompt has run")
            elif len(req.output_ids) == OUTPUTS // 2:
                note(f"{OUTPUTS // 2} tokens said")
        cached = scheduler.tree_cache.match_prefix(req.key).device_indices
        found.append(Stage("it has ended", len(cached), len(cached), len(cached), len(cached), ended=True))
    return found


def stage_of(req: Req, name: str) -> Stage:
    """What the request says of itself."""
    shared = req.cached_tokens if req.cached_tokens else len(req.prefix_indices)
    return Stage(name, shared, req.cache_protected_len, req.kv_committed_len, req.kv_allocated_len)


def intervals(found: list[Stage]) -> Figure:
    """Each stage a bar over the request's tokens: whose the slots are."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axis = figure.subplots()
    colors = {
        "found: the tree's, locked": "C2",
        "computed, in the tree: locked": "C0",
        "its own, whole pages": "C1",
        "its own, tail of a page": "#ffd39b",
        "in flight: slots, no KV yet": "0.75",
        "evictable": "#c7e3c7",
    }
    for row, stage in enumerate(found):
        whole = max(stage.protected, stage.committed // INTERVAL_PAGE * INTERVAL_PAGE)
        ends = [stage.shared, stage.protected, whole, stage.committed, stage.allocated]
        names = list(colors)[:5] if not stage.ended else ["evictable"]
        start = 0
        for name, end in zip(names, ends, strict=False):
            if end > start:
                axis.barh(row, end - start, left=start, height=0.62, color=colors[name])
                ink = "white" if colors[name] in ("C2", "C0", "C1") else "black"
                axis.text((start + end) / 2, row, str(end - start), fontsize=8, ha="center", va="center", color=ink)
                start = end
    longest = max(stage.allocated for stage in found)
    for page in range(0, longest + INTERVAL_PAGE, INTERVAL_PAGE):
        axis.axvline(page, color="0.55", lw=0.6, ls=":", zorder=0)
    axis.set_yticks(range(len(found)), [stage.name for stage in found], fontsize=9)
    axis.set_xticks(range(0, longest + INTERVAL_PAGE, INTERVAL_PAGE))
    axis.set_xlabel(f"tokens of the request; dotted: pages of {INTERVAL_PAGE}", fontsize=9)
    axis.invert_yaxis()
    bare(axis)
    legend(figure, colors, columns=3)
    return figure


# --- both -------------------------------------------------------------------------------------------------------------


def bare(axis: Axes) -> None:
    """Without a frame."""
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(length=0, labelsize=8)


def legend(figure: Figure, colors: dict[str, str], columns: int | None = None) -> None:
    """Above everything."""
    handles = [Patch(color=color, label=label) for label, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=columns or len(handles), frameon=False, fontsize=8)


def draw_pictures(folder: Path = ASSETS) -> None:
    """Draw the pictures into the docs' assets."""
    growing_tree(chat()).savefig(folder / "m4_tree.png", dpi=110)
    intervals(stages()).savefig(folder / "m4_intervals.png", dpi=110)
