"""Notes that the ranks of a job leave for each other in its store, and the waits for them.

A wait for a note is no collective: it may last for minutes, while another rank loads or thinks, and ends at once where
a rank is lost. `torch.distributed` has the store, a small table of keys and values. vLLM: `StatelessProcessGroup`.
"""

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from m8_parallel.errors import RankLostError

T = TypeVar("T")
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.02
"""Between two looks for a note."""


class Notes:
    """The notes of a rank."""

    def __init__(self, rank: int, size: int, store: Any, watch: Any, long_timeout_s: float) -> None:
        """`store`: `torch.distributed.Store`. `watch`: heartbeats of the ranks. `long_timeout_s`: of a `meet`."""
        self.rank, self.size, self.store, self.watch = rank, size, store, watch
        self.long_timeout_s = long_timeout_s
        self.leads = False
        """Whether this rank has the user, and others to tell what comes in."""
        self.num_groups = 0
        """Number of groups that have been formed."""
        self._meetings = 0

    @property
    def is_lost(self) -> bool:
        """Whether another rank is lost, and the job with it."""
        return self.watch is not None and self.watch.lost is not None

    def meet(self) -> None:
        """Wait until all ranks are here: for what one may take much longer to reach than a collective waits."""
        if self.size == 1:
            return
        self._meetings += 1
        self._note(lambda: self.store.add("meetings", 1))
        self._wait(lambda: self.store.add("meetings", 0) >= self._meetings * self.size, self.long_timeout_s)

    def compare(self, name: str, decided: str) -> list[str]:
        """Return the texts `decided` of all ranks, by rank. Every rank calls this."""
        key = f"{name} {self._meetings}"
        self._note(lambda: self.store.set(f"{key} {self.rank}", decided))
        self.meet()
        return [self._read(f"{key} {rank}").decode() for rank in range(self.size)]

    def _note_end(self, why: str) -> None:
        """Let the others find that this rank leaves the group; `why` is empty if the next one is formed."""
        key = f"left {self.num_groups}"
        if not self.store.check([key]):
            self.store.set(key, why)

    def _why_left(self) -> str | None:
        """Return why another rank has left the group; None if none has."""
        key = f"left {self.num_groups}"
        return self._read(key).decode() if self._note(lambda: self.store.check([key])) else None

    def _wait(self, is_there: Callable[[], bool], limit_s: float = math.inf) -> None:
        """Wait for a note of others, in short looks."""
        pause, end = SHORTEST_PAUSE_S, time.monotonic() + limit_s
        while not self._note(is_there):
            self.check()
            if self.watch.closed and not self._note(is_there):
                raise self._lost(f"rank {self.watch.closed[0]} has closed its engine")
            if time.monotonic() > end:
                raise self._lost(f"the other ranks did not arrive within {limit_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _read(self, key: str) -> bytes:
        note: bytes = self._note(lambda: self.store.get(key))
        return note

    def _note(self, call: Callable[[], T]) -> T:
        """Use the store. Raises `RankLostError` if it is gone."""
        try:
            return call()
        except dist.DistError as error:
            raise self._lost(f"the store of the job: {error}") from error

    def _lost(self, why: str) -> RankLostError:
        """Return the error that another rank is lost."""
        self.leads = False
        self.watch.lost = self.watch.lost or f"rank {self.rank} cannot continue: {why}"
        self.watch.is_raised = True
        return RankLostError(self.watch.lost)

    def check(self) -> None:
        """Raise `RankLostError` if another rank is lost, or has left the job."""
        if self.size == 1:
            return
        if self.is_lost:
            raise self._lost(self.watch.lost)
        if why := self._why_left():
            raise self._lost(why)
