"""KV manager: the owner of each piece of KV memory, by number; the tensors are the runner's.

New in m2: a request is admitted only if there is KV memory for it. Here the unit is a slot, a row of the dense cache
with the length of the longest possible request. So every admitted request can run to its end. m3 allocates small
blocks, with the same `reserve` and `release` (a slot is called a block id already), and preempts running requests if
the free blocks are too few. vLLM: `v1/core/kv_cache_manager.py`; SGLang: `mem_cache/memory_pool.py`.
"""

from collections.abc import Mapping


class SlotManager:
    """Allocates one slot per request, for any length. The lowest free slot is allocated first, so that slots in use lie
    together. The runner finds its tensors by the same ids."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int) -> None:
        self.num_slots = max_num_seqs
        self.slot_len = max_model_len
        self._slots: dict[str, int] = {}  # slot of each owner; every other slot is free

    def can_hold(self, request_id: str, num_tokens: int) -> bool:
        """Return whether the request can have room for `num_tokens` tokens in total, its present slot included.

        The scheduler cannot preempt a request. So for a request with a slot this stays True until the request ends, up
        to `max_model_len` tokens.
        """
        return num_tokens <= self.slot_len and (request_id in self._slots or len(self._slots) < self.num_slots)

    def reserve(self, request_id: str, num_tokens: int) -> list[int]:
        """Give the request room for `num_tokens` tokens in total; return the slots that are new to it. `can_hold` must
        be True."""
        if request_id in self._slots:  # a slot never grows: it has its full length from the start
            return []
        taken = set(self._slots.values())
        slot = self._slots[request_id] = next(slot for slot in range(self.num_slots) if slot not in taken)
        return [slot]

    def block_ids(self, request_id: str) -> list[int]:
        """Return all slots of the request, in the order of its tokens."""
        return [self._slots[request_id]]

    def release(self, request_id: str) -> None:
        """Free the slot of the request, if it has one."""
        self._slots.pop(request_id, None)

    def owned(self) -> Mapping[str, list[int]]:
        """Return the slots in use by request id."""
        return {request_id: [slot] for request_id, slot in self._slots.items()}

    def check_invariants(self) -> None:
        """Raise AssertionError if slots and owners contradict each other."""
        taken = list(self._slots.values())
        assert len(taken) == len(set(taken)), f"a slot has two owners: {self._slots}"
        assert all(0 <= slot < self.num_slots for slot in taken), self._slots
