"""Typical mistakes in a slot manager, each with the hint that it must get."""

from collections.abc import Mapping

from m2_continuous_batching.kv_manager import SlotManager


class CountsOwners(SlotManager):
    """The number of owners is the next slot."""

    def reserve(self, request_id: str, num_tokens: int) -> list[int]:
        if request_id in self._slots:
            return []
        self._slots[request_id] = len(self._slots)
        return self.block_ids(request_id)


class LastFreed(SlotManager):
    """The slot that became free last is given first."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int) -> None:
        super().__init__(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self._free = list(range(max_num_seqs))[::-1]

    def reserve(self, request_id: str, num_tokens: int) -> list[int]:
        if request_id in self._slots:
            return []
        self._slots[request_id] = self._free.pop()
        return self.block_ids(request_id)

    def release(self, request_id: str) -> None:
        if request_id in self._slots:
            self._free.append(self._slots.pop(request_id))


class NeedsAFreeSlot(SlotManager):
    """A request that has a slot needs another one to go on."""

    def can_hold(self, request_id: str, num_tokens: int) -> bool:
        return num_tokens <= self.slot_len and len(self._slots) < self.num_slots


class RepeatsTheSlot(SlotManager):
    """A request is told its slot at every call."""

    def reserve(self, request_id: str, num_tokens: int) -> list[int]:
        super().reserve(request_id, num_tokens)
        return self.block_ids(request_id)


class OneTokenLess(SlotManager):
    """The last position of a slot is never used."""

    def can_hold(self, request_id: str, num_tokens: int) -> bool:
        return num_tokens < self.slot_len and super().can_hold(request_id, num_tokens)


class AnyLength(SlotManager):
    """A request that has a slot can be of any length."""

    def can_hold(self, request_id: str, num_tokens: int) -> bool:
        return request_id in self._slots or super().can_hold(request_id, num_tokens)


class TakesWhenAsked(SlotManager):
    """A question takes the slot."""

    def can_hold(self, request_id: str, num_tokens: int) -> bool:
        can = super().can_hold(request_id, num_tokens)
        if can:
            super().reserve(request_id, num_tokens)
        return can


class GivesItsLists(SlotManager):
    """The lists of owners are the manager's own."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int) -> None:
        super().__init__(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self._lists: dict[str, list[int]] = {}

    def owned(self) -> Mapping[str, list[int]]:
        self._lists = {name: self._lists.get(name, [slot]) for name, slot in self._slots.items()}
        return self._lists


WRONG = [
    (CountsOwners, "The number of owners is no free slot"),
    (LastFreed, "those in use should lie together"),
    (NeedsAFreeSlot, "Its own slot has room"),
    (RepeatsTheSlot, "Only what is new is returned"),
    (OneTokenLess, "A request of 16 tokens just fits"),
    (AnyLength, "A request of 16 tokens just fits"),
    (TakesWhenAsked, "Only `reserve` gives a slot"),
    (GivesItsLists, "Return new lists"),
]
