"""What m6's events say is the truth about pictures. Their form is tested for all milestones in `tests/events`.

The trace alone must explain which pictures came and where they stand, what the tower ran for, what it was spared, and
what had to go.
"""

from typing import Any

import pytest

from m6_multimodal_pd import SamplingParams
from tests.m6_multimodal_pd.engines import MakeEngine, counts, drain, greedy, setting
from tests.m6_multimodal_pd.seeing import asking, messages
from tests.support.traces import fields, traced

SHORT = greedy(2)
TOKEN_BYTES = 3 * 64 * 4


# --- arrivals ---------------------------------------------------------------------------------------------------------


def test_what_came_is_told_with_its_place_in_the_prompt(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting())
    prompt: Any = engine.chat_prompt(asking("a", 1, "v", "a"))
    rid = engine.add_request(prompt, SHORT, request_id="r")
    received = recorder.events("item_received")
    wanted = ("rid", "index", "modality", "size", "grid_thw", "num_tokens")
    assert fields(received, *wanted) == [
        (rid, 0, "image", (24, 24), (1, 6, 6), 9),
        (rid, 1, "video", (24, 16), (2, 4, 6), 12),
        (rid, 2, "image", (24, 24), (1, 6, 6), 9),
    ]
    inputs = prompt.multimodal_inputs
    assert [event.offsets for event in received] == [item.offsets for item in inputs.mm_items]
    places = {place for event in received for start, end in event.offsets for place in range(start, end)}
    tokens = engine.engine_core.input_processor.prompts.tokens
    assert {prompt[place] for place in places} == {tokens.image, tokens.video}
    assert places == {i for i, token in enumerate(prompt) if token in (tokens.image, tokens.video)}
    assert received[0].hash == received[2].hash != received[1].hash
    assert received[0].pad_value == received[2].pad_value != received[1].pad_value
    drain(engine)


@pytest.mark.parametrize("added", [2, -1], ids=["put on", "taken off"])
def test_the_positions_are_those_of_the_prompt_as_it_was_handed_in(make_engine: MakeEngine, added: int) -> None:
    """Text behind the last picture may differ from what the chat template wrote there."""
    engine, recorder = traced(make_engine, **setting())
    prompt = engine.chat_prompt(asking("a", 1))
    prompt[len(prompt) + min(added, 0) :] = [300] * added
    engine.generate(prompt, SHORT)
    (positions,) = recorder.events("positions_assigned")
    assert positions.num_tokens == len(prompt)
    assert f"goes on at {len(prompt) + prompt.multimodal_inputs.mrope_position_delta}." in positions.explain()


def test_pictures_come_once_for_a_family_and_before_it_is_queued(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting())
    engine.generate(asking("a", 1), SamplingParams(max_tokens=1, n=3), request_id="family")
    assert len(recorder.events("item_received")) == len(recorder.events("positions_assigned"))
    kinds = recorder.kinds()
    assert kinds.index("item_received") < kinds.index("positions_assigned") < kinds.index("batch")


# --- the tower --------------------------------------------------------------------------------------------------------


def test_the_trace_alone_counts_runs_hits_and_evictions_as_stats_do(make_engine: MakeEngine) -> None:
    limits = setting(
        page_size=1,
        max_num_batched_tokens=16,
        multimodal={"encoder_budget": 15, "embedding_cache_bytes": 25 * TOKEN_BYTES},
    )
    engine, recorder = traced(make_engine, **limits)
    engine.generate_batch([asking("a", 1), asking(2, "c", "v"), asking("a", 3), asking(4)], SHORT)
    engine.chat(messages((("a", 1), (2,))), SHORT)
    engine.chat(asking(7, "c"), SHORT)
    runs, hits, gone = (recorder.events(kind) for kind in ("encoder_run", "encoder_hit", "item_evicted"))
    assert counts(engine) == (len(runs), sum(len(run.hashes) for run in runs), len(hits))
    stats: Any = engine.stats()
    assert stats.num_encoded_tokens == sum(run.num_tokens for run in runs)
    assert stats.encoder_seconds == pytest.approx(sum(run.milliseconds for run in runs) / 1e3)
    assert stats.num_evicted_items == len(gone) > 0 and hits
    kept = stats.num_encoded_tokens * TOKEN_BYTES - sum(event.num_bytes for event in gone)
    assert kept == stats.embedding_cache_bytes


def test_whoever_reads_what_another_request_of_the_step_has_made_has_a_hit(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(page_size=1))
    engine.add_request(asking("a", 1), SHORT, request_id="one")
    engine.add_request(asking(5, "a"), SHORT, request_id="two")
    drain(engine)
    assert fields(recorder.events("encoder_run"), "rids", "num_tokens", "num_patches") == [(("one", "two"), 9, 36)]
    assert fields(recorder.events("encoder_hit"), "num_tokens", "num_read") == [(9, 9)]
