"""Wrong answers to the exercises about pictures, each with the words that its refusal must hold, and right variants."""

import hashlib
import uuid

import numpy as np

from m6_multimodal_pd.models.rotary import axes_of_pairs
from m6_multimodal_pd.multimodal.mrope import get_rope_index
from tests.notebooks.exercises import M6
from tests.notebooks.lessons import RightAnswers, WrongAnswers

LESSON = M6.lesson
WRONG: WrongAnswers = {}
RIGHT: RightAnswers = []


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


OWN_NUMBERS: dict[str, int] = {}


def keeps_its_numbers_for_itself(token_ids, items, known, vocab_size):
    return keying()(token_ids, items, OWN_NUMBERS, vocab_size)


RIGHT += [("m6.key", keying())]
WRONG["m6.key"] = [
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
    (keeps_its_numbers_for_itself, "`known` must have 'star' afterwards"),
]


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


RIGHT += [("m6.rows", taking())]
WRONG["m6.rows"] = [
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


RIGHT += [("m6.piece", limited())]
WRONG["m6.piece"] = [
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


def as_a(sequence, answer):
    return lambda *clip: sequence(answer(*clip))


def halves_go(up):
    def rounds(places):
        return np.floor(places + 0.5) if up else np.ceil(places - 0.5)

    return rounds


RIGHT += [
    ("m6.sample_frames", as_a(sequence, sampling(rounds=rounds)))
    for rounds in (np.round, halves_go(up=True), halves_go(up=False))
    for sequence in (list, tuple, np.array)
]
WRONG["m6.sample_frames"] = [
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


WRONG["m6.swapped"] = [
    (LESSON.defined("swapped", {"np": np}), "height and width are swapped"),
    (turned(lambda of_block, block: of_block[[0, 2, 1]]), "height and width are swapped"),
    (turned(lambda of_block, block: of_block + np.array([1, 0, 0])[:, None, None]), "time is"),
    (turned(lambda of_block, block: of_block[:, ::-1]), "height is"),
    (divided_by_the_height, "tokens come row by row"),
    (advancing_by("height"), "2 rows of 3 from 2 on: time is", "The text after it continues after its longer side"),
    (advancing_by("width"), "The text after it continues after its longer side"),
    (after_all_its_tokens, "time is [0, 1, 1, 1, 1, 3]"),
    (
        lambda n, blocks: (get_rope_index(n, blocks)[0], 0),
        "the answer begins at place + -2, yours at place + 0",
        "the next position minus the number of tokens",
    ),
    (lambda n, blocks: (get_rope_index(n, blocks)[0][0], 0), "positions are [3, 6], yours [6]"),
]


def in_turn_and_never_full(section, pairs):
    return [pair % 3 for pair in range(pairs)]


def in_turn_among_those_that_have_some_left(section, pairs):
    left, axes = list(section), []
    while len(axes) < pairs:
        for axis in (axis for axis in range(3) if left[axis]):
            left[axis] -= 1
            axes.append(axis)
    return axes


WRONG["m6.layout"] = [
    (LESSON.defined("in_sections", {}), "'THWTHW", "one section after another, as in Qwen2-VL"),
    (in_turn_and_never_full, "the rest is time's"),
    (
        in_turn_among_those_that_have_some_left,
        "[6, 1, 2]: 'THWTTWTTT', yours 'THWTWTTTT'",
        "gives its turn to time, not to the next axis",
    ),
    (lambda section, pairs: axes_of_pairs((12, 10, 10), 32), "the rest is time's"),
    (lambda section, pairs: [7] * pairs, "yours [7, 7, 7"),
    (lambda section, pairs: [], "yours ''"),
]


def hashed(*prefix, of_pixels=np.ndarray.tobytes, digest=lambda data: hashlib.sha256(data).hexdigest()):
    """A hash of the bytes, and of what these functions of the grid make."""

    def content(modality, feature, grid_thw, options):
        text = "".join(str(part(grid_thw)) for part in prefix)
        return digest(text.encode() + of_pixels(feature))

    return content


def salted(modality, feature, grid_thw, options):
    return f"{hash((grid_thw, feature.tobytes())) % 2**64:032x}"


def forgets_the_shape_of_real_pictures(modality, feature, grid_thw, options):
    """Right on the small examples, and wrong for real patches: only the engine finds it."""
    solution = LESSON.folded_solutions()["bytes_alone"]
    return solution(modality, feature, grid_thw if feature.shape[1] < 100 else (), options)


WRONG["m6.content"] = [
    (LESSON.defined("bytes_alone", {"hashlib": hashlib}), "the shape belongs to the content"),
    (hashed(sorted), "the shape belongs to the content"),
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
    (forgets_the_shape_of_real_pictures, "That is an answer about the first"),
]
