"""The graders of m6: typical wrong answers fail with a hint that names the mistake. Right ones: `test_lessons.py`."""

import hashlib
import uuid

import numpy as np
import pytest

from m6_multimodal_pd.models.rotary import axes_of_pairs
from m6_multimodal_pd.multimodal.mrope import get_rope_index
from notebooks.checks_m6 import another_shape, check, new_engine, two_wide
from tests.notebooks.exercises import M6, assert_refused
from tests.notebooks.lessons import source

LESSON = M6.lesson


# --- key --------------------------------------------------------------------------------------------------------------


def keying(*, copies=True, first=0, remembers=True, stands_for="content", frames=True, longer=0):
    """`key` with a mistake in it."""

    def key(token_ids, items, known, vocab_size):
        padded = list(token_ids) if copies else token_ids
        names = known if remembers else {}
        for place, (content, ranges) in enumerate(items):
            name = {"content": content, "place": place}[stands_for]
            number = names.setdefault(name, vocab_size * (first is not None) + (first or 0) + len(names))
            known.setdefault(content, number)
            for start, end in ranges if frames else ranges[:1]:
                padded[start : end + longer] = [number] * (end + longer - start)
        return padded

    return key


def counted_from_what_it_has(token_ids, items, known, vocab_size):
    """Counts placeholders instead of contents."""
    padded = list(token_ids)
    for content, ranges in items:
        for start, end in ranges:
            for place in range(start, end):
                padded[place] = vocab_size + place - start
        known[content] = vocab_size
    return padded


WRONG_KEYS = [
    (keying(copies=False), "changes the prompt itself"),
    (
        keying(first=None),
        "yours [5, 0, 0, 0, 6]. No text may contain a number that stands for a picture: begin at vocab_size",
    ),
    (keying(first=1), "is [5, 4096, 4096, 4096, 6], yours [5, 4097, 4097, 4097, 6]"),
    (keying(remembers=False), "Another content has another number"),
    (keying(stands_for="place"), "Another content has another number"),
    (keying(frames=False), "A clip has one number in all of its frames"),
    (keying(longer=1), "Each placeholder becomes the number, and nothing else"),
    (counted_from_what_it_has, "Each placeholder becomes the number"),
    (
        lambda token_ids, items, known, vocab_size: list(token_ids),
        "yours [5, 9, 9, 9, 6]. Each placeholder becomes the",
    ),
    (lambda token_ids, items, known, vocab_size: None, "yours None"),
]


def test_the_key_that_the_wrong_ones_vary_is_right():
    assert check("m6.key", keying())


@pytest.mark.parametrize(("answer", "hint"), WRONG_KEYS)
def test_a_wrong_key_is_met_with_what_a_placeholder_stands_for(answer, hint):
    assert_refused("m6.key", answer, hint)


def test_a_right_key_that_keeps_its_numbers_for_itself_is_refused_because_they_are_not_found_again():
    own = {}

    def key(token_ids, items, known, vocab_size):
        return keying()(token_ids, items, own, vocab_size)

    assert_refused("m6.key", key, "`known` must have 'star' afterwards")


# --- rows -------------------------------------------------------------------------------------------------------------


def taking(
    *, counts_on=True, cuts_start=True, cuts_end=True, from_zero=False, at_start=False, empty=False, inclusive=0
):
    """`rows` with a mistake in it."""

    def rows(ranges, start, end):
        found, first = [], 0
        for begin, stop in ranges:
            low = max(begin, start) if cuts_start else begin
            high = min(stop, end) if cuts_end else stop
            if empty or max(begin, start) < min(stop, end):
                row = first if from_zero else first + low - begin
                found.append((low - start if at_start else low, row, row + high - low - inclusive))
            if counts_on:
                first += stop - begin
        return found

    return rows


WRONG_ROWS = [
    (taking(counts_on=False), "The rows of a clip are numbered through"),
    (taking(cuts_start=False), "does not begin with row 0"),
    (taking(cuts_end=False), "takes the first rows"),
    (taking(from_zero=True), "does not begin with row 0"),
    (taking(at_start=True), "The place is counted from the beginning of the prompt"),
    (taking(empty=True), "After it no row is taken"),
    (taking(inclusive=1), "The third number is one more than the last row"),
    (lambda ranges, start, end: tuple(taking()(ranges, start, end)), "yours ((5, 0, 9),)"),
    (lambda ranges, start, end: None, "yours None"),
]


def test_the_rows_that_the_wrong_ones_vary_are_right():
    assert check("m6.rows", taking())


@pytest.mark.parametrize(("answer", "hint"), WRONG_ROWS)
def test_wrong_rows_are_met_with_which_ones_belong_to_the_piece(answer, hint):
    assert_refused("m6.rows", answer, hint)


