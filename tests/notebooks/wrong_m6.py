"""Wrong answers to the exercises about pictures, each with the words that its refusal must hold, and right variants.

Most are the solution with a piece of its text changed.
"""

import hashlib
import uuid

import numpy as np

from tests.notebooks.exercises import M6
from tests.notebooks.lessons import RightAnswers, WrongAnswers

LESSON = M6.lesson
WRONG: WrongAnswers = {}

NUMBER, PADDED = "vocab_size + len(known)", "padded[start:end] = [number] * (end - start)"
ALL_AND_NOTHING_ELSE = "Each placeholder becomes the number, and nothing else"
changed = LESSON.solution("key")
WRONG["m6.key"] = [
    (changed("list(token_ids)", "token_ids"), "changes the prompt itself"),
    (
        changed(NUMBER, "len(known)"),
        "yours [5, 0, 0, 0, 6]. No text may contain a number that stands for a picture: begin at vocab_size",
    ),
    (changed(NUMBER, f"{NUMBER} + 1"), "is [5, 4096, 4096, 4096, 6], yours [5, 4097, 4097, 4097, 6]"),
    (changed(NUMBER, "vocab_size"), "Another content has another number"),
    (changed(NUMBER, "vocab_size + items.index((content, ranges))"), "Another content has another number"),
    (changed("in ranges:", "in ranges[:1]:"), "A clip has one number in all of its frames"),
    (changed(PADDED, "padded[start : end + 1] = [number] * (end + 1 - start)"), ALL_AND_NOTHING_ELSE),
    (changed("[number] * (end - start)", "range(vocab_size, vocab_size + end - start)"), ALL_AND_NOTHING_ELSE),
    (changed(PADDED, "pass"), f"yours [5, 9, 9, 9, 6]. {ALL_AND_NOTHING_ELSE}"),
    (lambda token_ids, items, known, vocab_size: None, "yours None"),
    (changed("known, vocab_size", "_, vocab_size, known={}"), "`known` must have 'star' afterwards"),
]

FIRST, LAST = "first + low - begin", "first + high - begin"
changed = LESSON.solution("rows")
WRONG["m6.rows"] = [
    (changed("first += stop - begin", "pass"), "The rows of a clip are numbered through"),
    (changed(f"low, {FIRST}", "begin, first"), "does not begin with row 0"),
    (changed(LAST, "first + stop - begin"), "takes the first rows"),
    (changed(f"{FIRST}, {LAST}", "first, first + high - low"), "does not begin with row 0"),
    (changed("(low,", "(low - start,"), "The place is counted from the beginning of the prompt"),
    (changed("if low < high:", "if True:"), "After it no row is taken"),
    (changed(LAST, f"{LAST} - 1"), "The third number is one more than the last row"),
    (changed("return found", "return tuple(found)"), "yours ((5, 0, 9),)"),
    (lambda ranges, start, end: None, "yours None"),
]

LEFT, COST = "max(ranges[0][0] - start, 0)", "cost = sum(end - begin for begin, end in ranges)"
FREE = "cost = 0 if content in encoded else sum(end - begin for begin, end in ranges)"
IN_THIS_PIECE = "sum(max(0, min(end, start + num_tokens) - max(begin, start))"
changed = LESSON.solution("piece")
WRONG["m6.piece"] = [
    (lambda items, start, num_tokens, spent, budget, known: num_tokens, "the piece ends before the picture"),
    (changed(LEFT, f"{LEFT} + max(budget - spent, 0)"), "the piece ends before the picture"),
    (changed(LEFT, "max(ranges[0][0] - 1 - start, 0)"), "the piece ends before the picture"),
    (changed("> budget", ">= budget"), "Exactly the whole budget is no more than the budget"),
    (changed("set(known)", "set()"), "A picture that is encoded already costs nothing"),
    (
        changed("or content in encoded:", "or content in encoded - set(known):", COST, FREE),
        "An item that costs nothing is never too much",
    ),
    (changed("if spent and ", "if "), "The first one of a step runs even if it is larger"),
    (changed("sum(end - begin", IN_THIS_PIECE), "All of a picture is encoded at once"),
    (changed(LEFT, "ranges[0][0] - start"), "A piece that begins inside the picture has no tokens before it"),
    (changed("encoded.add(content)", "pass"), "The same content twice is encoded once"),
    (
        changed("or content in encoded:", "or content in known:", COST, FREE),
        "A content that came before in this piece costs nothing",
    ),
    (lambda *_: None, "yours None"),
]

