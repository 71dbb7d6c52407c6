"""What a request keeps of its pictures: which rows belong to which tokens, positions, and keys that never lie."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from m6_multimodal_pd.multimodal.inputs import Modality, PadValues, content_hash
from tests.m6_multimodal_pd.items import flat, inputs, item, rows_of

VOCAB_SIZE = 4096


# --- rows -------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 30), st.integers(0, 30))
def test_a_range_of_tokens_holds_the_rows_of_its_placeholders(start, length):
    clip = item("v", (3, 7), (10, 12), (20, 25))
    assert flat(clip.rows(start, start + length)) == rows_of(clip, start, start + length)


def test_the_items_of_a_range_are_those_that_it_touches():
    first, second = item("a", (2, 5)), item("b", (8, 12))
    both = inputs(15, first, second)
    assert both.within(0, 2) == [] and both.within(4, 6) == [first] and both.within(4, 9) == [first, second]
    assert [item.num_tokens for item in both.mm_items] == [3, 4]


# --- positions --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 19), st.integers(1, 12))
def test_positions_of_any_range_are_those_of_the_whole(start, length):
    own = inputs(15, item("a", (2, 5)), item("b", (8, 12)))
    whole = own.positions(0, 40)
    assert own.positions(start, start + length).tolist() == whole[:, start : start + length].tolist()


def test_behind_the_prompt_positions_count_up_on_all_axes():
    """What was said before a retraction is prefilled again, at the positions where it was decoded."""
    own = inputs(15, item("a", (2, 12)))
    assert own.mrope_position_delta == 0  # a row of 10 takes 10 positions
    square = inputs(9, item("a", (1, 5)))
    assert square.positions(9, 12).tolist() == [[9 + square.mrope_position_delta + i for i in range(3)]] * 3


# --- keys -------------------------------------------------------------------------------------------------------------


FEATURE = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "other",
    {
        "a value": (Modality.IMAGE, FEATURE + np.eye(4, 6, dtype=np.float32), (1, 2, 2), b"o"),
        "the shape": (Modality.IMAGE, FEATURE.reshape(8, 3), (1, 2, 2), b"o"),
        "the grid": (Modality.IMAGE, FEATURE, (1, 1, 4), b"o"),
        "the type": (Modality.IMAGE, FEATURE.view(np.int32), (1, 2, 2), b"o"),
        "the processor's options": (Modality.IMAGE, FEATURE, (1, 2, 2), b"p"),
        "the modality": (Modality.VIDEO, FEATURE, (1, 2, 2), b"o"),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_another_content_is_another_hash_even_if_the_bytes_are_the_same(other):
    assert content_hash(*other[1]) != content_hash(Modality.IMAGE, FEATURE, (1, 2, 2), b"o")


def test_the_same_content_has_the_same_hash_however_it_lies_in_memory():
    spread = np.empty((4, 12), dtype=np.float32)[:, ::2]
    spread[...] = FEATURE
    assert content_hash(Modality.IMAGE, spread, (1, 2, 2), b"o") == content_hash(
        Modality.IMAGE, FEATURE, (1, 2, 2), b"o"
    )


def pad_values(max_known: int) -> PadValues:
    """Pad values that remember fewer contents."""

    class Forgetful(PadValues):
        pass

    Forgetful.max_known = max_known
    return Forgetful(VOCAB_SIZE)


@given(st.lists(st.sampled_from([f"{i:064x}" for i in range(40)]), max_size=100))
def test_pad_values_are_outside_the_vocabulary_and_no_two_contents_ever_share_one(contents):
    numbers = pad_values(max_known=8)
    owner: dict[int, str] = {}
    for content in contents:
        number = numbers.of(content)
        assert number >= VOCAB_SIZE and owner.setdefault(number, content) == content
        assert numbers.of(content) == number


def test_a_content_that_comes_again_has_its_number_as_long_as_it_is_remembered():
    numbers = pad_values(max_known=2)
    first = numbers.of("a")
    numbers.of("b")
    assert numbers.of("a") == first
    numbers.of("c")  # "b" is forgotten, for it came least recently
    assert numbers.of("a") == first and numbers.of("b") != VOCAB_SIZE + 1
