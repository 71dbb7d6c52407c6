"""What a user's engine has in place of an engine core, if others do the work: intake, the router, and outputs.

A step hears what the engines have said and makes outputs of it. Requests are checked here, by the same intake as ever,
and here their tokens become text. SGLang: `TokenizerManager` and `DetokenizerManager` in front of a router.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from m1_single_request.engine_core_base import EngineCoreBase
from m1_single_request.errors import ConfigError, EngineError, shown
from m1_single_request.operations import Operations
from m1_single_request.outputs import EngineStats as SingleRequestStats, RequestOutput
from m1_single_request.tracer import Tracer
from m3_paged_attention.parallel_sampling import RequestFamilies
from m6_multimodal_pd.disaggregation.jobs import LONGEST_TEXT, error_of
from m6_multimodal_pd.disaggregation.messages import Answer, Call
from m6_multimodal_pd.disaggregation.router import Router
from m6_multimodal_pd.errors import EngineLostError, PeerLostError
from m6_multimodal_pd.outputs import EngineStats

LONGEST_WAIT_S = 0.05
"""A step in which nothing comes takes so long: then the caller may look around."""
CALL_TIMEOUT_S = 60.0


class RouterCore(EngineCoreBase):
    """Turns the crank of a group of engines."""

    def __init__(
        self,
        *,
        input_processor: Any,
        router: Router,
        output_processor: Any,
        tracer: Tracer,
        close_links: Callable[[], None],
        model: str,
    ) -> None:
        """`model`: what the engines have loaded."""
        self.router = router
        self.families = RequestFamilies(scheduler=router, tracer=tracer)
        super().__init__(
            input_processor=input_processor,
            unfinished=self.families,
            kv_holder=GroupView(self),
            output_processor=output_processor,
            tracer=tracer,
        )
        self._num_calls = 0
        self.operations = GroupOperations(
            self, model, close_links, in_this_process=router.config.transport == "in_process"
        )

    def step(self) -> dict[str, RequestOutput]:
        """Hear what the engines have said; returns the new state of every request that changed. `{}` if none did."""
        if not self._begin_step():
            return {}
        began = time.perf_counter()
        heard = self.router.update(LONGEST_WAIT_S)
        times = [began, began, time.perf_counter(), time.perf_counter()]
        changed = self._and_unreported(self.families.reported(heard))
        outputs = self._make_outputs(changed)
        self._end_step(times, num_tokens=0, num_prompt_tokens=0, changed=changed)
        return outputs

    def is_unfinished(self, request_id: str) -> bool:
        """As m1's. If a parent's arrival was interrupted, only its family knows it, until its children have ended."""
        return super().is_unfinished(request_id) or self.families.is_unfinished(request_id)

    def stats(self) -> SingleRequestStats:
        """Totals of all engines; requests are counted once, here."""
        own = vars(super().stats())
        said = [value for value in self.call_all("stats").values() if isinstance(value, dict)]
        totals = totals_of(said) | {
            name: own[name] for name in ("num_waiting", "num_running", "num_finished", "num_output_tokens")
        }
        return EngineStats(**{name: totals.get(name, 0) for name in EngineStats.__dataclass_fields__})

    def call_all(self, verb: Any, argument: str = "") -> dict[str, Any]:
        """Have all engines do something; returns what each answered. Raises the first error that one of them told."""
        if len(argument) > LONGEST_TEXT:
            raise ConfigError(f"{verb}: {shown(argument)} is longer than {LONGEST_TEXT:,} characters")
        waiting: dict[int, str] = {}
        for name in list(self.router.members):
            self._num_calls += 1
            self.router.answers[self._num_calls] = WAITING
            try:
                self.router.links.send(name, Call(self._num_calls, verb, argument))
                waiting[self._num_calls] = name
            except PeerLostError:
                del self.router.answers[self._num_calls]
        deadline = time.monotonic() + CALL_TIMEOUT_S
        answers = self.router.answers
        while any(answers[number] is WAITING and name in self.router.members for number, name in waiting.items()):
            self.router.listen(LONGEST_WAIT_S)
            if time.monotonic() > deadline:
                break
        found: dict[str, Any] = {}
        errors: list[EngineError] = []
        for number, name in waiting.items():
            answer = answers.pop(number)
            if answer is WAITING:
                errors.append(EngineLostError(f"engine {name!r} does not answer {verb}"))
            elif answer.fault is not None:
                errors.append(error_of(answer.fault, name))
            else:
                found[name] = msgspec.msgpack.decode(answer.value)
        if errors:
            raise errors[0]
        return found


def totals_of(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of several engines, added up."""
    totals: dict[str, Any] = {}
    for own in stats:
        for name, value in own.items():
            if isinstance(value, int | float):
                totals[name] = totals.get(name, 0) + value
    return totals


WAITING = Answer(0, msgspec.Raw(b""), None)


class GroupView:
    """What the engines hold, seen from above: their own business."""

    kv_bytes_per_token = 0

    def __init__(self, core: RouterCore) -> None:
        self.core = core

    def free_request_cache(self, request_id: str) -> None:
        """Engines free what they hold."""

    def clear_kv_caches(self) -> None:
        """Forget all KV, on all engines. Those that have not heard yet that nobody is left are asked again."""
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while not all(self.core.call_all("flush_cache").values()):
            if time.monotonic() > deadline:
                raise EngineLostError(f"not all engines are done with their requests within {CALL_TIMEOUT_S:g} s")

    def held_request_ids(self) -> list[str]:
        """Nothing is held here."""
        return []

    def num_kv_tokens(self) -> int:
        """Not counted here."""
        return 0


class GroupOperations:
    """The same done on all engines."""

    def __init__(self, core: RouterCore, model: str, close_links: Callable[[], None], *, in_this_process: bool) -> None:
        """`model`: what the engines have loaded. `in_this_process`: so that one profiler sees all of them."""
        self.core, self.model, self.in_this_process = core, model, in_this_process
        self.close_links = close_links
        self.own = Operations()

    def update_weights(self, model: str) -> None:
        """On all engines; if one cannot, those that could go back."""
        router = self.core.router
        before, router.weights = router.weights, model
        try:
            self.core.call_all("update_weights", model)
        except EngineError:
            router.weights = before
            self.core.call_all("update_weights", self.model)
            raise
        self.model = model

    def start_profile(self, folder: str) -> None:
        """In each process that has an engine."""
        if self.in_this_process:
            self.own.start_profile(folder)
        else:
            self.core.call_all("start_profile", folder)

    def stop_profile(self) -> list[str]:
        """The files of all processes."""
        if self.in_this_process:
            return self.own.stop_profile()
        return [name for names in self.core.call_all("stop_profile").values() for name in names]

    def close(self) -> None:
        """Record nothing more, and end all engines."""
        self.own.close()
        self.close_links()
        self.core.router.members.clear()  # totals are those of here from now on
