"""m6's engine core on a rank. Rank 0 has the user; the other ranks receive its inputs and run the same steps."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast, get_args

import msgspec

from m1_single_request.errors import EngineDeadError, EngineError
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import Request
from m4_radix_cache.llm_engine import Tier
from m6_multimodal_pd.disaggregation.runtime.jobs import resume
from m6_multimodal_pd.engine_core import EngineCore
from m6_multimodal_pd.input_processor import InputProcessor
from m6_multimodal_pd.multimodal.prompt import ChatPrompt
from m6_multimodal_pd.request import Req
from m8_parallel.errors import RanksDifferError
from m8_parallel.messages import (
    Arrival,
    Call,
    Cleared,
    Input,
    Inputs,
    Marked,
    Rated,
    Step,
    from_bytes,
    reason_of,
    to_bytes,
)
from m8_parallel.outputs import EngineStats, RankStats
from m8_parallel.ranks import Ranks
from m8_parallel.scheduler import ParallelScheduler
from m8_parallel.step_profiler import RanksProfiler
from m8_parallel.trace import RanksTraceReader


class ParallelEngineCore(EngineCore):
    """The engine core of a rank. `run_step`, `abort_request`, `flush_cache`, `update_weights`, `stats` and `close`
    happen on all ranks; `follow` is what a rank does that has no user. A rank that is dead (`_judged`), or whose call
    was interrupted (`changing`), leaves the job. `step` begins on all ranks; what rank 0 alone finds in it, because it
    makes the outputs (`_make_outputs`, `_fail`), is an input of the next one."""

    scheduler: ParallelScheduler

    def __init__(self, *, parts: Mapping[str, Any], **others: Any) -> None:
        """As m6's. `parts`: some are given ranks (`partial`); an error names the class."""
        super().__init__(parts={role: getattr(part, "func", part) for role, part in parts.items()}, **others)
        self.profiler = RanksProfiler(self.ranks, self._tell, self.changing)
        self.trace_readers: list[RanksTraceReader] = []
        """Of the Chrome trace of all ranks."""
        self.has_ended = False
        """Whether this rank has left the job, or tries to."""
        self._late: list[Callable[[], object]] = []
        """What this rank alone marks inside a step. It is done when the step ends, as an input of the next one."""
        self._is_making_outputs = False

    @property
    def ranks(self) -> Ranks:
        return self.scheduler.ranks

    def flush_cache(self, tier: str | None = None) -> bool:
        """Empty the prefix cache of all ranks, as in m4."""
        if tier is None or tier not in get_args(Tier) or self.has_unfinished_requests():
            return super().flush_cache(tier)  # None: `reset` sends it to the others
        with self.changing(), self._told("flush_cache", tier):
            return self._flush_tier(tier)

    def _flush_tier(self, tier: str) -> bool:
        flush = super().flush_cache
        try:
            return self.ranks.agreed(lambda: flush(tier))
        except EngineDeadError as error:
            self.dead = error
            raise

    def abort_request(self, request_id: str) -> bool:
        """Mark a request to end, as in m1; inside a step that is done when it ends."""
        if not self.scheduler.in_step:
            return super().abort_request(request_id)
        self._late.append(partial(super().abort_request, request_id))  # by a trace reader
        return self.is_unfinished(request_id)

    def _make_outputs(self, changed: Iterable[Request]) -> dict[str, RequestOutput]:
        self._is_making_outputs = True
        try:
            return super()._make_outputs(changed)
        finally:
            self._is_making_outputs = False

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        """Mark requests as in m1. Other ranks make no outputs before a request ends, so they cannot fail there."""
        fail = partial(super()._fail, request_ids, error)
        if self._is_making_outputs:
            self._late.append(fail)
        else:
            fail()

    def step(self) -> dict[str, RequestOutput]:
        """Begin a step on all ranks, and compute it as in m6."""
        self.scheduler.begin_step()
        return super().step()

    def run_step(self) -> dict[str, RequestOutput]:
        """Run one step on all ranks, as in m6."""
        try:
            return super().run_step()
        finally:
            self.scheduler.in_step = False
            late, self._late = self._late, []
            for mark in late:
                mark()

    def update_weights(self, model: str) -> None:
        """Exchange the weights of all ranks, as in m6."""
        if self.has_unfinished_requests():
            return super().update_weights(model)  # which refuses it
        with self.changing(), self._told("update_weights", model):
            super().update_weights(model)

    def stats(self) -> EngineStats:
        """Return m6's totals, and those of each rank."""
        own = vars(super().stats())
        if not self.ranks.leads or self.is_changing or self.dead is not None:
            return EngineStats(**own)
        with self.changing():
            self._tell("stats")
            return EngineStats(**own, ranks=self._stats_of_ranks())

    @contextmanager
    def changing(self) -> Iterator[None]:
        """As in m1. After an interrupt in the block this rank leaves the job: the others may be in the middle of it."""
        with super().changing():
            try:
                yield
            except Exception:
                raise
            except BaseException as interrupt:
                self.ranks.leave(f"it was stopped by {type(interrupt).__name__}")
                raise

    def _judged(self, error: Exception) -> Exception:
        """As in m1. A rank with a dead engine leaves the job."""
        error = super()._judged(error)
        if self.dead is not None:
            self.ranks.leave(str(self.dead))
        return error

    def close(self) -> None:
        """Close this rank's engine, and let the others close theirs."""
        try:
            self._tell("close")
        finally:
            self.end()

    def follow(self) -> None:
        """Receive and execute the messages of rank 0 until it closes its engine."""
        while True:
            message = from_bytes(self.ranks.follow())
            match message:
                case Step():
                    self._enter(message.inputs)
                    self.scheduler.check_resets(message.num_resets)
                    self.run_step()
                    if self.dead is not None:
                        raise self.dead
                case Inputs():
                    self._enter(message.inputs)
                case Cleared():
                    self._forget_all(reason_of(message.fault))
                    self._open.clear()
                case Call(verb="close"):
                    return
                case Call():
                    self._execute_call(message)

    def _execute_call(self, call: Call) -> None:
        """Execute a verb of the face. Its error is that of rank 0, too, which has the user."""
        try:
            match call.verb:
                case "flush_cache":
                    self._flush_tier(call.argument)
                case "update_weights":
                    super().update_weights(call.argument)
                case "stats":
                    self._stats_of_ranks()
                case "start_profile":
                    self.profiler.start(call.argument)
                case "stop_profile":
                    self.profiler.stop()
        except Exception:
            if self.dead is not None or self.ranks.is_lost:
                raise

    def _stats_of_ranks(self) -> tuple[RankStats, ...]:
        """Return the totals of all ranks, on rank 0. Every rank calls this."""
        ranks, worker = self.ranks, self.executor.worker
        own = RankStats(
            rank=ranks.rank,
            weight_bytes=worker.model_runner.weight_bytes,
            kv_bytes=worker.model_runner.kv.blocks.nbytes,
            num_collectives=ranks.record.num_collectives,
            collective_bytes=ranks.record.num_bytes,
            collective_seconds=ranks.record.seconds,
        )
        found = ranks.gather_bytes(msgspec.msgpack.encode(own))
        return tuple(msgspec.msgpack.decode(part, type=RankStats) for part in found)

    def end(self) -> None:
        """Close this rank's engine, and leave the job."""
        if self.has_ended:
            return
        self.has_ended, self.ranks.leads = True, False  # no message is sent any more
        try:
            if self.dead is None and not self.ranks.is_lost:
                for reader in self.trace_readers:
                    reader.collect(self.ranks)
        finally:
            try:
                super().close()
            finally:
                self.ranks.close()

    def _enter(self, inputs: Sequence[Input]) -> None:
        for each in inputs:
            match each:
                case Arrival():
                    self.scheduler.add_request(self._request_of(each))
                case Marked():
                    self.scheduler.finish_requests(each.rids, reason_of(each.fault))
                case Rated() if each.rid in self.scheduler.requests:
                    req: Any = self.scheduler.requests[each.rid]
                    req.sampling_params = replace(req.sampling_params, prompt_logprobs=each.num_best)

    def _request_of(self, arrival: Arrival) -> Req:
        """Return a request, which rank 0 has accepted."""
        job, intake = arrival.job, cast(InputProcessor, self.input_processor)
        process: Any = intake.process_request
        if arrival.is_unread:  # there are no images for the placeholders of its prompt
            process = super(InputProcessor, intake).process_request
        try:
            req: Any = process(
                job.rid,
                ChatPrompt(job.prompt_token_ids, job.media),
                job.params,
                number=0,
                arrival_time=time.monotonic(),
                priority=job.priority,
                cache_salt=job.cache_salt,
                speculate=job.speculate,
            )
        except EngineError as error:
            raise RanksDifferError(
                f"rank {self.ranks.rank} has rejected request {job.rid!r}, which rank 0 has accepted: {error}"
            ) from error
        req.seed, req.parent_id, req.final_only = job.seed, arrival.parent_id, True
        resume(req, job.output_token_ids)
        return req

    @contextmanager
    def _told(self, verb: str, argument: str) -> Iterator[None]:
        """Send a verb to the other ranks. In the block no other message is sent: they execute it and do not receive."""
        self._tell(verb, argument)
        leads, self.ranks.leads = self.ranks.leads, False
        try:
            yield
        finally:
            self.ranks.leads = leads and not self.ranks.is_lost and self.dead is None

    def _tell(self, verb: str, argument: str = "") -> None:
        if self.ranks.leads:
            self.ranks.lead(to_bytes(Call(verb, argument)))
