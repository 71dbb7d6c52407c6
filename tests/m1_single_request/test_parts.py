"""What a part of one's own can change in m1, and what it must have.

That every role takes a part that fits and refuses one that does not is tested in `tests/engine_contract`.
"""

from typing import Any

import pytest
from torch import Tensor

from m1_single_request import PARTS, ConfigError, LLMEngine
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.request import Request
from m1_single_request.sampler import Sampler
from m1_single_request.sampling_metadata import SamplingMetadata
from m1_single_request.scheduler import Scheduler
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from tests.m1_single_request.engines import MakeEngine, greedy

# --- what does not fit ------------------------------------------------------------------------------------------------


class SchedulerWithoutAttributes:
    """Has the methods of the role and none of its attributes."""

    def __init__(self, *, stop_checker: StopChecker, tracer: Tracer) -> None: ...
    def add_request(self, request: Request) -> None: ...
    def schedule(self) -> None: ...
    def update_from_output(self, scheduler_output: Any, sampled: Any) -> list[Request]: ...
    def finish_requests(self, request_ids: Any, reason: Any) -> list[str]: ...
    def reset(self, reason: Any) -> None: ...
    def check_invariants(self) -> None: ...


class SchedulerWithoutUpdate(SchedulerWithoutAttributes):
    update_from_output = None  # type: ignore[assignment]


class SchedulerThatUpdatesFromLess(SchedulerWithoutAttributes):
    def update_from_output(self, sampled: Any) -> list[Request]: ...  # type: ignore[override]


class SchedulerWithoutTracer(SchedulerWithoutAttributes):
    def __init__(self, *, stop_checker: StopChecker) -> None: ...


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"scheduler": SchedulerWithoutUpdate}, r"'scheduler': SchedulerWithoutUpdate has no update_from_output\(\)$"),
        ({"scheduler": SchedulerWithoutTracer}, "cannot be called as the default part is: .* 'tracer'"),
        (
            {"scheduler": SchedulerThatUpdatesFromLess},
            r"has a method update_from_output\(\) that cannot be called as that of Scheduler is: too many positional",
        ),
        pytest.param(
            {"sampler": Sampler()}, r"'sampler' must be a class or a function, not <.*Sampler object", id="an object"
        ),
        *[(parts, "parts must map") for parts in ([("scheduler", Scheduler)], Scheduler, "scheduler")],
    ],
    ids=str,
)
def test_a_part_that_does_not_fit_is_refused_before_anything_is_loaded(parts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMEngine("/nowhere", parts=parts)


def test_a_part_that_lacks_an_attribute_is_refused_once_it_is_built(make_engine: MakeEngine) -> None:
    message = "SchedulerWithoutAttributes has no attribute requests, waiting, running, updater"
    with pytest.raises(ConfigError, match=message):
        make_engine({"scheduler": SchedulerWithoutAttributes})


# --- what fits --------------------------------------------------------------------------------------------------------


class Second(Sampler):
    """Takes the second best token, always."""

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        return logits.topk(2).indices[:, 1]


def test_a_sampler_of_ones_own_chooses_the_tokens(make_engine: MakeEngine) -> None:
    usual, own = make_engine(), make_engine({"sampler": Second})
    expected = usual.generate([5, 6], greedy(1, logprobs=2)).outputs[0].logprobs[0]
    second = next(token_id for token_id, entry in expected.items() if entry.rank == 2)
    assert own.generate([5, 6], greedy(1)).token_ids == (second,)
    assert usual.generate([5, 6], greedy(1)).token_ids != (second,), "other engines are not affected"


class Shouting(IncrementalDetokenizer):
    @property
    def text(self) -> str:
        return super().text.upper()


class Tagging(OutputProcessor):
    def visible_text(self, request: Request) -> str:
        return f"[{super().visible_text(request)}]"


def test_text_parts_of_ones_own_make_the_text(make_engine: MakeEngine) -> None:
    usual = make_engine().generate("a", greedy(6)).text
    engine = make_engine({"detokenizer": Shouting, "output_processor": Tagging})
    assert engine.generate("a", greedy(6)).text == f"[{usual.upper()}]"


def test_wiring_of_ones_own_gets_configuration_table_and_tracer(make_engine: MakeEngine) -> None:
    seen = []

    def wiring(config: Any, parts: Any, tracer: Tracer) -> Any:
        seen.append((config, parts, tracer))
        return PARTS["wiring"](config, parts, tracer)

    engine = make_engine({"wiring": wiring, "sampler": Second})
    config, parts, tracer = seen[0]
    assert config is engine.config and tracer is engine.tracer
    assert parts["sampler"] is Second and parts["scheduler"] is Scheduler and parts["wiring"] is wiring
