"""Contract of m6's content hash: what makes two pictures one, for the prefix cache and for the embeddings."""

import builtins
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from m6_multimodal_pd.multimodal.inputs import Modality, MultimodalDataItem, PaddedKey, PadValues
from notebooks.shapes import Shape, picture
from tests.contracts.part import Broken, Part, same
from tests.m4_radix_cache.caches import allocator_of, make_cache
from tests.m6_multimodal_pd.shipped import say

PART = Part(
    name="image_key",
    target="m6_multimodal_pd.multimodal.inputs:content_hash",
    lesson="docs/m6_multimodal_pd.md#multimodalinputs-the-content-of-a-picture-in-the-caches-key",
    starter="my_content_hash",
)

SIDE = 32
"""Pixels of a token: such squares in the same order are the same patches in the same order."""


class Content(NamedTuple):
    """The arguments of a call."""

    modality: Modality
    feature: np.ndarray
    grid: tuple[int, int, int]
    options: bytes

    def __str__(self) -> str:
        feature = f"<{self.feature.dtype} {list(self.feature.shape)}: {self.feature.flat[0]:.4g}, ...>"
        return f"my_content_hash({self.modality.name}, {feature}, {self.grid}, {self.options!r})"


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Random values, as a processor makes them."""
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


FEATURE = numbers(4, 6)
STAR = Content(Modality.IMAGE, FEATURE, (1, 2, 2), b"settings")


def one(part: Any, one_content: Content, another: Content, hint: str, on: str) -> None:
    """Two contents that are one."""
    same(part(*another), part(*one_content), on=on, hint=hint)


def two(part: Any, one_content: Content, another: Content, hint: str) -> None:
    """Two contents that are two."""
    first, second = part(*one_content), part(*another)
    if first == second:
        raise Broken(f"{one_content} and {another}", "two hashes", "one hash", hint)


def test_it_is_a_sha256_in_hex(part: Any) -> None:
    """A content hash is a text of 64 hex digits."""
    hint = "Use `hashlib`: its `hexdigest()` is a text. Fewer digits would be shared by two of many pictures."
    found = part(*STAR)
    is_right = isinstance(found, str) and re.fullmatch("[0-9a-f]{64}", found) is not None
    same(found if not is_right else "64 hex digits", "64 hex digits", on=str(STAR), hint=hint)


def test_another_value_is_another_content(part: Any) -> None:
    """A picture that differs in one value has another hash, however large it is."""
    changed = FEATURE.copy()
    changed[3, 5] = 0
    two(part, STAR, STAR._replace(feature=changed), "All values of the feature belong to the content.")
    large = numbers(100, 100)
    other = large.copy()
    other[50, 50] = 0
    hint = "numpy writes a large array as text with '...' in its middle. Hash its bytes."
    whole = STAR._replace(feature=large, grid=(1, 10, 10))
    two(part, whole, whole._replace(feature=other), hint)


def test_the_same_picture_has_the_same_hash(part: Any) -> None:
    """A picture that comes again has the hash that it had before."""
    on = f"{STAR}, and the same with a copy of the feature"
    hint = "Values belong to the content, not the object that holds them."
    one(part, STAR, STAR._replace(feature=FEATURE.copy()), hint, on)


def test_the_same_values_in_another_shape_are_another_content(part: Any) -> None:
    """The same bytes as another grid of patches, or as another number of rows, have another hash."""
    hint = "The same values in another shape are another picture: 3 x 4 patches are not 4 x 3."
    wide = STAR._replace(feature=numbers(12, 6), grid=(1, 3, 4))
    two(part, wide, wide._replace(grid=(1, 4, 3)), hint)
    two(part, wide, wide._replace(grid=(3, 2, 2)), hint)
    hint = "The feature has a shape besides its bytes: 4 rows of 6 are not 8 rows of 3."
    two(part, STAR, STAR._replace(feature=FEATURE.reshape(8, 3)), hint)


def test_the_type_of_the_values_belongs_to_it(part: Any) -> None:
    """The same bytes as values of another type have another hash."""
    hint = "Bytes alone have no meaning: `feature.dtype` says which values they are."
    two(part, STAR, STAR._replace(feature=FEATURE.view(np.int32)), hint)


def test_a_video_is_no_image(part: Any) -> None:
    """An image and a video with the same feature have two hashes."""
    hint = "The kind of the item belongs to the content: the prompt of a video has other tokens between its layers."
    two(part, STAR, STAR._replace(modality=Modality.VIDEO), hint)


def test_the_settings_of_the_processor_belong_to_it(part: Any) -> None:
    """The same feature, made with other settings of the processor, has another hash."""
    hint = "`options` belongs to the content."
    two(part, STAR, STAR._replace(options=b"other settings"), hint)
    two(part, STAR, STAR._replace(options=b""), hint)


def test_numbers_do_not_run_into_each_other(part: Any) -> None:
    """Different grids have different hashes, also if their digits are the same, or their numbers are large."""
    hint = "Written one after the other, 1, 12, 2 and 11, 2, 2 are both 1122. Something must stand between them."
    base = STAR._replace(feature=numbers(44, 1), options=b"")
    two(part, base._replace(grid=(1, 12, 2)), base._replace(grid=(11, 2, 2)), hint)
    two(part, base._replace(grid=(1, 1, 22)), base._replace(grid=(1, 12, 2)), hint)
    hint = "A side may have more than 255 patches: a byte is too small for it."
    two(part, base._replace(grid=(1, 2, 514)), base._replace(grid=(1, 514, 2)), hint)
    two(part, base._replace(grid=(1, 2, 2)), base._replace(grid=(1, 258, 2)), hint)
    hint = "`options` may have any length: where it ends must be visible."
    flat = numbers(1, 8)
    first, rest = flat[:, :4], flat[:, 4:]
    joined = STAR._replace(feature=rest, options=b"x" + first.tobytes())
    two(part, joined, STAR._replace(feature=flat, options=b"x"), hint)


def test_it_does_not_matter_how_the_values_lie_in_memory(part: Any) -> None:
    """A feature that is a view of other memory has the hash of its values, read row by row."""
    spread = np.zeros((4, 12), dtype=np.float32)
    spread[:, ::2] = FEATURE
    columns = np.asfortranarray(FEATURE)
    reverse = np.ascontiguousarray(FEATURE[::-1])[::-1]
    for feature, name in ((spread[:, ::2], "every second column"), (columns, "column by column"), (reverse, "reverse")):
        hint = "The same values may lie in memory in other ways. Make them lie side by side, row by row, first."
        on = f"{STAR}, and the same with its feature in memory as {name}"
        one(part, STAR, STAR._replace(feature=feature), hint, on)
    square = numbers(4, 4)
    hint = "A transposed array may have the same bytes in memory; its values, row by row, are others."
    two(part, STAR._replace(feature=square), STAR._replace(feature=square.T), hint)


def test_it_reads_and_does_not_write(part: Any) -> None:
    """The feature may be read-only, and has its values afterwards."""
    feature = FEATURE.copy()
    feature.flags.writeable = False
    content = STAR._replace(feature=feature)
    on = f"{STAR}, and the same with a read-only feature"
    one(part, STAR, content, "", on)
    same(feature, FEATURE, on=f"the feature after {STAR}", hint="The tower still needs the values.")


@contextmanager
def another_process() -> Iterator[None]:
    """Let Python's `hash` be salted in another way, as in another process."""
    salted = builtins.hash
    with patch("builtins.hash", lambda value: salted((value, "another process"))):
        yield


