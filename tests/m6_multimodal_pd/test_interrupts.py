"""Ctrl-C while pictures are seen: nobody is lost, no token is wrong, no embedding and no number is lost or doubled.

The crowd is m5's with pictures, in steps so small that they are cut, with so little room for embeddings that they
leave. One of the steps is interrupted before one of its lines, chosen at random among m6's own, or among all of the
engine; whoever called `step` goes on as if nothing had been.
"""

from itertools import count
from types import ModuleType
from typing import Any

import pytest

from m6_multimodal_pd import LLMEngine, SamplingParams, forward_batch, input_processor, model_runner
from m6_multimodal_pd.multimodal import embedding_cache, encoder, encoder_budget, inputs, prompt
from tests.equivalence.forced_retraction import ForcedRetractionInPieces
from tests.m5_chunked_prefill_spec.test_interrupts import ENGINE, forget_denials
from tests.m6_multimodal_pd.engines import Guessing, MakeEngine, check_drained, check_flushed, greedy, setting
from tests.m6_multimodal_pd.seeing import Theirs, asking, picture, text
from tests.support.interrupts import Crowd
from tests.testbed.interrupts import interrupted

OWN: list[ModuleType] = [encoder, embedding_cache, encoder_budget, inputs, forward_batch, model_runner]
ASKED: dict[str, tuple[tuple[str | int, ...], SamplingParams]] = {
    "a": (("a", 1), greedy(5)),
    "family": ((1, "d"), greedy(4, n=3, temperature=1.0, seed=4)),
    "b": (("a", "b"), greedy(3, temperature=0.9, seed=9, repetition_penalty=1.3)),
    "gone": (("c", 2), greedy(9)),
    "c": (("v", "c", 3), greedy(6, logprobs=1, prompt_logprobs=1)),
    "text": ((1, 2), greedy(7)),
}
LIMITS: dict[str, Any] = {"encoder_budget": 12, "embedding_cache_bytes": 24 * 768}
CASES = 8


def check_end(engine: Any) -> None:
    check_drained(engine)
    engine.engine_core.companion.cache.check_invariants()
    check_flushed(engine)


@pytest.mark.sample(1)
@pytest.mark.parametrize("modules", [OWN, [*ENGINE, *OWN]], ids=["pictures", "engine"])
@pytest.mark.parametrize("guesses", ["none", "random"])
def test_an_interrupt_anywhere_leaves_right_tokens_and_nothing_else(
    make_engine: MakeEngine, book: None, guesses: str, modules: list[ModuleType]
) -> None:
    parts: dict[str, Any] = {"scheduler": ForcedRetractionInPieces}
    if guesses == "random":
        parts["proposer"] = Guessing
    method = "ngram" if guesses == "random" else None
    limits = setting(5, 16, tokens=130, page_size=2, conservativeness=0, method=method, multimodal=LIMITS)
    alone: Any = make_engine(**setting(cache="chunk"))
    crowd = Crowd(
        asked={rid: (alone.chat_prompt(asking(*parts)), params) for rid, (parts, params) in ASKED.items()},
        make=lambda: make_engine(parts, **limits),
        check_end=check_end,
        after=forget_denials,
    )
    first = crowd.check_interrupts(alone, modules, cases=CASES, seed=f"{guesses}{len(modules)}")
    stats: Any = first.stats()
    assert stats.num_retractions > 0 and stats.num_evicted_items > 0 and stats.num_encoder_hits > 0
    assert (stats.num_draft_tokens > 0) == (guesses == "random")


def test_an_interrupt_before_any_line_that_encodes_leaves_the_books_of_embeddings_right(
    make_engine: MakeEngine, their_model: Theirs
) -> None:
    """One picture must leave for the other, while the step is interrupted at each line in turn."""
    limits = setting(cache="chunk", multimodal={"embedding_cache_bytes": 24 * 768})
    engine: Any = make_engine(**limits)
    prompts = [engine.chat_prompt(asking(*parts)) for parts in (("a", 1), ("c", 1))]
    wanted = [their_model.answer(own).token_ids[:2] for own in prompts]
    cache = engine.engine_core.companion.cache
    for line in count(1):
        rid = engine.add_request(prompts[line % 2], greedy(2))
        with interrupted(line, [encoder, embedding_cache]) as interrupt:
            engine.step()
        cache.check_invariants()
        last: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            last |= engine.step()
            cache.check_invariants()
        assert (last[rid].error, last[rid].token_ids) == (None, wanted[line % 2]), f"before {interrupt.where}"
        if interrupt.where is None:
            break
    assert line > 40, "the lines of an eviction are among them"
    check_drained(engine)
    check_flushed(engine)


def arrival(number: int) -> list[dict[str, Any]]:
    """A picture that nobody has seen yet, as long as all others."""
    return [{"role": "user", "content": [{"type": "image", "image": picture(f"new {number}", 2, 2)}, text(1)]}]


def test_an_interrupt_before_any_line_of_an_arrival_gives_no_number_twice(make_engine: MakeEngine) -> None:
    """Two contents under one number would read each other's KV."""
    engine: Any = make_engine(**setting())
    known: dict[int, str] = {}
    for line in count(1):
        with interrupted(line, [inputs]) as interrupt:
            engine.add_request(arrival(line), greedy(1))
        for number in (line, -line):
            rid = engine.add_request(arrival(number), greedy(1))
            (item,) = engine.engine_core.scheduler.requests[rid].multimodal_inputs.mm_items
            assert known.setdefault(item.pad_value, item.hash) == item.hash, f"before {interrupt.where}"
            engine.abort_request(rid)
        if interrupt.where is None:
            break
    assert line > 25 and min(known) >= 4096
    end(engine)


def end(engine: Any) -> None:
    """Whoever is left ends."""
    while engine.has_unfinished_requests():
        engine.step()
    check_drained(engine)


def test_an_interrupted_arrival_is_nobody_s(make_engine: MakeEngine, their_model: Theirs) -> None:
    engine: LLMEngine = make_engine(**setting())
    wanted = their_model.answer(engine.chat_prompt(asking("a", 1))).token_ids[:3]
    for line in range(1, 120, 7):
        with interrupted(line, [input_processor, prompt, inputs]) as interrupt:
            engine.add_request(asking("b", 2), greedy(3), request_id="r")
        if interrupt.where is None:
            break
        assert not engine.has_unfinished_requests(), f"after an interrupt before {interrupt.where}"
        assert engine.generate(asking("a", 1), greedy(3), request_id="r").token_ids == wanted
    check_drained(engine)
