"""Log-probabilities of a prompt come piece by piece, and are m1's whichever way it is cut.

Where two pieces meet, the last token of the first one rates the first token of the second. Nothing may be left out, and
nothing said twice, if the request loses its place between two pieces.
"""

from typing import Any

import pytest

from m5_chunked_prefill_spec import LLMEngine
from tests.equivalence import answers
from tests.equivalence.forced_retraction import ForcedRetractionInPieces
from tests.equivalence.traffic import prompt_of
from tests.m4_radix_cache.logprobs import RATED, check_rated
from tests.m5_chunked_prefill_spec.engines import MakeEngine, Recorder, ask_in_turn, greedy, run, scheduler_of, setting

SCHEDULES = pytest.mark.parametrize("schedule", ["decode_first", "prefill_first"])


@pytest.mark.sample(8)
@SCHEDULES
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("cut", [16, 17, 41, 42, 64])
def test_they_are_those_of_m1_whichever_way_the_prompt_is_cut(
    make_engine: MakeEngine, m1: Any, schedule: str, page_size: int, cut: int
) -> None:
    engine = make_engine(**setting(page_size=page_size, schedule=schedule, chunked_prefill_size=cut))
    check_rated(engine.generate(prompt_of(42), RATED), m1.generate(prompt_of(42), RATED))


@pytest.mark.parametrize("cache", ["radix", "hash"])
def test_a_cached_prompt_is_computed_again_for_them_in_pieces(make_engine: MakeEngine, m1: Any, cache: str) -> None:
    engine = make_engine(**setting(cache=cache, chunked_prefill_size=17))
    recorder = Recorder(engine.tracer)
    engine.generate(prompt_of(42), greedy(4))
    output = engine.generate(prompt_of(42), RATED)
    assert output.metrics.cached_tokens == 0
    assert [cut.start for cut in recorder.events("chunk_cut")] == [0, 17, 0, 17], "its own pieces count as computed"
    check_rated(output, m1.generate(prompt_of(42), RATED))


@SCHEDULES
@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_rated_prompts_run_in_pieces_beside_others(
    make_engine: MakeEngine, m1: Any, schedule: str, method: Any
) -> None:
    engine = make_engine(**setting(8, 16, schedule=schedule, method=method))
    asked = [(prompt_of(20 + 7 * n, n % 2), RATED if n % 2 else greedy(9)) for n in range(6)]
    for output, (prompt, params) in zip(ask_in_turn(engine, asked), asked, strict=True):
        check_rated(output, m1.generate(prompt, params))


def test_once_rated_a_retracted_prompt_is_not_rated_again(make_engine: MakeEngine, m1: Any, cache: str) -> None:
    engine = make_engine({"scheduler": ForcedRetractionInPieces}, **setting(4, 16, cache=cache))
    answers.check_logprobs(engine, m1, lengths=(40, 1, 33, 5, 17, 16), top_k=5, exact_ranks=False)
    assert engine.stats().num_retractions > 0


@pytest.mark.parametrize("steps", [1, 2])
def test_an_abort_between_two_pieces_reports_none(make_engine: MakeEngine, steps: int) -> None:
    engine = make_engine(**setting(4, 16))
    engine.add_request(prompt_of(60), RATED, request_id="a")
    for _ in range(steps):
        engine.step()
    assert in_pieces(engine) == "a"
    engine.abort_request("a")
    output = run(engine)["a"]
    assert (output.finish_reason, output.token_ids, output.prompt_logprobs) == ("abort", (), None)


def in_pieces(engine: LLMEngine) -> str | None:
    """Whose prompt is computed in part."""
    req = scheduler_of(engine).chunked_req  # type: ignore[attr-defined]
    return None if req is None else req.rid
