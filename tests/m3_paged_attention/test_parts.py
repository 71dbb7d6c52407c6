"""Parts of one's own in m3's roles: what fits is used by this engine alone, what does not fit is a readable error."""

from typing import Any

import pytest

import m1_single_request
import m2_continuous_batching
from m3_paged_attention import PARTS, ConfigError, LLMEngine
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.scheduler import Scheduler
from m3_paged_attention.step_plan import StepPlan
from tests.m3_paged_attention.engines import MakeEngine, setting
from tests.support.traces import order_of_admission

PROMPTS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]

# --- what does not fit ------------------------------------------------------------------------------------------------


class KVManagerWithoutFork(KVCacheManager):
    fork = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"kv_manager": m2_continuous_batching.PARTS["kv_manager"]}, r"SlotManager has no .*fork\(\)"),
        ({"kv_manager": KVManagerWithoutFork}, r"KVManagerWithoutFork has no fork\(\)"),
        ({"executor": m2_continuous_batching.PARTS["executor"]}, r"'executor': GPUExecutor has no .*execute_model\(\)"),
        ({"scheduler": m2_continuous_batching.PARTS["scheduler"]}, "'scheduler': Scheduler cannot be called as the"),
        ({"model_runner": m2_continuous_batching.PARTS["model_runner"]}, r"ModelRunner has no .*execute_model\(\)"),
        (
            {"engine_core": m1_single_request.PARTS["engine_core"]},
            "cannot be called as the default part is: .* 'model_runner'",
        ),
    ],
    ids=str,
)
def test_a_part_of_another_milestone_is_refused_before_anything_is_loaded(parts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMEngine("/nowhere", parts=parts)


# --- what fits --------------------------------------------------------------------------------------------------------


class NewestFirst(Scheduler):
    """Last come, first served."""

    def _admit(self, plan: StepPlan) -> None:
        self.waiting.reverse()
        super()._admit(plan)
        self.waiting.reverse()


def test_a_scheduler_of_ones_own_decides_the_order(make_engine: MakeEngine) -> None:
    own, usual = make_engine({"scheduler": NewestFirst}, **setting(2)), make_engine(**setting(2))
    assert order_of_admission(own, PROMPTS) == [3, 2, 1, 0]
    assert order_of_admission(usual, PROMPTS) == [0, 1, 2, 3], "other engines are not affected"
    assert PARTS["scheduler"] is Scheduler


def test_parts_of_before_still_fit_where_m3_changed_nothing() -> None:
    unchanged = {"sampler", "stop_checker", "detokenizer"}
    assert {role for role in PARTS if PARTS[role] is m2_continuous_batching.PARTS.get(role)} == unchanged