def test_another_process_finds_the_same_hash(part: Any) -> None:
    """The hash is the same in every process: one reads the picture, another one has its embeddings."""
    here = part(*STAR)
    with another_process():
        there = part(*STAR)
    hint = "Python's own `hash` of a text or of bytes is another one in each process."
    same(there, here, on=f"{STAR}, and again in another process", hint=hint)


def test_two_pictures_share_the_text_before_them(part: Any) -> None:
    """In the prefix cache, prompts with two pictures share the text before them; those with one picture share all."""
    numbering, cache = PadValues(4096), make_cache()
    wide = STAR._replace(feature=numbers(12, 6), grid=(1, 3, 4))

    def key(content: Content) -> PaddedKey:
        """The key of three tokens, the picture's three placeholders, and two tokens."""
        modality, feature, grid, _ = content
        found = part(*content)
        item = MultimodalDataItem(modality, ((3, 6),), feature, grid, found, (4, 4), pad_value=numbering.of(found))
        return PaddedKey([1, 2, 3, 9, 9, 9, 5, 6], None, [item])

    cache.insert(key(wide), allocator_of(cache).alloc(8))
    asked = {
        "the same again": wide,
        "as 4 x 3 patches": wide._replace(grid=(1, 4, 3)),
        "as a video": wide._replace(modality=Modality.VIDEO),
    }
    found = {name: len(cache.match_prefix(key(content)).device_indices) for name, content in asked.items()}
    wanted = {"the same again": 8, "as 4 x 3 patches": 3, "as a video": 3}
    hint = "The keys of two contents must differ from their first placeholder on, and those of one must not."
    on = "3 tokens, a picture of 3 x 4 patches in 3 tokens, 2 tokens: how many of these 8 does the next prompt find?"
    same(found, wanted, on=on, hint=hint)


