"""Build the KV manager of m2: who owns which slot of the KV cache, by number.

The cache has one slot for each request that may run, as long as the longest request may become. The scheduler knows
nothing of slots: it asks whether there is room for a number of tokens, reserves it, and releases it. The runner knows
nothing of requests that wait: it writes to the slot that it is told. A slot with two owners would be noticed by neither
of them, but only in the answers.

Explained in docs/m2_continuous_batching.md#slotmanager-memory-by-number.

    cp starters/slot_cache.py my_slots.py
    pytest --part slot_cache=my_slots.py:MySlotManager
"""

from collections.abc import Mapping


class MySlotManager:
    """Gives each request one slot, for any number of tokens.

    The lowest free slot goes first: slots in use then lie together, and a decode can read them in place.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int) -> None:
        """Given, but add what you need to know who has which slot. `max_num_seqs` is the number of slots: 0, 1, 2, and
        so on. `max_model_len` is the number of tokens that fit into one."""
        self.num_slots = max_num_seqs
        self.slot_len = max_model_len

    def can_hold(self, request_id: str, num_tokens: int) -> bool:
        """Return whether the request can have room for `num_tokens` tokens in total, those in its slot included. It is
        a question: nothing changes.

        A request with a slot has room for `slot_len` tokens until it is released, whatever others do. One without needs
        a free slot, and has room for as many.
        """
        raise NotImplementedError

    def reserve(self, request_id: str, num_tokens: int) -> list[int]:
        """Give the request room for `num_tokens` tokens in total. Return the slots that are new to it: one in its first
        call, and none later, because a slot has its full length from the start.

        It is called only if `can_hold` is True.
        """
        raise NotImplementedError

    def block_ids(self, request_id: str) -> list[int]:
        """Return the slots that the request has: one. Raises `KeyError` if it has none."""
        raise NotImplementedError

    def release(self, request_id: str) -> None:
        """Free the slot of the request. Does nothing if it has none."""
        raise NotImplementedError

    def owned(self) -> Mapping[str, list[int]]:
        """Return the slots in use by request id.

        The caller may change what this and the other methods return; that must not change an owner.
        """
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Given. Raise AssertionError if slots and owners contradict each other."""
        taken = [slot for slots in self.owned().values() for slot in slots]
        assert len(taken) == len(set(taken)), f"a slot has two owners: {self.owned()}"
        assert all(0 <= slot < self.num_slots for slot in taken), self.owned()
