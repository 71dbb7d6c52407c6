"""Engine core of a group: intake, the router, and outputs. The engines of the group compute.

A step receives the messages of the engines and makes outputs of them. Requests are checked here, by the input processor
of a single engine, and their tokens become text here. SGLang: `TokenizerManager` and `DetokenizerManager` in front of a
router.
"""

import math
import time
import weakref
from collections.abc import Mapping
from itertools import count
from typing import Any

from m1_single_request.engine_core import EngineCoreBase
from m1_single_request.errors import ConfigError, EngineDeadError, EngineUsageError, is_unicode, shown
from m1_single_request.outputs import EngineStats as SingleRequestStats, RequestOutput
from m6_multimodal_pd.disaggregation.members import Member
from m6_multimodal_pd.disaggregation.router import ON_JOINING, Router
from m6_multimodal_pd.disaggregation.runtime.jobs import LONGEST_TEXT
from m6_multimodal_pd.disaggregation.runtime.messages import WITHOUT_LIMIT, Call, Joined
from m6_multimodal_pd.errors import EngineLostError
from m6_multimodal_pd.multimodal.media_intake import LONGEST_WAIT_S, MediaIntake
from m6_multimodal_pd.outputs import EngineStats
from m6_multimodal_pd.step_profiler import StepProfiler
from m6_multimodal_pd.weight_loader import check_loader

CALL_TIMEOUT_S = 60.0
"""Seconds until an engine must have answered a call. Loading weights has no limit."""
STATS_TIMEOUT_S = 1.0
"""Seconds to wait for totals; of an engine in a longer step, its latest ones count."""
COUNTED_HERE = {"num_waiting", "num_running", "num_finished", "num_output_tokens", "max_model_len"}
"""Fields of `EngineStats` that are not sums over the engines: a request is on two of them."""


