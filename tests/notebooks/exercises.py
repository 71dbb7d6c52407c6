"""The exercises of every notebook: which there are, how their answers are named, and which code of the package passes.

A new milestone joins by adding its `Exercises` to `TAUGHT`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import m1_single_request
import m2_continuous_batching
import m3_paged_attention
import m4_radix_cache
import m5_chunked_prefill_spec
import m6_multimodal_pd
import m7_serving
import m8_parallel
from benchmarks.m2 import trace as m2_trace
from benchmarks.m3 import trace as m3_trace
from benchmarks.m4 import trace as m4_trace
from benchmarks.m4_tiers import trace as m4_tiers_trace
from benchmarks.m5 import trace as m5_trace
from benchmarks.m6 import trace as m6_trace
from benchmarks.m6_pd import trace as m6_pd_trace
from benchmarks.m7 import trace as m7_trace
from benchmarks.m8 import trace as m8_trace
from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.scheduler import Scheduler as SchedulerOfM1
from m2_continuous_batching.kv_manager import SlotManager
from m2_continuous_batching.scheduler import Scheduler as SchedulerOfM2
from m3_paged_attention.block_pool import BlockPool
from m3_paged_attention.models.qwen3_moe import SparseMLP
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.batch_composer import DecodeFirst
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m6_multimodal_pd.disaggregation.staging import StagedSource
from m6_multimodal_pd.graph_runner import StepInputs, sizes_up_to
from m6_multimodal_pd.models.rotary import axes_of_pairs
from m6_multimodal_pd.multimodal.inputs import content_hash
from m6_multimodal_pd.multimodal.mrope import get_rope_index
from m8_parallel.models.shared_tower import shared_out
from notebooks import (
    checks,
    checks_m2,
    checks_m3,
    checks_m4,
    checks_m4_tiers,
    checks_m5,
    checks_m6,
    checks_m6_overlap,
    checks_m6_pd,
    checks_m7,
    checks_m8,
)
from tests.notebooks.lessons import Lesson


@dataclass(frozen=True)
class Exercises:
    """What is to be answered in one notebook of a milestone."""

    package: ModuleType
    check: Callable[[str, Any], Any]
    """As the notebook imports it."""
    own_code: Mapping[str, object]
    """Code of the package that is right where an exercise asks for the same."""
    traced_steps: Callable[[], str] | None = None
    """What the page of the milestone shows of a trace, where every machine writes the same."""
    notebook: str = ""
    """Its name, where a milestone has several; otherwise it is the package's."""
    lesson: Lesson = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lesson", Lesson(str(self)))

    def __str__(self) -> str:
        return self.notebook or self.package.__name__

    @property
    def answers(self) -> dict[str, str]:
        """The exercises, each with the name of its answer, as the notebook checks them."""
        return self.lesson.checked()

    @property
    def prefix(self) -> str:
        """How the names of its exercises begin: `m2.`."""
        return next(iter(self.answers)).partition(".")[0] + "."


M1_CODE = {
    "m1.off_by_one": SchedulerOfM1,
    "m1.detokenizer": IncrementalDetokenizer,
    "m1.output_processor": OutputProcessor,
}
M2_CODE = {"m2.slot_manager": SlotManager, "m2.starved_decode": SchedulerOfM2}
M4_CODE = {"m4.freed_while_mapped": RadixCache, "m4.whole_hit": Req}
M5_CODE = {"m5.sampled_piece": ScheduleBatch, "m5.overshoot": ScheduleBatch, "m5.starved": DecodeFirst}
M6_CODE = {"m6.swapped": get_rope_index, "m6.layout": axes_of_pairs, "m6.content": content_hash}
M6_OVERLAP_CODE = {"m6_overlap.sizes": sizes_up_to, "m6_overlap.pad": StepInputs}
M1 = Exercises(m1_single_request, checks.check, M1_CODE)
M2 = Exercises(m2_continuous_batching, checks_m2.check, M2_CODE, m2_trace.traced_steps)
M3_CODE = {"m3.freed_block": BlockPool, "m3.router": SparseMLP}
M3 = Exercises(m3_paged_attention, checks_m3.check, M3_CODE, m3_trace.traced_steps)
M4 = Exercises(m4_radix_cache, checks_m4.check, M4_CODE, m4_trace.traced_steps)
M4_TIERS = Exercises(m4_radix_cache, checks_m4_tiers.check, {}, m4_tiers_trace.traced_steps, "m4_tiers")
M5 = Exercises(m5_chunked_prefill_spec, checks_m5.check, M5_CODE, m5_trace.traced_steps)
M6 = Exercises(m6_multimodal_pd, checks_m6.check, M6_CODE, m6_trace.traced_steps, "m6_multimodal")
M6_PD = Exercises(
    m6_multimodal_pd, checks_m6_pd.check, {"m6_pd.frames": StagedSource}, m6_pd_trace.traced_steps, "m6_pd"
)
M6_OVERLAP = Exercises(m6_multimodal_pd, checks_m6_overlap.check, M6_OVERLAP_CODE, notebook="m6_overlap")
M7 = Exercises(m7_serving, checks_m7.check, {}, m7_trace.traced_steps)
M8 = Exercises(m8_parallel, checks_m8.check, {"m8.shares": shared_out}, m8_trace.traced_steps)
TAUGHT = [M1, M2, M3, M4, M4_TIERS, M5, M6, M6_PD, M6_OVERLAP, M7, M8]


def open_exercise(*_: object, **__: object) -> None:
    """An exercise as the notebook hands it out."""
    raise NotImplementedError