PLACES = "np.linspace(0, total - 1, wanted)"
changed = LESSON.solution("sample_frames")
RIGHT: RightAnswers = [
    ("m6.sample_frames", changed("[int(i)", f"{sequence}([int(i)", f"{PLACES}.round()]", f"{places}])"))
    for places in (f"{PLACES}.round()", f"np.floor({PLACES} + 0.5)", f"np.ceil({PLACES} - 0.5)")
    for sequence in ("list", "tuple", "np.array")
]
EVENLY, NEAREST = "Evenly spread, from the first to the last one", "each rounded to the nearest frame"
WRONG["m6.sample_frames"] = [
    (changed("max(wanted, at_least)", "max(wanted, 1)"), "One second is two frames, and `at_least`"),
    (changed("at_most, total)", "total)"), "1,000 seconds would be more than `at_most`"),
    (changed("at_most, total)", "at_most)"), "A video has no more frames than `total`"),
    (
        changed(f"int(i) for i in {PLACES}.round()", "i * (total // wanted) for i in range(wanted)"),
        f"{EVENLY}, and not with a fixed step",
    ),
    (changed("total - 1", "total"), EVENLY),
    (changed(".round()", ""), NEAREST),
    (changed(f"{PLACES}.round()", f"np.ceil({PLACES})"), NEAREST),
    (changed("int(i)", "float(i)"), "a list or an array of whole numbers"),
    (lambda *_: [], "10 frames"),
    (changed("int(total / video_fps * fps)", "-int(-total / video_fps * fps // 1)"), "8.33 frames are 8"),
    (lambda *_: None, "yours None"),
]

AXES, LONGER = "[0 * rows, rows, columns]", "max(block.height, block.width)"
RESULT, BEHIND = "return positions, following - done", "The text after it continues after its longer side"
changed = LESSON.solution("swapped")
WRONG["m6.swapped"] = [
    (LESSON.defined("swapped", {"np": np}), "height and width are swapped"),
    (changed(AXES, "[0 * rows, columns, rows]"), "height and width are swapped"),
    (changed(AXES, "[0 * rows + 1, rows, columns]"), "time is"),
    (changed(AXES, "[0 * rows, rows[::-1], columns]"), "height is"),
    (changed("block.width), block.width", "block.width), block.height"), "tokens come row by row"),
    (changed(LONGER, "block.height"), "2 rows of 3 from 2 on: time is", BEHIND),
    (changed(LONGER, "block.width"), BEHIND),
    (lambda num_tokens, blocks: (np.tile(np.arange(num_tokens), (3, 1)), 0), "time is [0, 1, 1, 1, 1, 3]"),
    (
        changed(RESULT, "return positions, 0"),
        "the answer begins at place + -2, yours at place + 0",
        "the next position minus the number of tokens",
    ),
    (changed(RESULT, "return positions[0], 0"), "positions are [3, 6], yours [6]"),
]


def in_turn_among_those_that_have_some_left(section, pairs):
    left, axes = list(section), []
    while len(axes) < pairs:
        for axis in (axis for axis in range(3) if left[axis]):
            left[axis] -= 1
            axes.append(axis)
    return axes


changed = LESSON.solution("in_sections")
WRONG["m6.layout"] = [
    (LESSON.defined("in_sections", {}), "'THWTHW", "one section after another, as in Qwen2-VL"),
    (changed("turn if pair < 3 * section[turn] else 0", "turn"), "the rest is time's"),
    (
        in_turn_among_those_that_have_some_left,
        "[6, 1, 2]: 'THWTTWTTT', yours 'THWTWTTTT'",
        "gives its turn to time, not to the next axis",
    ),
    (changed("axes = []", "axes, section, pairs = [], (12, 10, 10), 32"), "the rest is time's"),
    (lambda section, pairs: [7] * pairs, "yours [7, 7, 7"),
    (lambda section, pairs: [], "yours ''"),
]

GRID, SHAPE = "{tuple(grid_thw)}", "the shape belongs to the content"
PIXELS, DIGEST = "feature.tobytes()", "digest.hexdigest()"
IS_A_TEXT = "A hash is a text of at least 32 hex digits"
changed = LESSON.solution("bytes_alone")
WRONG["m6.content"] = [
    (LESSON.defined("bytes_alone", {"hashlib": hashlib}), SHAPE),
    (changed(GRID, "{sorted(grid_thw)}"), SHAPE),
    (changed(GRID, "{grid_thw[0]}{grid_thw[1]}{grid_thw[2]}"), "Do 1, 22, 2 and 12, 2, 2 become"),
    (changed(GRID, "{grid_thw[1]}"), "of 2 x 6 x 4 patches have one hash"),
    (changed(PIXELS, "b''"), "all of the pixels belong"),
    (changed(PIXELS, "feature[0].tobytes()"), "all of the pixels belong"),
    (changed(DIGEST, f"{DIGEST}[:4]"), "at least 32 hex digits, 128 bits"),
    (changed(DIGEST, f"str(hash({DIGEST}))"), "hash() has 16, and they differ in every process"),
    (changed(DIGEST, f"f'{{hash({DIGEST}) % 2**64:032x}}'"), "hash() is salted"),
    (changed(GRID, "{bytes(grid_thw)}"), "bytes must be in range(0, 256)"),
    (changed(GRID, "{[one % 256 for one in grid_thw]}"), "Is a byte enough for a number?"),
    (lambda *_: uuid.uuid4().hex, "The same picture must have the same hash"),
    (lambda *_: 7, IS_A_TEXT),
    (changed(DIGEST, "digest.digest()"), IS_A_TEXT),
    (  # right on the small examples, and wrong for real patches: only the engine finds it
        changed(GRID, "{tuple(grid_thw) if feature.shape[1] < 100 else ()}"),
        "That is an answer about the first",
    ),
]