# --- piece ------------------------------------------------------------------------------------------------------------


def limited(
    *,
    whole=True,
    first_runs=True,
    known_counts=False,
    asks_also="",
    twice=False,
    strictly=False,
    begun=False,
    place=0,
):
    """`piece` with a mistake in it."""

    def piece(items, start, num_tokens, spent, budget, known):
        encoded, end = set() if known_counts else set(known), start + num_tokens
        for content, ranges in items:
            parts = [(begin, stop) for begin, stop in ranges if begin < end and start < stop]
            if not parts or (content in encoded and asks_also != ("known" if content in known else "again")):
                continue
            if content in encoded:
                cost = 0
            elif whole:
                cost = sum(stop - begin for begin, stop in ranges)
            else:
                cost = sum(min(stop, end) - max(begin, start) for begin, stop in parts)
            too_much = spent + cost >= budget if strictly else spent + cost > budget
            if too_much and (spent or not first_runs):
                left = (ranges[0][0] if place == 0 else ranges[0][0] + place) - start
                return left if begun else max(left, 0)
            spent += cost
            if not twice:
                encoded.add(content)
        return num_tokens

    return piece


def as_far_as_the_budget(items, start, num_tokens, spent, budget, known):
    """Cuts inside a picture, after as many of its tokens as the budget has left."""
    right = limited()(items, start, num_tokens, spent, budget, known)
    return right if right == num_tokens else right + max(budget - spent, 0)


WRONG_PIECES = [
    (lambda items, start, num_tokens, spent, budget, known: num_tokens, "the piece ends before the picture"),
    (as_far_as_the_budget, "the piece ends before the picture"),
    (limited(place=-1), "the piece ends before the picture"),
    (limited(strictly=True), "Exactly the whole budget is no more than the budget"),
    (limited(known_counts=True), "A picture that is encoded already costs nothing"),
    (limited(asks_also="known"), "An item that costs nothing is never too much"),
    (limited(first_runs=False), "The first one of a step runs even if it is larger"),
    (limited(whole=False), "All of a picture is encoded at once"),
    (limited(begun=True), "A piece that begins inside the picture has no tokens before it"),
    (limited(twice=True), "The same content twice is encoded once"),
    (limited(asks_also="again"), "A content that came before in this piece costs nothing"),
    (lambda *_: None, "yours None"),
]


def test_the_piece_that_the_wrong_ones_vary_is_right():
    assert check("m6.piece", limited())


@pytest.mark.parametrize(("answer", "hint"), WRONG_PIECES)
def test_a_wrong_piece_is_met_with_what_its_pictures_cost(answer, hint):
    assert_refused("m6.piece", answer, hint)


# --- frames -----------------------------------------------------------------------------------------------------------


