"""A scheduled step, which goes on while its requests do: what it computes for each, and for which no more.

The scheduler's batch lives from step to step. A step in flight is a copy of it, as it was at the launch, whose requests
may end meanwhile. vLLM: `SchedulerOutput`; SGLang: the batches in `result_queue` of `event_loop_overlap`.
"""

from dataclasses import dataclass

from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch


class EndedId(str):
    """Id of a request that has ended, in a step that still runs it. It equals no other: a new request may have the same
    text."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


@dataclass(eq=False)
class LaunchedStep:
    """A scheduled step, as it was when it was launched; the living batch goes on."""

    number: int
    batch: ScheduleBatch
    is_expected: bool = False
    """Whether its tokens are counted before it has arrived (`LateResults.expect`)."""

    def num_tokens(self, place: int) -> int:
        """Return the largest number of tokens that a request may get: none for a piece of its prompt."""
        batch = self.batch
        if batch.reqs[place] is batch.chunked_req:
            return 0
        return 1 + len(batch.drafts[place]) if batch.drafts else 1

    def rows(self) -> list[tuple[int, Req, int]]:
        """Return each unfinished request that still has its row: its place in the batch, and its number of tokens with
        KV after the step."""
        ends = self.batch.seq_lens.tolist()
        return [
            (place, req, ends[place])
            for place, req in enumerate(self.batch.reqs)
            if req.req_pool_idx is not None and not req.is_finished
        ]

    def end(self, req: Req) -> bool:
        """Drop what the step computes of a request that has ended; return whether it was in it."""
        if req not in self.batch.reqs:
            return False
        place = self.batch.reqs.index(req)
        self.batch.rids[place] = EndedId(req.rid)  # also in what was launched, which has the same list
        return True
