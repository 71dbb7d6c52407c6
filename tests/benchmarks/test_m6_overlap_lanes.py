"""Lesson 6, part 3: its trace, and the picture of the lanes of host and device."""

from itertools import pairwise

import pytest

from benchmarks import RESULTS
from benchmarks.m6_overlap import lanes as measured
from benchmarks.m6_overlap.trace import traced_steps
from m3_paged_attention.attention import native_library

pytestmark = pytest.mark.skipif(native_library.obstacle() is not None, reason=str(native_library.obstacle()))


def test_the_trace_on_the_page_is_what_the_engine_says_today():
    assert (RESULTS / "m6_overlap_trace.txt").read_text("utf-8") == traced_steps()


@pytest.mark.parametrize("enable_overlap", [False, True])
def test_the_lanes_have_one_bar_at_a_time_and_the_host_waits_while_the_device_computes(enable_overlap, monkeypatch):
    monkeypatch.setattr(measured, "REQUESTS", 2)
    monkeypatch.setattr(measured, "STEPS", 8)
    bars = measured.recorded(enable_overlap)
    lanes = {lane: sorted(bar[3:] for bar in bars if bar.lane == lane) for lane in ("host", "device", "waits")}
    for own in lanes.values():
        assert len(own) >= 7 and all(end <= begin + 1e-6 for (_, end), (begin, _) in pairwise(own))
    if not enable_overlap:
        assert lanes["waits"] == lanes["device"]
    first, begin, end = measured.typical(bars)
    assert begin < end and {bar.step for bar in bars if begin <= bar.begin < end} >= {first, first + 1, first + 2}
