"""Part 2 of the demo's tour: where the tokens of a prompt with a picture stand, in time, height and width.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.events import some
from m4_radix_cache.demo_parts.stories import as_tokens
from m5_chunked_prefill_spec.demo_parts.stage import headline
from m6_multimodal_pd.demo_parts.stage import Ask
from m6_multimodal_pd.llm_engine import LLMEngine
from m6_multimodal_pd.multimodal.inputs import MultimodalDataItem, MultimodalInputs
from m6_multimodal_pd.multimodal.prompt import ChatPrompt

AROUND = 4  # tokens of text before a picture, and behind it
MOST_PLACES = 16  # a larger picture is shown in part
WIDEST_GRID = 12  # columns of merged patches
AXES = ("time", "height", "width")


class Place(NamedTuple):
    """One token of a prompt."""

    place: int
    text: str
    position: tuple[int, int, int]
    """In time, height and width."""
    is_picture: bool


def show_positions(engine: LLMEngine, still: Ask, clip: Ask, console: Console) -> list[str]:
    """The positions of a prompt with a picture, its block as three grids, and what they mean."""
    headline(
        console,
        "2. Where the tokens stand",
        "Every token has three positions: in time, in height and in width. A text counts up on all three alike, as "
        "always. The tokens of a picture share the time, and have the row and the column of their patch.",
    )
    prompt = with_pictures(engine, still)
    tokenizer = engine.engine_core.input_processor.tokenizer
    console.print(Text(f"The prompt of {still.question!r}", style="bold"))
    console.print(position_table(places(prompt, lambda token_id: str(tokenizer.decode([token_id])))))
    console.print()
    rows, columns = block_shape(engine, prompt)
    if columns <= WIDEST_GRID:
        console.print(Text("The picture's block, as it lies in the picture", style="bold"))
        console.print(grids(prompt, rows, columns))
        console.print()
    console.print(Text(explained(prompt, rows, columns)))
    console.print(Text(clip_explained(with_pictures(engine, clip))))
    return [fact(prompt)]


def with_pictures(engine: LLMEngine, ask: Ask) -> ChatPrompt:
    """The prompt of a question about a picture."""
    prompt = as_tokens(engine, ask.messages())
    assert isinstance(prompt, ChatPrompt)
    return prompt


def inputs_of(prompt: ChatPrompt) -> MultimodalInputs:
    """The pictures of a prompt that has some."""
    assert prompt.multimodal_inputs is not None
    return prompt.multimodal_inputs


def block_shape(engine: LLMEngine, prompt: ChatPrompt) -> tuple[int, int]:
    """Rows and columns of merged patches of the first picture."""
    merged = engine.engine_core.input_processor.prompts.media.processor.image.merge_size
    _, high, wide = inputs_of(prompt).mm_items[0].grid_thw
    return high // merged, wide // merged


def places(prompt: ChatPrompt, text_of: Callable[[int], str]) -> list[Place]:
    """The tokens of the first picture and some around it, in order."""
    inputs = inputs_of(prompt)
    item = inputs.mm_items[0]
    found = range(max(item.start - AROUND, 0), min(item.end + AROUND, len(prompt)))
    return [
        Place(
            i,
            text_of(prompt[i]),
            (int(inputs.mrope_positions[0, i]), int(inputs.mrope_positions[1, i]), int(inputs.mrope_positions[2, i])),
            item.start <= i < item.end,
        )
        for i in found
    ]


def position_table(found: list[Place]) -> Table:
    """A line for each token; of a large picture the first and the last ones."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("place", "token", *AXES):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    block = [one.place for one in found if one.is_picture]
    skipped = block[MOST_PLACES // 2 : -MOST_PLACES // 2] if len(block) > MOST_PLACES else []
    for one in found:
        if skipped and one.place == skipped[0]:
            table.add_row("", Text(f"... {len(skipped):,} more ...", style="dim"))
        if one.place in skipped:
            continue
        style = "cyan" if one.is_picture else "default"
        cells = (str(one.place), one.text.replace("\n", "\\n"), *map(str, one.position))
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def grids(prompt: ChatPrompt, rows: int, columns: int) -> Table:
    """Time, height and width of the first picture's tokens, each as a grid of its rows and columns."""
    table = Table.grid(padding=(0, 6, 0, 0))
    table.add_row(*(Text(axis, style="dim") for axis in AXES))
    table.add_row(*(Text(grid_text(grid), style="cyan") for grid in block(prompt).reshape(3, rows, columns)))
    return table


def grid_text(grid: np.ndarray) -> str:
    """Numbers in rows and columns."""
    width = len(str(grid.max()))
    return "\n".join(" ".join(f"{number:>{width}}" for number in row) for row in grid.tolist())


def block(prompt: ChatPrompt) -> np.ndarray:
    """Positions `[3, tokens]` of the first picture's tokens."""
    inputs = inputs_of(prompt)
    item = inputs.mm_items[0]
    return inputs.mrope_positions[:, item.start : item.end]


def explained(prompt: ChatPrompt, rows: int, columns: int) -> str:
    """What the numbers say."""
    inputs = inputs_of(prompt)
    item, own = inputs.mm_items[0], inputs.mrope_positions
    after = int(own[0, item.end])
    first = int(own[0, item.start])
    end = len(prompt) + inputs.mrope_position_delta
    return (
        f"{some(item.num_tokens, 'token')} of picture advance the position by {after - first}: the block is {rows} "
        f"high and {columns} wide, begins at {first}, and the text goes on behind its largest position, at {after}. So "
        f"place {item.end} has position {after}; the {some(len(prompt), 'token')} of the prompt end at position "
        f"{end - 1}, and the first token of the answer has position {end}, not {len(prompt)}."
    )


def fact(prompt: ChatPrompt) -> str:
    """The same in short."""
    saved = -inputs_of(prompt).mrope_position_delta
    return (
        f"A prompt of {some(len(prompt), 'token')} with a picture ends {some(saved, 'position')} earlier than one of "
        f"text: rows and columns count a picture's sides, not its area."
    )


def clip_explained(prompt: ChatPrompt) -> str:
    """The same of a clip, whose frames are a block each."""
    inputs = inputs_of(prompt)
    item = inputs.mm_items[0]
    spans = [f"{start} to {end - 1}" for start, end in item.offsets]
    starts = [str(int(inputs.mrope_positions[0, start])) for start, _ in item.offsets]
    return (
        f"The clip's frames are seen in pairs: {_frames(item)} in its prompt, at places {' and '.join(spans)}, each "
        f"behind a text that says at which second. Their times are {' and '.join(starts)}: a later pair stands at a "
        f"later position."
    )


def _frames(item: MultimodalDataItem) -> str:
    sizes = sorted({end - start for start, end in item.offsets})
    return f"{some(len(item.offsets), 'block')} of {some(sizes[0], 'token')}"
