"""m2's events are true of small batches. Their form is tested for all milestones in `tests/events`."""

from m2_continuous_batching.events import LeftOut
from tests.m2_continuous_batching.event_examples import ADMIT, BATCH, USAGE


def test_readers_show_a_batch_by_its_requests_and_its_padding() -> None:
    """How the console and the Chrome trace show such events is tested with m1."""
    assert (ADMIT.request_ids(), BATCH.request_ids()) == (("req-7",), ("d", "a", "c"))
    assert BATCH.lanes() == (("d", "prefill"), ("a", "decode"), ("c", "decode"))
    assert BATCH.brief() == "mixed   14 tokens of 3 requests"
    assert LeftOut(rids=("a", "b"), available=9).brief() == "left out: a, b"
    assert USAGE.counters() == {"padded tokens": 10, "KV bytes used": 8192, "KV bytes reserved": 2**20}
