"""Contract of M-RoPE's positions in m6: time, height and width of every token of a prompt with pictures."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from m6_multimodal_pd.multimodal.mrope import Block
from notebooks.shapes import Shape, picture
from tests.contracts.part import Broken, Part, same
from tests.m6_multimodal_pd.shipped import say

PART = Part(
    name="mrope_positions",
    target="m6_multimodal_pd.multimodal.mrope:get_rope_index",
    lesson="docs/m6_multimodal_pd.md#m-rope-positions-on-three-axes",
    starter="my_rope_index",
)

AXES = ("time", "height", "width")
TIME, HEIGHT, WIDTH = range(3)


def called(blocks: Sequence[Block], num_tokens: int) -> str:
    """The call, as a learner would write it."""
    listed = ", ".join(f"Block({block.start}, {block.height}, {block.width})" for block in blocks)
    return f"my_rope_index({num_tokens}, [{listed}])"


def result_of(part: Any, num_tokens: int, blocks: Sequence[Block]) -> tuple[np.ndarray, int]:
    """What a solution returns, if it has the right types and shape."""
    result, on = part(num_tokens, list(blocks)), called(blocks, num_tokens)
    if not isinstance(result, tuple) or len(result) != 2:
        raise Broken(on, "a tuple (positions, delta)", result, "Return both: `return positions, delta`.")
    positions, delta = result
    found = (positions.dtype.name, positions.shape) if isinstance(positions, np.ndarray) else type(positions).__name__
    hint = "Positions are one array with a row for each axis, and a column for each token."
    same(found, ("int64", (3, num_tokens)), on=f"type and shape of {on}[0]", hint=hint)
    same(type(delta).__name__, "int", on=f"type of {on}[1]", hint="Use Python's own numbers, not those of numpy.")
    return positions, delta


def check(part: Any, num_tokens: int, blocks: Sequence[Block], wanted: Sequence[Sequence[int]], hint: str) -> None:
    """Compare the rows of the first axes, as many as are wanted."""
    positions, _ = result_of(part, num_tokens, blocks)
    for axis, row in enumerate(wanted):
        same(positions[axis].tolist(), list(row), on=f"{AXES[axis]} of {called(blocks, num_tokens)}", hint=hint)


def check_axis(part: Any, num_tokens: int, block: Block, axis: int, wanted: Sequence[int], hint: str) -> None:
    """Compare the positions of the tokens of one block."""
    found = result_of(part, num_tokens, [block])[0][axis, block.start : block.end].tolist()
    on = f"{AXES[axis]} of the block's tokens, {called([block], num_tokens)}"
    same(found, list(wanted), on=on, hint=hint)


def test_a_text_counts_up_on_all_axes(part: Any) -> None:
    """In a prompt without blocks the position of a token is its index, on all three axes."""
    hint = "Without blocks all three rows are 0, 1, 2, ..."
    check(part, 4, [], [[0, 1, 2, 3]] * 3, hint)
    same(part(4, [])[1], 0, on="my_rope_index(4, [])[1]", hint="The next token has index 4 and position 4.")


def test_the_tokens_of_a_block_have_one_time(part: Any) -> None:
    """All tokens of a block have the same time: the next free position."""
    hint = "The block comes after two tokens of text, so the next free position is 2, for all of its tokens."
    check_axis(part, 7, Block(2, 2, 2), TIME, [2, 2, 2, 2], hint)


def test_rows_and_columns_count_from_there(part: Any) -> None:
    """Height and width of a token are the block's time plus the token's row and column."""
    block = Block(2, 2, 2)
    hint = "Rows and columns count from the next free position, not from 0. Tokens come row by row."
    check_axis(part, 7, block, HEIGHT, [2, 2, 3, 3], hint)
    check_axis(part, 7, block, WIDTH, [2, 3, 2, 3], hint)


def test_a_block_has_rows_of_its_width(part: Any) -> None:
    """The tokens of a block come row by row: a row has as many tokens as the block has columns."""
    hint = "Height is the row and width the column: a block of 2 rows and 3 columns has rows of 3 tokens."
    check_axis(part, 8, Block(1, 2, 3), HEIGHT, [1, 1, 1, 2, 2, 2], hint)
    check_axis(part, 8, Block(1, 2, 3), WIDTH, [1, 2, 3, 1, 2, 3], hint)
    check_axis(part, 8, Block(1, 3, 2), HEIGHT, [1, 1, 2, 2, 3, 3], hint)
    check_axis(part, 8, Block(1, 3, 2), WIDTH, [1, 2, 1, 2, 1, 2], hint)


def test_the_text_goes_on_behind_the_longer_side(part: Any) -> None:
    """The text after a block continues after the block's largest position."""
    hint = "A block takes as many positions as its longer side has tokens, not as many as it has tokens."
    for block in (Block(1, 2, 2), Block(1, 2, 4), Block(1, 4, 2)):
        side, num_text = max(block.height, block.width), 3
        num_tokens = block.end + num_text
        positions = result_of(part, num_tokens, [block])[0]
        for axis in (TIME, HEIGHT, WIDTH):
            on = f"{AXES[axis]} of the text after the block, {called([block], num_tokens)}"
            wanted = [1 + side + i for i in range(num_text)]
            same(positions[axis, block.end :].tolist(), wanted, on=on, hint=hint)


