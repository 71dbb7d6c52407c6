"""Properties of random traffic on a test-bed, with any scheduler."""

from collections.abc import Callable
from typing import Any

from m3_paged_attention.errors import KVCapacityError
from tests.testbed.radix import RadixBed
from tests.testbed.radix_runner import answer_of
from tests.testbed.radix_traffic import Traffic, names, plain_trace, play, scheduled_names


def is_rated_if_asked(req: Any) -> None:
    """The prompt has log-probabilities if they were asked for."""
    asked = req.sampling_params.prompt_logprobs is not None
    assert (req.sequence.prompt_logprobs is not None) == asked


def check_ends(
    traffic: Traffic, bed: RadixBed, max_model_len: int, check_rated: Callable[[Any], None] = is_rated_if_asked
) -> None:
    """Each request ends with exactly the right tokens; afterwards all memory is free or evictable."""
    for _ in play(traffic, bed, names(traffic)):
        pass
    ids = scheduled_names(traffic, names(traffic))
    assert bed.ended.keys() == set(ids)
    assert sorted(bed.reported_ends) == sorted(names(traffic)), "each end is reported once"
    aborted = {ids[who] for _, _, who in traffic.aborts}
    for rid, reason in bed.ended.items():
        req = bed.reqs[rid]
        whole = answer_of(req, min(req.sampling_params.max_tokens, max_model_len - len(req.origin_input_ids)))
        assert bed.said(rid) == whole[: len(bed.said(rid))]
        if reason == "abort":
            assert rid in aborted
        elif reason == "error":
            is_outgrown = req.seqlen > traffic.limits.num_tokens
            assert not isinstance(bed.error_of(rid), KVCapacityError) or is_outgrown, "it could have run alone"
        else:
            assert bed.said(rid) == whole
            check_rated(req)
    bed.flush()


def check_names_do_not_matter(traffic: Traffic, make_bed: Callable[[], RadixBed], random: Any) -> None:
    """The same arrivals give the same trace, again and under other names."""

    def trace(names: list[str]) -> list[Any]:
        bed = make_bed()
        for _ in play(traffic, bed, names):
            pass
        return plain_trace(bed, [*scheduled_names(traffic, names), *names])

    first = trace(names(traffic))
    assert trace(names(traffic)) == first
    others = names(traffic, prefix="request-")
    random.shuffle(others)
    assert trace(others) == first


def check_progress(traffic: Traffic, bed: RadixBed) -> None:
    """In every step a request computes tokens or fails."""
    for step in play(traffic, bed, names(traffic)):
        assert step.counts or "error" in step.ended.values() or not bed.scheduler.requests


def answers(traffic: Traffic, bed: RadixBed) -> dict[str, tuple[int, ...]]:
    """The output tokens of each request."""
    for _ in play(traffic, bed, names(traffic)):
        pass
    return {rid: bed.said(rid) for rid in bed.requests}