def sampling(*, least=True, most=True, there=True, rounds=np.round, stride=False, last=1, number=int, made=int):
    """`sample_frames` with a mistake in it."""

    def sample_frames(total, video_fps, fps, at_least, at_most):
        wanted = number(total / video_fps * fps)
        wanted = max(wanted, at_least) if least else max(wanted, 1)
        wanted = min(wanted, at_most) if most else wanted
        wanted = min(wanted, total) if there else wanted
        if stride:
            return [i * (total // wanted) for i in range(wanted)]
        return [made(i) for i in rounds(np.linspace(0, total - last, wanted))]

    return sample_frames


WRONG_FRAMES = [
    (sampling(least=False), "One second is two frames, and `at_least` is more"),
    (sampling(most=False), "1,000 seconds would be more than `at_most`"),
    (sampling(there=False), "A video has no more frames than `total`"),
    (sampling(stride=True), "Evenly spread, from the first to the last one, and not with a fixed step"),
    (sampling(last=0), "Evenly spread, from the first to the last one"),
    (sampling(rounds=np.floor), "each rounded to the nearest frame"),
    (sampling(rounds=np.ceil), "each rounded to the nearest frame"),
    (sampling(made=float), "a list or an array of whole numbers"),
    (lambda *_: [], "10 frames"),
    (sampling(number=lambda wanted: int(np.ceil(wanted))), "8.33 frames are 8"),
    (lambda *_: None, "yours None"),
]


def test_the_frames_that_the_wrong_ones_vary_are_right():
    assert check("m6.sample_frames", sampling())


def halves_go(up):
    def rounds(places):
        return np.floor(places + 0.5) if up else np.ceil(places - 0.5)

    return rounds


@pytest.mark.parametrize("rounds", [np.round, halves_go(up=True), halves_go(up=False)])
@pytest.mark.parametrize("made", [list, tuple, np.array])
def test_frames_may_be_any_sequence_and_halves_may_go_either_way(rounds, made):
    assert check("m6.sample_frames", lambda *clip: made(sampling(rounds=rounds)(*clip)))


@pytest.mark.parametrize(("answer", "hint"), WRONG_FRAMES)
def test_wrong_frames_are_met_with_how_many_and_which(answer, hint):
    assert_refused("m6.sample_frames", answer, hint)


# --- the labs: positions ----------------------------------------------------------------------------------------------


def test_the_planted_positions_swap_height_and_width():
    planted = LESSON.defined("swapped", {"np": np})
    assert_refused("m6.swapped", planted, "height and width are swapped")


def turned(change):
    """The engine's positions, each block `[3, height, width]` changed."""

    def positions(num_tokens, blocks):
        found, delta = get_rope_index(num_tokens, blocks)
        for block in blocks:
            of_block = found[:, block.start : block.end].reshape(3, block.height, block.width)
            of_block[:] = change(of_block.copy(), block)
        return found, delta

    return positions


def divided_by_the_height(num_tokens, blocks):
    found, delta = get_rope_index(num_tokens, blocks)
    for block in blocks:
        rows, columns = np.divmod(np.arange(block.height * block.width), block.height)
        found[1:, block.start : block.end] = found[0, block.start] + np.stack([rows, columns])
    return found, delta


def advancing_by(side):
    """Return positions with right blocks, whose text after a block continues after this side."""

    def positions(num_tokens, blocks):
        found, _ = get_rope_index(num_tokens, blocks)
        for block in blocks:
            found[:, block.end :] += getattr(block, side) - max(block.height, block.width)
        return found, int(found[0, -1]) + 1 - num_tokens

    return positions


def after_all_its_tokens(num_tokens, blocks):
    """Advance the position of a picture by the number of its tokens."""
    return np.tile(np.arange(num_tokens), (3, 1)), 0


WRONG_POSITIONS = [
    (turned(lambda of_block, block: of_block[[0, 2, 1]]), "height and width are swapped"),
    (turned(lambda of_block, block: of_block + np.array([1, 0, 0])[:, None, None]), "time is"),
    (turned(lambda of_block, block: of_block[:, ::-1]), "height is"),
    (divided_by_the_height, "tokens come row by row"),
    (advancing_by("height"), "2 rows of 3 from 2 on: time is"),
    (advancing_by("height"), "The text after it continues after its longer side"),
    (advancing_by("width"), "The text after it continues after its longer side"),
    (after_all_its_tokens, "time is [0, 1, 1, 1, 1, 3]"),
    (lambda n, blocks: (get_rope_index(n, blocks)[0], 0), "the answer begins at place + -2, yours at place + 0"),
    (lambda n, blocks: (get_rope_index(n, blocks)[0], 0), "the next position minus the number of tokens"),
    (lambda n, blocks: (get_rope_index(n, blocks)[0][0], 0), "positions are [3, 6], yours [6]"),
]


@pytest.mark.parametrize(("answer", "hint"), WRONG_POSITIONS)
def test_wrong_positions_are_met_with_the_axis_that_is_wrong(answer, hint):
    assert_refused("m6.swapped", answer, hint)


# --- the labs: the axes of pairs --------------------------------------------------------------------------------------


def test_the_planted_layout_is_that_of_the_older_model():
    planted = LESSON.defined("in_sections", {})
    assert_refused("m6.layout", planted, "'THWTHW", "one section after another, as in Qwen2-VL")


def in_turn_and_never_full(section, pairs):
    return [pair % 3 for pair in range(pairs)]


def in_another_order(section, pairs):
    return [(2, 1, 0)[axis] for axis in axes_of_pairs(section, pairs)]


def the_rest_goes_to_width(section, pairs):
    return [2 if pair >= 3 * min(section) else pair % 3 for pair in range(pairs)]


def in_turn_among_those_that_have_some_left(section, pairs):
    left, axes = list(section), []
    while len(axes) < pairs:
        for axis in (axis for axis in range(3) if left[axis]):
            left[axis] -= 1
            axes.append(axis)
    return axes


WRONG_LAYOUTS = [
    (in_turn_and_never_full, "the rest is time's"),
    (in_another_order, "'THWTHW"),
    (the_rest_goes_to_width, "'THWTHW"),
    (in_turn_among_those_that_have_some_left, "[6, 1, 2]: 'THWTTWTTT', yours 'THWTWTTTT'"),
    (in_turn_among_those_that_have_some_left, "gives its turn to time, not to the next axis"),
    (lambda section, pairs: axes_of_pairs((12, 10, 10), 32), "the rest is time's"),
    (lambda section, pairs: [7] * pairs, "yours [7, 7, 7"),
    (lambda section, pairs: [], "yours ''"),
]


@pytest.mark.parametrize(("answer", "hint"), WRONG_LAYOUTS)
def test_a_wrong_layout_is_met_with_the_right_one(answer, hint):
    assert_refused("m6.layout", answer, hint)


# --- the labs: content ------------------------------------------------------------------------------------------------


def test_the_planted_hash_forgets_the_shape():
    planted = LESSON.defined("bytes_alone", {"hashlib": hashlib})
    assert_refused("m6.content", planted, "the shape belongs to the content")


def hashed(*prefix, of_pixels=np.ndarray.tobytes, digest=lambda data: hashlib.sha256(data).hexdigest()):
    """A hash of the bytes, and of what these functions of the grid make."""

    def content(modality, feature, grid_thw, options):
        text = "".join(str(part(grid_thw)) for part in prefix)
        return digest(text.encode() + of_pixels(feature))

    return content


def salted(modality, feature, grid_thw, options):
    return f"{hash((grid_thw, feature.tobytes())) % 2**64:032x}"


WRONG_HASHES = [
    (hashed(sum), "the shape belongs to the content"),
    (hashed(sorted), "the shape belongs to the content"),
    (hashed(np.prod), "the shape belongs to the content"),
    (hashed(lambda grid: grid[0], lambda grid: grid[1], lambda grid: grid[2]), "Do 1, 22, 2 and 12, 2, 2 become"),
    (hashed(lambda grid: grid[1]), "of 2 x 6 x 4 patches have one hash"),
    (hashed(tuple, of_pixels=lambda feature: b""), "all of the pixels belong"),
    (hashed(tuple, of_pixels=lambda feature: feature[0].tobytes()), "all of the pixels belong"),
    (hashed(tuple, digest=lambda data: hashlib.md5(data).hexdigest()[:4]), "at least 32 hex digits, 128 bits"),
    (hashed(tuple, digest=lambda data: str(hash(data))), "hash() has 16, and they differ in every process"),
    (salted, "hash() is salted"),
    (hashed(bytes), "bytes must be in range(0, 256)"),
    (hashed(lambda grid: np.array(grid).astype(np.uint8)), "Is a byte enough for a number?"),
    (lambda *_: uuid.uuid4().hex, "The same picture must have the same hash"),
    (lambda *_: 7, "A hash is a text of at least 32 hex digits"),
    (hashed(tuple, digest=lambda data: hashlib.sha256(data).digest()), "A hash is a text of at least 32 hex digits"),
]


@pytest.mark.parametrize(("answer", "hint"), WRONG_HASHES)
def test_a_wrong_hash_is_met_with_what_it_confuses(answer, hint):
    assert_refused("m6.content", answer, hint)


def test_a_hash_that_forgets_the_shape_of_real_pictures_is_met_with_an_answer_about_the_other_picture():
    """Right on the small examples, and blind for real patches: only the engine tells."""
    own = LESSON.folded_solutions()["bytes_alone"]

    def content(modality, feature, grid_thw, options):
        return own(modality, feature, grid_thw if feature.shape[1] < 100 else (), options)

    assert_refused("m6.content", content, "That is an answer about the first")


# --- what the labs show -----------------------------------------------------------------------------------------------


def test_two_pictures_of_the_same_squares_have_the_same_numbers_and_other_grids():
    wide = two_wide()
    tall = another_shape(wide)
    assert wide.shape == (96, 128, 3) and tall.shape == (128, 96, 3)
    with new_engine() as engine:
        prompts = [
            engine.chat_prompt([{"role": "user", "content": [{"type": "image", "image": shown}]}])
            for shown in (wide, tall)
        ]
    first, second = (prompt.multimodal_inputs.mm_items[0] for prompt in prompts)
    assert np.array_equal(first.feature, second.feature)
    assert (first.grid_thw, second.grid_thw) == ((1, 6, 8), (1, 8, 6))
    assert np.array_equal(another_shape(tall), wide)


def test_the_counts_of_swapped_positions_in_the_text_are_those_of_the_stored_output():
    outputs = [output for cell in LESSON.cells("code") for output in cell["outputs"]]
    printed = "".join(line for output in outputs for line in output.get("text", []))
    assert "swapped positions, wrong answers: describe 6 of 24, where 0 of 24\n" in printed
    (text,) = [text for text in map(source, LESSON.cells("markdown")) if "Look at what it does *not* do" in text]
    assert "six of 24 descriptions" in text and "of the 24 questions where a thing is, none" in text
