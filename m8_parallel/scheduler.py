"""m5's scheduler on every rank: the same inputs in the same order, and so the same decisions.

On rank 0 whatever enters the scheduler is also a message: requests, and the ids of those that are to end. A step begins
with one broadcast of the inputs since the step before. What a rank marks while it decides or books a step is no
input, because every rank does it by itself.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from m1_single_request.request import BaseFinishReason
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m5_chunked_prefill_spec.scheduler import Scheduler
from m6_multimodal_pd.disaggregation.runtime.jobs import job_of
from m8_parallel.errors import RanksDifferError
from m8_parallel.messages import Arrival, Cleared, Input, Inputs, Rated, Step, marked, to_bytes
from m8_parallel.ranks import Ranks

MOST_INPUTS = 16
"""Of one message."""


class ParallelScheduler(Scheduler):
    """The scheduler of a rank.

    `add_request`, `finish_requests` and `reset` also send their input to the other ranks, `begin_step` begins a step on
    them, and `schedule` compares decisions every `digest_interval` steps.
    """

    def __init__(self, *, ranks: Ranks, digest_interval: int, **parts: Any) -> None:
        """`digest_interval`: steps between two comparisons. `parts`: as m5's."""
        super().__init__(**parts)
        self.ranks, self.digest_interval = ranks, digest_interval
        self.in_step = False
        """Whether a step has begun. The engine core ends it."""
        self.num_resets = 0
        """How often all requests have ended inside a step."""
        self._inputs: list[Input] = []
        self._rated: dict[str, int | None] = {}  # of one of several outputs: `prompt_logprobs` on the other ranks
        self._num_steps = 0
        self._digest = hashlib.sha256()

    def add_request(self, request: Req) -> None:
        """Queue a request, here and on the other ranks."""
        is_unread = getattr(request, "unread", None) is not None
        self._note(lambda: Arrival(job_of(request), request.parent_id, is_unread))  # type: ignore[arg-type]
        if self.ranks.leads and request.parent_id is not None:
            self._rated[request.rid] = request.sampling_params.prompt_logprobs
        super().add_request(request)

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark unfinished requests to end, here and on the other ranks."""
        ids = list(request_ids)
        self._note(lambda: marked(ids, reason))
        return super().finish_requests(ids, reason)

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests, here and on the other ranks. Inside a step all ranks do so because of the same error."""
        if self.in_step:
            self.num_resets += 1
        elif self.ranks.leads:
            self.ranks.lead(to_bytes(Cleared(marked((), reason).fault)))
        self._inputs.clear()
        super().reset(reason)

    def begin_step(self) -> None:
        """Begin a step on all ranks."""
        if self.ranks.leads:
            self._lead()
        self.in_step = True

    def schedule(self) -> ScheduleBatch | None:
        """Choose the batch of a step. Raises `RanksDifferError` if another rank has chosen another."""
        batch: Any = super().schedule()
        self.compare(batch)
        return batch

    def check_resets(self, number: int) -> None:
        """Raise `RanksDifferError` unless all requests have ended as often here as on rank 0."""
        if number != self.num_resets:
            raise RanksDifferError(
                f"an error in the bookkeeping of a step has ended all requests on rank 0 {number} times, and on rank "
                f"{self.ranks.rank} {self.num_resets} times"
            )

    def _note(self, make: Callable[[], Input]) -> None:
        if self.ranks.leads and not self.in_step:
            self._inputs.append(make())

    def _lead(self) -> None:
        """Begin the step on the other ranks, with the inputs since the step before."""
        for rid, known in list(self._rated.items()):
            req = self.requests.get(rid)
            if req is None:
                del self._rated[rid]
            elif req.sampling_params.prompt_logprobs != known:
                self._rated[rid] = req.sampling_params.prompt_logprobs
                self._inputs.append(Rated(rid, self._rated[rid]))
        inputs, self._inputs = self._inputs, []
        while len(inputs) > MOST_INPUTS:
            self.ranks.lead(to_bytes(Inputs(tuple(inputs[:MOST_INPUTS]))))
            del inputs[:MOST_INPUTS]
        self.ranks.lead(to_bytes(Step(tuple(inputs), self.num_resets)))

    def compare(self, batch: ScheduleBatch | None) -> None:
        """Add a decision to the digest of all; compare it with those of the other ranks from time to time."""
        if self.ranks.size == 1:
            return
        decided = "nothing" if batch is None else ", ".join(map(_decided, batch.reqs))
        self._digest.update(decided.encode())
        self._num_steps += 1
        if self._num_steps % self.digest_interval:
            return
        number = int.from_bytes(self._digest.digest()[:6], "little")
        if self.ranks.smallest(number, -number) == [number, -number]:
            return
        each = self.ranks.compare(f"step {self._num_steps}", decided)
        self.ranks.leads = False
        when = "" if self.digest_interval == 1 else f", or in one of the {self.digest_interval - 1} steps before"
        raise RanksDifferError(
            f"in step {self._num_steps}{when} the ranks have decided differently; their batches of this step: "
            + "; ".join(f"rank {rank} runs {own}" for rank, own in enumerate(each))
        )


def _decided(req: Req) -> str:
    """Return what a step computes of a request, in words."""
    return f"{req.rid} ({req.extend_input_len} tokens of {req.seqlen})"
