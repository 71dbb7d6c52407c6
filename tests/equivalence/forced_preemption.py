"""A scheduler for m3 that takes a running request's blocks away in every third step, whether there is need or not.

Each time it is another one's turn, so that sooner or later each is hit, in every state.
"""

from typing import Any

from m3_paged_attention.preemption import preempt
from m3_paged_attention.request import Request
from m3_paged_attention.scheduler import Scheduler


class ForcedPreemption(Scheduler):
    """m3's, in less memory than it seems to have."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.num_steps = 0

    def _make_room(self, running: list[Request]) -> dict[str, int]:
        in_need = super()._make_room(running)
        self.num_steps += 1
        if self.num_steps % 3 or not running:
            return in_need
        victim = running.pop(self.num_steps // 3 % len(running))
        preempt(victim, self.kv_manager, swap=self.swaps, needed=0, tracer=self.tracer)
        self._send_back(victim)
        self.num_preemptions += 1
        return self._in_need(running)
