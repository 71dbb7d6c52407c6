"""Token ids as bytes, and their namespace."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from m4_radix_cache.mem_cache.radix_key import RadixKey, decode

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def test_a_token_is_four_bytes_little_endian() -> None:
    assert RadixKey([1, 258]).data == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_an_empty_key_has_no_tokens_and_no_namespace() -> None:
    key = RadixKey()
    assert len(key) == 0 and key.data == b"" and key.extra_key is None


def test_the_namespace_is_kept_as_it_is() -> None:
    assert RadixKey([1], "tenant").extra_key == "tenant" and RadixKey([1], "").extra_key == ""


@given(first=TOKENS, more=TOKENS)
def test_a_key_that_has_grown_equals_one_made_at_once(first: list[int], more: list[int]) -> None:
    key = RadixKey(first)
    key.append(more)
    assert key.data == RadixKey(first + more).data and len(key) == len(first + more)
    assert key.token_ids(0, len(key)) == decode(key.data) == first + more


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_are_encoded_like_lists(dtype: type) -> None:
    tokens = [0, 5, 151_643, 2**31 - 1]
    assert RadixKey(np.array(tokens, dtype=dtype)).data == RadixKey(tokens).data == RadixKey(tuple(tokens)).data


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_what_does_not_fit_four_bytes_is_no_token(token: int) -> None:
    with pytest.raises(OverflowError):
        RadixKey([token])
