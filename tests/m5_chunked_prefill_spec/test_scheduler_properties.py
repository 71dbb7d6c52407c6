"""Random traffic against the scheduler of pieces, decodes and guesses: tiny pools, shared prompts, and every accident.

Hypothesis draws arrivals, limits, policies, schedules, sizes of pieces, guesses of every quality, aborts, failures,
interrupts and forced retractions. The test-bed checks every decision and every page, and reads every slot of KV; here
it is asserted what follows from many decisions, above all that nobody waits for ever.
"""

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings, strategies as st

from m3_paged_attention.errors import KVCapacityError
from tests.testbed.pieces import Guesses, PiecesBed, make_pieces_bed
from tests.testbed.radix_runner import answer_of
from tests.testbed.radix_traffic import Traffic, names, play, scheduled_names, traffic

MAX_MODEL_LEN = 64
LONGEST_PROMPT = 44


@dataclass(frozen=True)
class Cuts:
    """How steps are filled."""

    schedule: str
    max_num_batched_tokens: int
    chunked_prefill_size: int | None
    most_guesses: int
    right: float

    def bed(self, traffic: Traffic, **settings: Any) -> PiecesBed:
        """For this traffic; what would be refused as a configuration is left out."""
        limits = vars(traffic.limits) | {
            "max_num_batched_tokens": max(self.max_num_batched_tokens, traffic.limits.max_num_seqs),
            "schedule": self.schedule,
            "chunked_prefill_size": self.chunked_prefill_size,
        }
        guesses = Guesses(self.most_guesses, right=self.right) if self.most_guesses else None
        return make_pieces_bed(max_model_len=MAX_MODEL_LEN, guesses=guesses, **limits | settings)


CUTS = st.builds(
    Cuts,
    schedule=st.sampled_from(["decode_first", "decode_first", "prefill_first"]),
    max_num_batched_tokens=st.sampled_from([8, 9, 11, 16, 40]),
    chunked_prefill_size=st.sampled_from([None, None, 4, 5, 7]),
    most_guesses=st.sampled_from([0, 1, 3, 6]),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)


def any_traffic(**settings: Any) -> Any:
    return traffic(longest_prompt=LONGEST_PROMPT, **settings)


@settings(max_examples=150)
@given(any_traffic(), CUTS)
def test_everybody_ends_with_exactly_the_right_tokens(traffic: Traffic, cuts: Cuts) -> None:
    bed = cuts.bed(traffic, tensors=True)
    for _ in play(traffic, bed, names(traffic)):
        pass
    ids = scheduled_names(traffic, names(traffic))
    assert bed.ended.keys() == set(ids)
    assert sorted(bed.reported_ends) == sorted(names(traffic)), "callers hear of each end once"
    aborted = {ids[who] for _, _, who in traffic.aborts}
    for rid, reason in bed.ended.items():
        req = bed.reqs[rid]
        whole = answer_of(req, min(req.sampling_params.max_tokens, MAX_MODEL_LEN - len(req.origin_input_ids)))
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


def check_rated(req: Any) -> None:
    """All of its prompt has log-probabilities, each in its place, if they were asked for."""
    rows = req.sequence.data.prompt_logprobs
    if req.sampling_params.prompt_logprobs is None:
        assert rows is None
        return
    assert rows[0] is None and len(rows) == len(req.origin_input_ids)
    rated = [(token_id, -entry.logprob) for row in rows[1:] for token_id, entry in row.items()]
    assert rated == [(token_id, place) for place, token_id in enumerate(req.origin_input_ids[1:])]