def test_the_delta_is_that_of_the_next_token(part: Any) -> None:
    """`delta` is the position of the token after the prompt, minus its index."""
    hint = "The next token has the index `num_tokens`. What is its position?"
    for num_tokens, blocks, wanted in ((6, [Block(1, 2, 2)], -2), (14, [Block(1, 3, 4)], -8), (9, [Block(2, 1, 5)], 0)):
        same(result_of(part, num_tokens, blocks)[1], wanted, on=f"{called(blocks, num_tokens)}[1]", hint=hint)


def test_a_prompt_may_begin_and_end_with_a_block(part: Any) -> None:
    """There may be no text before the first block, or after the last one."""
    hint = "A text of no tokens is a text: the block begins at position 0."
    check(part, 5, [Block(0, 2, 2)], [[0, 0, 0, 0, 2], [0, 0, 1, 1, 2], [0, 1, 0, 1, 2]], hint)
    blocks = [Block(2, 2, 3)]
    check(part, 8, blocks, [[0, 1, 2, 2, 2, 2, 2, 2]], "The prompt ends with the block.")
    hint = "After the block the next free position is 5: after the largest one on any axis, not after the last time."
    same(result_of(part, 8, blocks)[1], -3, on=f"{called(blocks, 8)}[1]", hint=hint)


def test_a_block_may_be_a_line_or_a_token(part: Any) -> None:
    """A block may have one row, one column, or one token."""
    line = "A block of one row advances the position by its columns, and one of one column by its rows."
    check(part, 5, [Block(1, 1, 3)], [[0, 1, 1, 1, 4], [0, 1, 1, 1, 4], [0, 1, 2, 3, 4]], line)
    check(part, 5, [Block(1, 3, 1)], [[0, 1, 1, 1, 4], [0, 1, 2, 3, 4], [0, 1, 1, 1, 4]], line)
    check(part, 3, [Block(1, 1, 1)], [[0, 1, 2]] * 3, "A block of one token advances the position by 1, as a text.")