def drawn(rng: Random) -> Content:
    """A content of a small set, so that the same one comes again."""
    rows = rng.choice([4, 6, 12])
    feature = numbers(12, 2, seed=rng.randrange(2)).reshape(rows, -1)
    feature = rng.choice([feature, np.asfortranarray(feature), feature.view(np.int32)])
    grid = rng.choice([(1, 1, 12), (1, 11, 2), (11, 1, 2), (1, 112, 2)])
    return Content(rng.choice(list(Modality)), feature, grid, rng.choice([b"", b"1", b"11"]))


def test_it_is_right_for_any_contents(part: Any) -> None:
    """Of any contents, two have the same hash if and only if everything about them is the same."""
    rng = Random(1)
    hashes: dict[Any, str] = {}
    owners: dict[str, tuple[Any, Content]] = {}
    for number in range(300):
        content = drawn(rng)
        feature = content.feature
        what = (content.modality, feature.dtype.name, feature.shape, feature.tobytes(), content.grid, content.options)
        found = part(*content)
        hint = "The same content has come before, with another hash."
        same(found, hashes.setdefault(what, found), on=f"call {number}, which was there before: {content}", hint=hint)
        owner, first = owners.setdefault(found, (what, content))
        if owner != what:
            raise Broken(f"{first} and {content}", "two hashes", "one hash", "Compare them argument by argument.")


def of_squares(squares: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """A picture of these squares, row by row."""
    rows = [np.concatenate(squares[at : at + columns], axis=1) for at in range(0, len(squares), columns)]
    return np.concatenate(rows)


def test_the_model_sees_the_second_picture(part: Any) -> None:
    """An engine that is shown two pictures of the same squares in another shape answers about each of them."""
    ground = np.array(picture())[:SIDE, :SIDE]
    star = np.array(picture(Shape("small", "red", "star")))[SIDE : 2 * SIDE, SIDE : 2 * SIDE]
    squares = [ground] * 12
    squares[3] = star
    question = "Where is the red star?"
    first = say(of_squares(squares, 4), question)
    second = say(of_squares(squares, 3), question, forget=False)
    hint = "The engine has found what it computed for the picture before."
    on = f"3 rows of 4 squares, the fourth with a star; then 4 rows of 3, also the fourth: {question}"
    same([first, second], ["At the top right.", "At the left."], on=on, hint=hint)
