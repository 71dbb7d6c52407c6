"""Two pictures of the request *ann* of `benchmarks.m5_trace`: how her guesses are read, and where their KV lies.

`python -m benchmarks.m5_trace` draws them. They need matplotlib, which the trace itself does not.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks import ASSETS
from benchmarks.m4_pictures import bare, legend, shortened
from benchmarks.m5_trace import MEMORY, steps
from m1_single_request.tracer import TraceReader, TraceRecord
from m5_chunked_prefill_spec.events import Verified

WHO, SHOWN_STEPS = "ann", (3, 4, 5, 6)
FIRST_SHOWN = 20  # the place of the first token that the picture of slots shows
RIGHT, WRONG, OWN, BONUS = "#a6dba0", "#f4a6a0", "#fdb863", "#92c5de"
KINDS = {
    "the tree's: KV": "#c7e3c7",
    "its own: KV": "#ffd39b",
    "newest token: slot, KV now": "#92c5de",
    "guess: slot, KV now": "#d9c3e8",
    "slot without a token": "0.9",
}


@dataclass
class Moment:
    """What *ann*'s row looks like."""

    title: str
    slots: list[int]
    """All that she has."""
    texts: list[str]
    """Of her tokens, guesses included."""
    protected: int
    committed: int
    sure: int
    """Tokens of prompt and answer; what follows are guesses."""


@dataclass
class Watched(TraceReader):
    """Her verifications, by step, and moments of her row."""

    verified: dict[int, Verified] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)

    def read(self, record: TraceRecord) -> None:
        """Keep what the pictures show."""
        event = record.event
        if isinstance(event, Verified) and event.rid == WHO:
            self.verified[record.step] = event

    def close(self) -> None:
        """Nothing to do."""


def watch() -> Watched:
    """Run the requests of the page."""
    watched = Watched()
    run = steps(watched)
    engine = next(run)
    core: Any = engine.engine_core
    req, execute = core.scheduler.requests[WHO], core.executor.execute_model
    text_of = req.sequence.detokenizer.token_text

    def note(title: str, guesses: list[int]) -> None:
        tokens = [*req.origin_input_ids, *req.output_ids]
        slots = core.scheduler.pools.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len).tolist()
        texts = [text_of(token_id) for token_id in [*tokens, *guesses]]
        found = Moment(title, slots, texts, req.cache_protected_len, req.kv_committed_len, len(tokens))
        watched.moments.append(found)

    def watched_step(batch: Any) -> Any:
        guesses = batch.spec_info.draft_token_ids[batch.rids.index(WHO)] if batch.spec_info else []
        if guesses == list(batch.input_ids[-len(guesses) :]) and step in (5, 6):
            note(f"step {step}, in flight", guesses)
        return execute(batch)

    core.executor.execute_model = watched_step
    step = 2
    for _ in run:
        step += 1
        if step - 1 in (4, 5):
            note(f"after step {step - 1}", [])
    return watched


def accepted(watched: Watched) -> Figure:
    """Each verification: the newest token and the guesses, and below what the model says behind each."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots(2, 2)
    for axis, step in zip(axes.flat, SHOWN_STEPS, strict=True):
        event = watched.verified[step]
        cells = ["newest", *event.texts]
        for place, text in enumerate(cells):
            colour = "0.88" if not place else RIGHT if place <= event.accepted else WRONG
            _box(axis, place, 0, "its newest\ntoken" if not place else _quoted(text), colour)
            said = event.texts[place] if place < event.accepted else event.own if place == event.accepted else None
            if said is None:
                _box(axis, place, 1, "not looked at", "white")
                continue
            own = OWN if event.rejected_at is not None else BONUS
            _box(axis, place, 1, _quoted(said), RIGHT if place < event.accepted else own)
        brought = len(event.tokens)
        axis.set_title(f"step {step}: {brought} token{'s' * (brought > 1)}", fontsize=10, loc="left")
        axis.set(xlim=(-0.1, 3), ylim=(1.95, -0.1), xticks=[])
        axis.set_yticks([0.4, 1.4], ["goes through\nthe model", "the model\nsays next"], fontsize=8)
        bare(axis)
        axis.spines["bottom"].set_visible(False)
    legend(
        figure,
        {
            "guessed and right": RIGHT,
            "guessed and wrong": WRONG,
            "in the place of a wrong guess": OWN,
            "on top": BONUS,
        },
    )
    return figure


def slots(watched: Watched) -> Figure:
    """Her row at four moments around a step in which both guesses were wrong."""
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    axis = figure.subplots()
    names = list(KINDS)
    longest = max(len(moment.slots) for moment in watched.moments)
    for row, moment in enumerate(watched.moments):
        for place in range(FIRST_SHOWN, len(moment.slots)):
            if place < moment.protected:
                kind = names[0]
            elif place < moment.committed:
                kind = names[1]
            else:
                kind = names[2] if place < moment.sure else names[3]
            text = moment.texts[place] if place < len(moment.texts) else ""
            axis.add_patch(Rectangle((place, row), 0.94, 0.8, facecolor=KINDS[kind]))
            said = text.replace("\n", "⏎").strip() or repr(text)[1:-1]
            axis.text(
                place + 0.47, row + 0.3, shortened(said, 7), fontsize=6.5, ha="center", va="center", family="monospace"
            )
            axis.text(place + 0.47, row + 0.6, f"slot {moment.slots[place]}", fontsize=6, ha="center", color="0.3")
        end = -(-len(moment.slots) // MEMORY.page_size) * MEMORY.page_size
        for place in range(len(moment.slots), end):  # the rest of her last page
            axis.add_patch(Rectangle((place, row), 0.94, 0.8, facecolor=KINDS[names[4]]))
    for page in range(FIRST_SHOWN, longest + MEMORY.page_size + 1, MEMORY.page_size):
        axis.axvline(page - 0.03, color="0.5", lw=0.8, ls=":")
    axis.set_yticks([row + 0.4 for row in range(len(watched.moments))], [m.title for m in watched.moments], fontsize=9)
    last = -(-longest // MEMORY.page_size) * MEMORY.page_size
    axis.set(xlim=(FIRST_SHOWN - 0.1, last), ylim=(len(watched.moments), -0.1))
    axis.set_xticks([place + 0.47 for place in range(FIRST_SHOWN, last)], map(str, range(FIRST_SHOWN, last)))
    axis.set_xlabel(f"place of the token in prompt and answer; dotted: pages of {MEMORY.page_size}", fontsize=9)
    bare(axis)
    legend(figure, KINDS)
    return figure


def _box(axis: Axes, place: int, row: int, text: str, colour: str) -> None:
    edge = "0.8" if colour == "white" else "white"
    axis.add_patch(Rectangle((place, row), 0.94, 0.8, facecolor=colour, edgecolor=edge))
    ink = "0.5" if colour == "white" else "black"
    axis.text(place + 0.47, row + 0.4, text, fontsize=8, ha="center", va="center", family="monospace", color=ink)


def _quoted(text: str) -> str:
    return repr(text).replace("$", r"\$")


def draw_pictures(folder: Path = ASSETS) -> None:
    """Draw the pictures into the docs' assets."""
    watched = watch()
    accepted(watched).savefig(folder / "m5_accepted.png", dpi=110)
    slots(watched).savefig(folder / "m5_slots.png", dpi=110)
