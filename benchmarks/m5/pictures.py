"""Two pictures of the request *ann* of the traced example: how her guesses are verified, and the slots of her row."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.m5.trace import MEMORY, steps
from benchmarks.plots import bare, box, legend, panels, save, shortened
from m1_single_request.trace_readers import Records
from m5_chunked_prefill_spec.events import Verified

REQUEST, SHOWN_STEPS = "ann", (3, 4, 5, 6)
FIRST_SHOWN = 20  # the place of the first token that the picture of slots shows
RIGHT, WRONG, OWN, BONUS = "#8fd6c2", "#e98f7a", "#fdb863", "#6aaede"
KINDS = {
    "the tree's: KV": "#bfe3d8",
    "its own: KV": "#ffd39b",
    "newest token: slot, KV now": "#92c5de",
    "guess: slot, KV now": "#d9c3e8",
    "slot without a token": "0.9",
}


@dataclass
class Moment:
    """The row of *ann* at one moment."""

    title: str
    slots: list[int]
    texts: list[str]
    """Of her tokens, guesses included."""
    protected: int
    committed: int
    sure: int
    """Tokens of prompt and answer; guesses follow."""


def watch() -> tuple[dict[int, Verified], list[Moment]]:
    """Run the requests of the page; return her verifications by step, and moments of her row."""
    records, moments = Records(), list[Moment]()
    run = steps(records)
    core: Any = next(run).engine_core
    req, execute = core.scheduler.requests[REQUEST], core.executor.execute_model

    def note(title: str, guesses: list[int]) -> None:
        tokens = [*req.origin_input_ids, *req.output_ids]
        slots = core.scheduler.pools.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len).tolist()
        texts = [req.sequence.detokenizer.token_text(token_id) for token_id in [*tokens, *guesses]]
        moments.append(Moment(title, slots, texts, req.cache_protected_len, req.kv_committed_len, len(tokens)))

    def in_flight(batch: Any) -> Any:
        guesses = batch.spec_info.draft_token_ids[batch.rids.index(REQUEST)] if batch.spec_info else []
        if guesses == list(batch.input_ids[-len(guesses) :]) and step in (5, 6):
            note(f"step {step}, in flight", guesses)
        return execute(batch)

    core.executor.execute_model = in_flight
    step = 2
    for _ in run:
        step += 1
        if step - 1 in (4, 5):
            note(f"after step {step - 1}", [])
    return {step: event for step, event in records.of(Verified) if event.rid == REQUEST}, moments


def accepted(verified: dict[int, Verified]) -> Figure:
    """Draw each verification: the newest token and the guesses, and below the model's token behind each."""
    figure, axes = panels(10, 4.6, 2, 2)
    for axis, step in zip(axes.flat, SHOWN_STEPS, strict=True):
        event = verified[step]
        for place, text in enumerate(["its newest\ntoken", *map(quoted, event.texts)]):
            color = "0.88" if not place else RIGHT if place <= event.accepted else WRONG
            box(axis, place, 0, (0.94, 0.8), text, color, family="monospace")
            if place < event.accepted:
                box(axis, place, 1, (0.94, 0.8), quoted(event.texts[place]), RIGHT, family="monospace")
            elif place == event.accepted:
                color = BONUS if event.rejected_at is None else OWN
                box(axis, place, 1, (0.94, 0.8), quoted(event.own), color, family="monospace")
            else:
                box(axis, place, 1, (0.94, 0.8), "not looked at", "white", edgecolor="0.8", color="0.5")
        brought = len(event.tokens)
        axis.set_title(f"step {step}: {brought} token{'s' * (brought > 1)}", fontsize=10, loc="left")
        axis.set(xlim=(-0.1, 3), ylim=(1.95, -0.1), xticks=[])
        axis.set_yticks([0.4, 1.4], ["goes through\nthe model", "the model's\nnext token"], fontsize=8)
        bare(axis, "top", "right", "left", "bottom")
        axis.tick_params(length=0)
    kinds = {"guessed and right": RIGHT, "guessed and wrong": WRONG, "in the place of a wrong guess": OWN}
    legend(figure, kinds | {"on top": BONUS})
    return figure


def quoted(text: str) -> str:
    """Return a token's text in quotes, for matplotlib."""
    return repr(text).replace("$", r"\$")


def slots(moments: list[Moment]) -> Figure:
    """Draw her row at four moments around a step in which both guesses were wrong."""
    figure, axis = panels(10, 5.4)
    page = MEMORY.page_size
    last = max(-(-len(moment.slots) // page) * page for moment in moments)
    for row, moment in enumerate(moments):
        end = -(-len(moment.slots) // page) * page
        for place in range(FIRST_SHOWN, end):
            text = moment.texts[place] if place < len(moment.texts) else ""
            cell = shortened(text.replace("\n", "⏎").strip() or repr(text)[1:-1], 7)
            if place < len(moment.slots):
                cell += f"\nslot {moment.slots[place]}"
            box(axis, place, row, (0.94, 0.8), cell, KINDS[kind_of(moment, place)], fontsize=6)
    for place in range(FIRST_SHOWN, last + 1, page):
        axis.axvline(place - 0.03, color="0.5", lw=0.8, ls=":")
    axis.set_yticks([row + 0.4 for row in range(len(moments))], [moment.title for moment in moments], fontsize=9)
    axis.set(xlim=(FIRST_SHOWN - 0.1, last), ylim=(len(moments), -0.1))
    axis.set_xticks([place + 0.47 for place in range(FIRST_SHOWN, last)], map(str, range(FIRST_SHOWN, last)))
    axis.set_xlabel(f"place of the token in prompt and answer; dotted: pages of {page}", fontsize=9)
    bare(axis, "top", "right", "left")
    legend(figure, KINDS)
    return figure


def kind_of(moment: Moment, place: int) -> str:
    """Return the kind of a slot of her row."""
    ends = [moment.protected, moment.committed, moment.sure, len(moment.slots)]
    return next((kind for kind, end in zip(KINDS, ends, strict=False) if place < end), list(KINDS)[-1])


def draw_pictures(folder: Path) -> None:
    """Draw the pictures into a folder."""
    verified, moments = watch()
    save(accepted(verified), folder / "m5_accepted.svg")
    save(slots(moments), folder / "m5_slots.svg")