class RouterCore(EngineCoreBase):
    """Runs the steps of a group of engines. `run_step` first queues the requests whose images were read. `close` also
    ends the engines, and the processes that read images; `stats` adds up their totals, and counts requests once."""

    kv_bytes_per_token = 0

    def __init__(
        self, *, input_processor: Any, router: Router, output_processor: Any, parts: Mapping[str, Any], model: str
    ) -> None:
        """`model`: that the engines have loaded."""
        self.router, self.model = router, model
        self.families = MediaIntake(scheduler=router, tracer=router.tracer, input_processor=input_processor)
        super().__init__(input_processor, router, output_processor, parts, router.tracer)
        self._intake = self.families
        self.profiler = StepProfiler()  # of this process
        if router.config.transport != "in_process":
            self.profiler = GroupProfiler(weakref.proxy(self))  # without a cycle a group ends with its last user
        self._numbers = count(ON_JOINING + 1)

    def run_step(self) -> dict[str, RequestOutput]:
        """Queue the requests whose images were read, and run one step. While all requests wait for images there is no
        step."""
        is_reading = self.families.reading and self.dead is None
        return {} if is_reading and not self.families.begin_step(self.add_request) else super().run_step()

    def step(self) -> dict[str, RequestOutput]:
        """Receive the messages of the engines, for 50 ms at most; return the output of every request that changed."""
        changed = self.router.update(LONGEST_WAIT_S)
        self._record.lap("execute")
        return self._make_outputs(self.families.reported(changed))

    def clear_kv_caches(self) -> None:
        """Do nothing: an engine frees the KV of a request when its room is cancelled."""

    def num_kv_tokens(self) -> int:
        """Return 0: the engines count their KV."""
        return 0

    def close(self) -> None:
        """Stop a profile that is being recorded, and end all engines."""
        self.profiler.drop()
        try:
            self.router.links.close()
        finally:  # a second Ctrl-C may stop it: no message goes out any more
            self.router.members.clear()
            self.families.close()
        super().close()

    def stats(self) -> SingleRequestStats:
        """Return the totals of the engines that are members, the latest known ones for an engine in a long step.

        Requests and output tokens are counted here. Everything else that a lost engine has counted is lost with it, so
        these totals can fall.
        """
        self._call("stats", "", STATS_TIMEOUT_S)
        members, own = self.router.members.values(), vars(super().stats())
        own = own | {"num_waiting": own["num_waiting"] + len(self.families.reading)}
        of_engines = [m.result_of("stats") if "stats" in m.answers else stats_of_idle(m.joined) for m in members]
        if self.router.config.both:  # of the requests that engines have, some wait there
            running = min(sum(stats.get("num_running", 0) for stats in of_engines), own["num_running"])
            own |= {"num_running": running, "num_waiting": own["num_waiting"] + own["num_running"] - running}
        summed = EngineStats.__dataclass_fields__.keys() - COUNTED_HERE
        totals = {name: sum(stats.get(name, 0) for stats in of_engines) for name in summed}
        totals["disk_bytes"] = max((stats.get("disk_bytes", 0) for stats in of_engines), default=0)  # one directory
        return EngineStats(**{**own, **totals})

    def flush_cache(self, tier: str | None = None) -> bool:
        """Clear the caches of all engines, or this tier of them. False, and nothing is cleared, while requests are
        unfinished.

        An engine that has not processed the end of its last request yet is called again.
        """
        if self.has_unfinished_requests():
            return False
        if tier is not None and not (isinstance(tier, str) and tier):
            raise ConfigError(f"flush_cache: tier={shown(tier)} is not configured: give the name of a tier, or none")
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while not all(self.call_all("flush_cache", tier or "").values()):
            if time.monotonic() > deadline:
                raise EngineLostError(f"not all engines are done with their requests within {CALL_TIMEOUT_S:g} s")
        return True

    def update_weights(self, model: str) -> None:
        """Check on all engines that other weights fit, and load them; if one engine fails then, load the previous ones
        again.

        Raises `EngineUsageError` while requests are unfinished, and the error of an engine: one of the check changes
        nothing. An engine that cannot load the previous weights again is lost.
        """
        if self.has_unfinished_requests():
            raise EngineUsageError("weights are exchanged between requests, and some are unfinished")
        check_loader(self._parts)
        self.call_all("check_weights", model)
        previous = self.router.weights
        try:
            self.router.weights = model
            self.call_all("update_weights", model)
        except BaseException as error:  # Ctrl-C, for example
            self.router.weights = previous
            self._restore_weights(previous or self.model)
            if isinstance(error, EngineDeadError):  # one engine, not the group
                raise EngineLostError(str(error)) from error
            raise

    def _restore_weights(self, model: str) -> None:
        """Load the weights of `model` on all engines; drop those that cannot, and all of them if it is interrupted."""
        failed = list(self.router.members.values())
        try:
            asked = [member for member, _ in self._call("update_weights", model, math.inf) if not member.is_lost]
            failed = [member for member in asked if member.answers["update_weights"].fault is not None]
        finally:
            with self.changing():
                for member in failed:
                    self.router.lose(member.name, f"it has not loaded {shown(model)} again")

    def call_all(self, verb: Any, argument: str = "") -> dict[str, Any]:
        """Call all engines; return their results by name, without the engines that were lost meanwhile.

        Raises the first error that an engine reports; `EngineLostError` if an engine does not answer in time or was
        lost while it loaded weights, or if none is left that could answer.
        """
        asked = self._call(verb, argument, math.inf if verb in WITHOUT_LIMIT else CALL_TIMEOUT_S)
        results = {}
        for member, has_answered in asked:
            if has_answered:
                results[member.name] = member.result_of(verb)
            elif not member.is_lost:
                raise EngineLostError(f"engine {member.name!r} does not answer {verb} within {CALL_TIMEOUT_S:g} s")
            elif verb in WITHOUT_LIMIT:  # the weights may be the cause
                raise EngineLostError(f"engine {member.name!r} was lost while it loaded {shown(argument)}")
        if not results and verb != "flush_cache":
            cause = "all engines were lost before they answered" if asked else "there is no engine left"
            raise EngineLostError(f"{verb}: {cause}")
        return results

    def _call(self, verb: Any, argument: str, timeout_s: float) -> list[tuple[Member, bool]]:
        """Call all engines, and listen until they have answered or are lost, for `timeout_s` at most.

        Returns the engines that have received the call, and whether each has answered.
        """
        if len(argument) > LONGEST_TEXT or not is_unicode(argument):
            raise ConfigError(f"{verb}: {shown(argument)} must be valid text of at most {LONGEST_TEXT:,} characters")
        number, deadline = next(self._numbers), time.monotonic() + timeout_s
        asked = list(self.router.members.values())
        with self.changing():
            for member in asked:
                member.calls[number] = verb
                self.router.send(member.name, Call(number, verb, argument))
        asked = [member for member in asked if not member.is_lost]
        while any(number in m.calls and not m.is_lost for m in asked) and time.monotonic() < deadline:
            with self.changing():
                self.router.listen(LONGEST_WAIT_S)
        return [(member, number not in member.calls) for member in asked]


class GroupProfiler(StepProfiler):
    """Records the steps of engines in other processes, by the profiler of each."""

    def __init__(self, core: RouterCore) -> None:
        super().__init__()
        self.core = core

    def start(self, folder: str) -> None:
        """Start recording steps in each process that has an engine."""
        self.core.call_all("start_profile", folder)

    def stop(self) -> list[str]:
        """Stop recording; return the names of the files of all processes."""
        return [name for names in self.core.call_all("stop_profile").values() for name in names]


def stats_of_idle(joined: Joined) -> dict[str, Any]:
    """Return the totals of an engine that has reported none yet."""
    return {"max_total_tokens": joined.total_tokens, "available_size": joined.total_tokens}
