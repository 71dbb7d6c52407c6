"""Typical mistakes in an eviction heap, each with the hint that it must get."""

from typing import Any

from m4_radix_cache.mem_cache.eviction import EvictionHeap


class KeepsOldEntries(EvictionHeap):
    """An entry that is out of date is returned like any other."""

    def pop(self) -> Any:
        if not self._heap:
            return None
        node = self._heap.pop(0)[2]
        self._heap.sort(key=lambda entry: entry[:2])
        self.discard(node)
        return node


class CountsTwice(EvictionHeap):
    """A discard counts down, whether the node was a candidate or not."""

    def discard(self, node: Any) -> None:
        node.entry = None
        self._num_live -= 1


class NeverCleans(EvictionHeap):
    """Old entries stay for ever."""

    def push(self, node: Any) -> None:
        before = self._num_live
        self._num_live = 10**9
        is_new = node.entry is None
        super().push(node)
        self._num_live = before + is_new


WRONG = [
    (KeepsOldEntries, "out of date: pop() has to pass it over"),
    (CountsTwice, "there is nothing to count down"),
    (NeverCleans, "build the heap anew"),
]
