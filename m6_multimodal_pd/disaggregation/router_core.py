"""What a user's engine has in place of an engine core, if others do the work: intake, the router, and outputs.

A step hears what the engines have said and makes outputs of it. Requests are checked here, by the same intake as ever,
and here their tokens become text. SGLang: `TokenizerManager` and `DetokenizerManager` in front of a router.
"""

import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from m1_single_request.engine_core import EngineCoreBase
from m1_single_request.errors import ConfigError, EngineUsageError, shown
from m1_single_request.held_interrupt import HeldInterrupt
from m1_single_request.outputs import EngineStats as SingleRequestStats, RequestOutput
from m1_single_request.tracer import Tracer
from m3_paged_attention.parallel_sampling import RequestFamilies
from m6_multimodal_pd.disaggregation.members import Member
from m6_multimodal_pd.disaggregation.router import Router
from m6_multimodal_pd.disaggregation.runtime.jobs import LONGEST_TEXT, error_of
from m6_multimodal_pd.disaggregation.runtime.messages import Answer, Call, Joined
from m6_multimodal_pd.errors import EngineLostError
from m6_multimodal_pd.outputs import EngineStats
from m6_multimodal_pd.step_profiler import StepProfiler

LONGEST_WAIT_S = 0.05
"""A step in which nothing comes takes so long: then the caller may look around."""
CALL_TIMEOUT_S = 60.0
"""For what an engine does between two steps. Loading weights takes what it takes."""
STATS_TIMEOUT_S = 1.0
"""Numbers are not worth more: those of an engine in a long step are those that it told last."""


