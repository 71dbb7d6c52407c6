"""Properties of random traffic on a test-bed, with any scheduler."""

from collections.abc import Callable
from typing import Any

from m3_paged_attention.errors import KVCapacityError
from tests.testbed.bed import SchedulerBed
from tests.testbed.families import FamiliesBed
from tests.testbed.traffic import Traffic, names, plain_trace, play, scheduled_names


def is_rated_if_asked(request: Any) -> None:
    """The prompt has log-probabilities if they were asked for."""
    asked = request.sampling_params.prompt_logprobs is not None
    assert (request.sequence.prompt_logprobs is not None) == asked


def check_ends(
    traffic: Traffic, bed: SchedulerBed, max_model_len: int, check_rated: Callable[[Any], None] = is_rated_if_asked
) -> None:
    """Each request ends with exactly the right tokens; afterwards no memory is in use."""
    said, ids = answers(traffic, bed), scheduled_names(traffic, names(traffic))
    assert bed.ended.keys() == said.keys() == set(ids)
    if isinstance(bed, FamiliesBed):
        assert sorted(bed.reported_ends) == sorted(names(traffic)), "each end is reported once"
    aborted = {ids[who] for _, _, who in traffic.aborts}
    for rid, reason in bed.ended.items():
        request = bed.requests[rid]
        num_prompt_tokens, most = len(request.prompt_token_ids), request.sampling_params.max_tokens
        whole = bed.checks.answer_of(request, min(most, max_model_len - num_prompt_tokens))
        assert said[rid] == whole[: len(said[rid])]
        if reason == "abort":
            assert rid in aborted
        elif reason == "error":
            is_outgrown = isinstance(bed.error_of(rid), KVCapacityError)
            assert not is_outgrown or not bed.checks.fits_alone(num_prompt_tokens + len(said[rid]))
        else:
            assert said[rid] == whole
            check_rated(request)
    bed.flush()


def check_names_do_not_matter(traffic: Traffic, make_bed: Callable[[], SchedulerBed], random: Any) -> None:
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


def check_progress(traffic: Traffic, bed: SchedulerBed) -> None:
    """In every step a request computes tokens or fails."""
    for step in play(traffic, bed, names(traffic)):
        assert step.counts or "error" in step.ended.values() or not bed.scheduler.requests


def answers(traffic: Traffic, bed: SchedulerBed) -> dict[str, tuple[int, ...]]:
    """The output tokens of each request."""
    for _ in play(traffic, bed, names(traffic)):
        pass
    return {rid: bed.said(rid) for rid in bed.requests}
