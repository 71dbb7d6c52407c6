"""Key of the prefix caches: the token ids of a request as bytes, encoded once.

To compare 1,000 token ids in Python one by one takes longer than to schedule them. As bytes the same comparison is one
call into memcmp, a slice is a dictionary key, and a hash function can read it. A namespace goes with the tokens: the
same tokens under another `extra_key` (a tenant's salt, later a LoRA adapter) are another key. SGLang: `RadixKey` in
`mem_cache/radix_cache.py`, a list of ints; vLLM hashes lists of ints block by block, with the salt in the first.
"""

import sys
from array import array
from collections.abc import Sequence

import numpy as np

TOKEN_BYTES = 4
"""Bytes per token id."""


class RadixKey:
    """Token ids of one request in one namespace; it grows with the request's outputs.

    It is neither a sequence nor iterable: a cache takes no list of token ids in its place, and a tokenizer or a model
    takes no key in place of token ids.
    """

    __slots__ = ("data", "extra_key", "page_digests", "rid")

    def __init__(self, token_ids: Sequence[int] = (), extra_key: str | None = None, rid: str | None = None) -> None:
        self.data = _encode(token_ids)
        """The token ids, 4 bytes each, little endian."""
        self.extra_key = extra_key
        """The namespace."""
        self.rid = rid
        """Id of the request, for the trace; None: the key of no request."""
        self.page_digests: dict[int, list[bytes]] = {}
        """By page size, the digests of its first pages that `BlockHashCache` has computed."""

    def __len__(self) -> int:
        return len(self.data) // TOKEN_BYTES

    def __repr__(self) -> str:
        return f"RadixKey({len(self)} tokens, extra_key={self.extra_key!r})"

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens; only these are encoded."""
        self.data += _encode(token_ids)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the token ids from index `start` to `end`, or to the end of the key."""
        return decode(self.data[start * TOKEN_BYTES : end * TOKEN_BYTES])


def decode(data: bytes) -> list[int]:
    """Return the token ids that `data` encodes."""
    ids: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    return ids


def _encode(token_ids: Sequence[int]) -> bytes:
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