class RouterCore(EngineCoreBase):
    """Turns the crank of a group of engines. `close` ends the engines."""

    kv_bytes_per_token = 0

    def __init__(
        self,
        *,
        input_processor: Any,
        router: Router,
        output_processor: Any,
        parts: Mapping[str, Any],
        tracer: Tracer,
        close_links: Callable[[], None],
        model: str,
    ) -> None:
        """`model`: what the engines have loaded."""
        self.router = router
        self.families = RequestFamilies(scheduler=router, tracer=tracer)
        own: RouterCore = weakref.proxy(self)  # without cycles a group ends where its last user drops it
        super().__init__(input_processor, self.families, output_processor, parts, tracer)
        self._num_calls = 0
        self._unheard: dict[int, Member] = {}
        """Calls for stats without an answer, and the engine of each: it may come when a step is over."""
        self.operations = GroupOperations(
            own, model, close_links, in_this_process=router.config.transport == "in_process"
        )

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

    def flush_cache(self) -> bool:
        """Forget the cached KV of all engines. False, and nothing is forgotten, while requests are unfinished.

        An engine that has not processed the end of its last request yet is asked again.
        """
        if self.has_unfinished_requests():
            return False
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while not all(self.call_all("flush_cache").values()):
            if time.monotonic() > deadline:
                raise EngineLostError(f"not all engines are done with their requests within {CALL_TIMEOUT_S:g} s")
        return True

    def update_weights(self, model: str) -> None:
        """Load other weights on all engines. Raises `EngineUsageError` while requests are unfinished."""
        if self.has_unfinished_requests():
            raise EngineUsageError("weights are exchanged between requests, and some are unfinished")
        self.operations.update_weights(model)

    def close(self) -> None:
        """Stop a profile that is being recorded, and end all engines."""
        self.operations.close()
        super().close()

    def stats(self) -> SingleRequestStats:
        """Totals of all engines, of one in a long step as they last were; requests are counted once, here."""
        own = vars(super().stats())
        counted_here = "num_waiting num_running num_finished num_output_tokens max_model_len".split()
        totals = totals_of(self._stats_of_engines()) | {name: own[name] for name in counted_here}
        return EngineStats(**{name: totals.get(name, 0) for name in EngineStats.__dataclass_fields__})

    def call_all(self, verb: Any, argument: str = "") -> dict[str, Any]:
        """Have all engines do something; returns what each answered, without those that were lost meanwhile. Raises
        the first error that one of them told; `EngineLostError` if one is silent, went while it loaded weights, or
        none is left to answer."""
        asked: dict[int, Member] = {}
        try:
            self._ask(asked, verb, argument)
            if not asked and verb != "flush_cache":
                raise EngineLostError(f"{verb}: there is no engine left")
            self._await(asked, math.inf if verb == "update_weights" else CALL_TIMEOUT_S)
            return self._answers_of(asked, verb, argument)
        finally:
            for number in asked:
                self.router.answers.pop(number, None)

    def _answers_of(self, asked: Mapping[int, Member], verb: str, argument: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, member in asked.items():
            answer, name = self.router.answers[number], member.name
            if answer is not WAITING:
                if answer.fault is not None:
                    raise error_of(answer.fault, name)
                found[name] = msgspec.msgpack.decode(answer.value)
            elif self._is_there(member):
                raise EngineLostError(f"engine {name!r} does not answer {verb} within {CALL_TIMEOUT_S:g} s")
            elif verb == "update_weights":  # perhaps because of them
                raise EngineLostError(f"engine {name!r} was lost while it loaded {shown(argument)}")
        if not found and verb != "flush_cache":
            raise EngineLostError(f"{verb}: all engines were lost before they answered")
        return found

    def _ask(self, asked: dict[int, Member], verb: Any, argument: str = "") -> None:
        """Call all engines that are there; `asked` gets the number of each call."""
        if len(argument) > LONGEST_TEXT:
            raise ConfigError(f"{verb}: {shown(argument)} is longer than {LONGEST_TEXT:,} characters")
        for member in list(self.router.members.values()):
            self._num_calls += 1
            self.router.send(member.name, Call(self._num_calls, verb, argument))
            if self._is_there(member):
                asked[self._num_calls] = member
                self.router.answers[self._num_calls] = WAITING

    def _is_there(self, member: Member) -> bool:
        """Whether it has not been lost; another engine may have its name by now, and not its calls."""
        return self.router.members.get(member.name) is member

    def _is_due(self, number: int, member: Member) -> bool:
        """Whether the answer to this call may still come."""
        return self.router.answers.get(number, WAITING) is WAITING and self._is_there(member)

    def _await(self, asked: Mapping[int, Member], timeout_s: float) -> None:
        """Listen until all have answered or are lost, so long at most."""
        deadline = time.monotonic() + timeout_s
        while any(self._is_due(number, member) for number, member in asked.items()):
            if time.monotonic() > deadline:
                return
            with HeldInterrupt():
                self.router.listen(LONGEST_WAIT_S)

    def _stats_of_engines(self) -> list[Mapping[str, Any]]:
        """What each engine says of itself now, or has said last."""
        asked: dict[int, Member] = {}
        try:
            self._ask(asked, "stats")
        finally:
            self._unheard |= asked
        self._await(asked, STATS_TIMEOUT_S)
        for number, member in list(self._unheard.items()):  # the newest last
            if self._is_due(number, member):
                continue
            del self._unheard[number]
            answer = self.router.answers.pop(number, WAITING)
            if answer.fault is not None:
                raise error_of(answer.fault, member.name)
            if answer is not WAITING:
                member.stats = msgspec.msgpack.decode(answer.value)
        return [member.stats or empty_stats(member.joined) for member in self.router.members.values()]


def empty_stats(joined: Joined) -> dict[str, Any]:
    """Of an engine that has told nothing yet."""
    return {"max_total_tokens": joined.total_tokens, "available_size": joined.total_tokens}


def totals_of(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of several engines, added up."""
    totals: dict[str, Any] = {}
    for own in stats:
        for name, value in own.items():
            if isinstance(value, int | float):
                totals[name] = totals.get(name, 0) + value
    return totals


WAITING = Answer(0, msgspec.Raw(b""), None)


class GroupOperations:
    """The same done on all engines."""

    def __init__(self, core: RouterCore, model: str, close_links: Callable[[], None], *, in_this_process: bool) -> None:
        """`model`: what the engines have loaded. `in_this_process`: so that one profiler sees all of them."""
        self.core, self.model, self.in_this_process = core, model, in_this_process
        self.close_links = close_links
        self.profiler = StepProfiler()

    def update_weights(self, model: str) -> None:
        """On all engines; if one cannot, those that could go back."""
        router = self.core.router
        before = router.weights, self.model
        try:
            router.weights = model
            self.core.call_all("update_weights", model)
            self.model = model
        except BaseException:  # Ctrl-C, for example
            router.weights, self.model = before
            self._go_back()
            raise

    def _go_back(self) -> None:
        """Load the previous weights on all engines; if that is interrupted, drop the engines."""
        router = self.core.router
        try:
            with suppress(EngineLostError):  # a lost engine has no weights to go back to
                self.core.call_all("update_weights", self.model)
        except Exception:
            raise
        except BaseException:
            for name in list(router.members):
                router.lose(name, "an update of its weights was interrupted")
            raise

    def start_profile(self, folder: str) -> None:
        """In each process that has an engine."""
        if self.in_this_process:
            self.profiler.start(folder)
        else:
            self.core.call_all("start_profile", folder)

    def stop_profile(self) -> list[str]:
        """The files of all processes."""
        if self.in_this_process:
            return self.profiler.stop()
        return [name for names in self.core.call_all("stop_profile").values() for name in names]

    def close(self) -> None:
        """Record nothing more, and end all engines."""
        self.profiler.drop()
        self.close_links()
        self.core.router.members.clear()  # totals are those of here from now on