def test_blocks_follow_each_other(part: Any) -> None:
    """Each block begins at the next free position after all before it, with or without text between."""
    hint = "Both the text between two blocks and the block before it advance the next free position."
    blocks = [Block(1, 2, 2), Block(7, 1, 3)]
    time = [0, 1, 1, 1, 1, 3, 4, 5, 5, 5, 8]
    height = [0, 1, 1, 2, 2, 3, 4, 5, 5, 5, 8]
    width = [0, 1, 2, 1, 2, 3, 4, 5, 6, 7, 8]
    check(part, 11, blocks, [time, height, width], hint)
    same(result_of(part, 11, blocks)[1], -2, on=f"{called(blocks, 11)}[1]", hint="Every block adds to the delta.")
    side_by_side = [Block(0, 2, 2), Block(4, 2, 2)]
    check(part, 8, side_by_side, [[0, 0, 0, 0, 2, 2, 2, 2], [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 2, 3, 2, 3]], hint)


def test_each_layer_of_a_video_is_a_block(part: Any) -> None:
    """A video's layers are blocks like any other: the text with the time between them advances all axes."""
    blocks = [Block(2, 1, 2), Block(6, 1, 2), Block(10, 1, 2)]
    hint = "The function is not told which blocks belong together: it treats every block alike."
    check(part, 13, blocks, [[0, 1, 2, 2, 4, 5, 6, 6, 8, 9, 10, 10, 12]], hint)
    same(result_of(part, 13, blocks)[1], 0, on=f"{called(blocks, 13)}[1]", hint=hint)


def test_calls_do_not_depend_on_each_other(part: Any) -> None:
    """Every call returns an array of its own, and leaves `blocks` as it was."""
    blocks = [Block(1, 2, 2), Block(6, 2, 2)]
    given = list(blocks)
    first = part(11, given)[0]
    same(
        given, blocks, on="the list of blocks after the call", hint="The caller still needs its list: do not change it."
    )
    before = first.tolist()
    part(11, [])
    on = f"the positions of {called(blocks, 11)} after another call"
    same(first.tolist(), before, on=on, hint="A request keeps its array: make a new one in each call.")


def token_by_token(num_tokens: int, blocks: Sequence[Block]) -> tuple[list[list[int]], int]:
    """The same by hand: one token after the other."""
    rows: list[list[int]] = [[], [], []]
    free = 0
    while len(rows[0]) < num_tokens:
        block = next((each for each in blocks if each.start == len(rows[0])), None)
        if block is None:
            for row in rows:
                row.append(free)
            free += 1
            continue
        for y in range(block.height):
            for x in range(block.width):
                for row, offset in zip(rows, (0, y, x), strict=True):
                    row.append(free + offset)
        free = max(map(max, rows)) + 1
    return rows, free - num_tokens


def test_it_is_right_for_any_prompt(part: Any) -> None:
    """For any prompt, positions and delta are those that one gets token by token."""
    rng = Random(1)
    for _ in range(150):
        blocks: list[Block] = []
        at = rng.randrange(4)
        for _ in range(rng.randrange(4)):
            blocks.append(Block(at, rng.randrange(1, 5), rng.randrange(1, 5)))
            at = blocks[-1].end + rng.randrange(4)
        num_tokens = max(at, 1)
        wanted, delta = token_by_token(num_tokens, blocks)
        times = ", ".join(f"{wanted[TIME][block.start]} ({block.height} by {block.width})" for block in blocks)
        hint = f"The blocks begin at these positions: {times}." if blocks else "There is only text."
        check(part, num_tokens, blocks, wanted, hint)
        same(result_of(part, num_tokens, blocks)[1], delta, on=f"{called(blocks, num_tokens)}[1]", hint=hint)


def test_the_model_finds_all_shapes(part: Any) -> None:
    """An engine with these positions counts the shapes of a picture."""
    shapes = [("big", "red", "star", "top right"), ("big", "blue", "circle", "bottom left")]
    seen = picture(*(Shape(*shape) for shape in shapes), Shape("small", "black", "square", "left"))
    question = "How many shapes are there?"
    answer = say(seen, question)
    hint = "If all behaviours above are there, it may be something that depends on the number of the calls."
    if not answer.endswith("3 shapes."):
        raise Broken(f"a picture of three shapes: {question}", "... 3 shapes.", answer, hint)
