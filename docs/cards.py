"""The cards of the landing page: a paragraph that is only `[cards]()` becomes a card for each milestone of the course.

A card has a problem, a number before and after from the recorded tables, a picture, and the minutes of its lesson's
pages, which the pages name themselves.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
CARDS = "[cards]()"
MINUTES = re.compile(r"^\*(\d+) minutes to read", re.M)


class Card(NamedTuple):
    """A milestone on the landing page."""

    lesson: str
    title: str
    problem: str
    quantity: str
    table: str
    """File of `benchmarks/results` without its suffix, and section."""
    before: str
    """Beginning of a row of the table."""
    after: str
    columns: tuple[int, int]
    """Cells of the two numbers in these rows."""
    shapes: str
    """The picture: rectangles as `x,y,width,height,class`, on 120 by 60."""


LANE = " ".join(f"{x},26,6,8,answer" for x in range(34, 112, 8))
STAIRS = (
    "4,4,16,8,prompt 22,4,60,8,answer 14,18,16,8,prompt 32,18,84,8,answer "
    "34,32,16,8,prompt 52,32,40,8,answer 84,46,12,8,prompt 98,46,18,8,answer"
)
OWNERS = {"a": "prompt", "b": "answer", "c": "other", ".": "free"}
GRID = " ".join(
    f"{4 + 14 * (i % 8)},{4 + 14 * (i // 8)},12,12,{OWNERS[owner]}"
    for i, owner in enumerate("aabaccbbb.ac..cb.a...c.b........")
)
TREE = "4,24,34,10,prompt 50,8,28,10,answer 50,24,28,10,answer 50,40,28,10,answer 88,0,28,10,other 88,16,28,10,other"
PIECES = (
    " ".join(f"{4 + 28 * i},{8},18,10,prompt {23 + 28 * i},{8},6,10,answer" for i in range(4))
    + " "
    + " ".join(
        f"{4 + 14 * i},{32},12,10,{kind}"
        for i, kind in enumerate("answer accepted accepted rejected answer accepted accepted accepted".split())
    )
)
SIDES = (
    "4,8,44,16,prompt 4,36,44,16,prompt 54,14,12,4,transfer 54,42,12,4,transfer 72,8,44,16,answer 72,36,44,16,answer"
)
COURSE = (
    Card(
        "m1_single_request",
        "One request",
        "Every new token reads the whole text again.",
        "one more token after 1,024",
        "m1_single_request:token",
        "| 1,024 ",
        "| 1,024 ",
        (2, 3),
        "4,26,28,8,prompt " + LANE,
    ),
    Card(
        "m2_continuous_batching",
        "A running batch",
        "A request waits until all others have ended.",
        "tokens per second, 16 at a time",
        "m2_continuous_batching:throughput",
        "| one by one",
        "| `padded` | 16",
        (3, 3),
        STAIRS,
    ),
    Card(
        "m3_paged_attention",
        "KV in blocks",
        "Each request reserves memory for the longest answer.",
        "reserved memory that stays empty",
        "m3_paged_attention:fragmentation",
        "| m2, slots of 1,024",
        "| m3, blocks of 16",
        (5, 5),
        GRID,
    ),
    Card(
        "m4_radix_cache",
        "What others computed",
        "The same system prompt is computed for every user.",
        "mean time to the first token",
        "m4_radix_cache:reuse_embedded",
        "| m4, no sharing",
        "| m4, tree",
        (4, 4),
        TREE,
    ),
    Card(
        "m5_chunked_prefill_spec",
        "Many tokens per step",
        "A long prompt stops every stream.",
        "longest wait between two tokens",
        "m5_chunked_prefill_spec:gaps",
        "| m4 ",
        "| decode_first, 92 tokens",
        (4, 4),
        PIECES,
    ),
    Card(
        "m6_multimodal_pd",
        "Pictures, two engines",
        "Prompts and answers disturb each other.",
        "wait between two tokens, 95th percentile",
        "m6_pd:pd_gaps",
        "| one engine, 1 thread",
        "| prefill + decode",
        (3, 3),
        SIDES,
    ),
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the cards."""
    if CARDS not in markdown:
        return markdown
    return markdown.replace(CARDS, f'<div class="cards">\n{"".join(map(html_of, COURSE))}</div>')


def html_of(card: Card) -> str:
    """Return a card as HTML."""
    shapes = (shape.split(",") for shape in card.shapes.split())
    picture = "".join(
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="1.5" class="{kind}"/>' for x, y, w, h, kind in shapes
    )
    before, after = numbers(card)
    return (
        f'<a class="card" href="{card.lesson}/"><svg viewBox="0 0 120 60" aria-hidden="true">{picture}</svg>'
        f"<strong>{card.title}</strong><span>{card.problem}</span>"
        f'<span class="change"><b>{before}</b> → <b>{after}</b><small>{card.quantity}</small></span>'
        f"<small>{sum(minutes(card.lesson))} minutes</small></a>\n"
    )


def numbers(card: Card) -> tuple[str, str]:
    """Return the numbers before and after, as the table has them. Raises `RuntimeError` if it has no such row."""
    name, _, section = card.table.partition(":")
    text = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")
    lines = text.partition(f"[start:{section}]")[2].partition("[end:")[0].splitlines()
    rows = (next(line for line in lines if line.startswith(begin)).split("|") for begin in (card.before, card.after))
    before, after = (row[column].partition("(")[0].strip() for row, column in zip(rows, card.columns, strict=True))
    return before, after


def minutes(lesson: str) -> Iterator[int]:
    """Yield the minutes of each page of a lesson."""
    for path in sorted((ROOT / "docs").glob(f"{lesson[:2]}_*.md")):
        yield from map(int, MINUTES.findall(path.read_text(encoding="utf-8")))
