"""A cache key with images and a list of token ids are not taken for each other."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, strategies as st
from transformers import AutoTokenizer

from m1_single_request import SamplingParams
from m4_radix_cache.mem_cache.radix_key import RadixKey, decode
from m5_chunked_prefill_spec.speculative.proposer import NgramProposer
from m6_multimodal_pd.config import DEFAULT_MODEL
from m6_multimodal_pd.multimodal.inputs import MultimodalDataItem, PaddedKey
from m6_multimodal_pd.request import Req
from tests.m6_multimodal_pd.items import inputs, item
from tests.testbed.fakes import make_request

PLACEHOLDER = 9
PROMPT = [1, 2, 9, 9, 9, 3, 1, 9, 9, 2, 1]
ITEMS = (item("a", (2, 5), pad_value=7001), item("b", (7, 9), pad_value=7002))


def make_req(prompt: Sequence[int] = PROMPT, *items: MultimodalDataItem) -> Req:
    """A request with these images, or with two."""
    req = make_request("r", prompt, SamplingParams(), request_class=Req)
    assert isinstance(req, Req)
    req.multimodal_inputs = inputs(len(prompt), *(items or ITEMS))
    return req


def test_the_key_of_a_request_has_pad_values_and_grows_with_its_outputs() -> None:
    req = make_req()
    assert isinstance(req.key, PaddedKey)
    req.output_ids.extend([5, 6])
    assert decode(req.key.data) == [1, 2, 7001, 7001, 7001, 3, 1, 7002, 7002, 2, 1, 5, 6]
    assert req.origin_input_ids == PROMPT, "the model reads placeholders"


def test_a_request_without_images_has_m4s_key() -> None:
    req = make_request("r", PROMPT, SamplingParams(), request_class=Req)
    assert isinstance(req, Req) and type(req.key) is RadixKey
    assert req.key.token_ids(0, len(PROMPT)) == PROMPT


def test_a_key_is_no_token_ids() -> None:
    key = make_req().key
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    assert not isinstance(key, Iterable)
    for misuse in (lambda: list(key), lambda: RadixKey(key), lambda: PROMPT + key, lambda: tokenizer.decode(key)):  # type: ignore[call-overload,arg-type,operator]
        with pytest.raises(TypeError):
            misuse()


@given(st.integers(0, 14), st.integers(0, 14))
def test_token_ids_of_a_key_end_before_an_image(start: int, end: int) -> None:
    req = make_req()
    req.output_ids.extend([5, 6])
    tokens, expected = req.origin_input_ids + req.output_ids, []
    for place in range(start, min(end, len(tokens))):
        if any(first <= place < stop for own in ITEMS for first, stop in own.offsets):
            break
        expected.append(tokens[place])
    found = req.key.token_ids(start, end)
    assert found == expected and not {PLACEHOLDER, 7001, 7002} & set(found)


@pytest.mark.parametrize(
    ("prompt", "images", "expected"),
    [
        ([1, 2, 3, 8, 9, 9, 8, 4, 1, 2], (4, 6), [3, 8]),  # up to the image
        ([1, 2, 9, 9, 3, 1, 2], (2, 4), []),  # it comes at once
        ([9, 9, 1, 2, 3, 4, 5, 1, 2], (0, 2), [3, 4, 5, 1]),  # it stands before
        ([1, 2, 9, 1, 2, 3, 1, 2], (2, 3), []),  # the first place counts here, too
    ],
)
def test_a_draft_ends_before_an_image(prompt: list[int], images: tuple[int, int], expected: list[int]) -> None:
    req = make_req(prompt[:-1], item("a", images, pad_value=4096))
    req.output_ids.append(prompt[-1])
    assert NgramProposer(prompt_lookup_min=1, prompt_lookup_max=2).propose([req], [4]) == [expected]
