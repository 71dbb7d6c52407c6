"""When something breaks while pictures are seen: who shared the step fails with it, and nobody afterwards.

Nothing half-made stays in the embedding cache: whoever brings the same picture next gets transformers' tokens. All that
every milestone promises about failures: `tests/engine_contract`.
"""

import copy
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.scheduler import Scheduler
from m6_multimodal_pd import ForwardError, LLMEngine, ModelConfig, PartError
from m6_multimodal_pd.multimodal.encoder import Encoder
from m6_multimodal_pd.multimodal.media_reader import MediaReader
from tests.m6_multimodal_pd.engines import (
    MakeEngine,
    Recorder,
    check_drained,
    check_flushed,
    check_step,
    counts,
    finish,
    greedy,
    setting,
)
from tests.m6_multimodal_pd.seeing import Theirs, asking

BOOM = RuntimeError("the tower broke")
NUM_TOKENS = 6
ASKED: dict[str, tuple[str | int, ...]] = {
    "first": ("a", 1),
    "long": (1, "c", "b", 2),
    "clip": ("v", 3),
    "text": (4, 5),
}


class Tower:
    """`parts`: an encoder whose tower is changed in one call. `change` gets what it made, or makes something else."""

    def __init__(self, change: Callable[[Sequence[Tensor]], Sequence[Tensor]], *, call: int) -> None:
        self.calls: list[int] = []
        calls = self.calls

        class Changed(Encoder):
            def __init__(self, *, tower: Any, **settings: Any) -> None:
                def encode(items: Any) -> Any:
                    calls.append(len(items))
                    made = tower.encode(items)
                    return change(made) if len(calls) == call else made

                own = copy.copy(tower)  # all engines share it
                own.encode = encode
                super().__init__(tower=own, **settings)

        self.parts = {"encoder": Changed}


def failing(error: BaseException, *, call: int) -> Tower:
    """It raises when its work is done."""

    def fail(made: Sequence[Tensor]) -> Sequence[Tensor]:
        raise error

    return Tower(fail, call=call)


def serve(engine: Any, asked: Mapping[str, tuple[str | int, ...]] = ASKED) -> dict[str, Any]:
    """Ask all at once and step to the end; the last output of everybody."""
    for rid, conversation in asked.items():
        engine.add_request(asking(*conversation), greedy(NUM_TOKENS), request_id=rid)
    return finish(engine)


def said(engine: Any, theirs: Theirs, *conversation: str | int) -> tuple[int, ...]:
    """transformers' answer to a question."""
    return theirs.answer(engine.chat_prompt(asking(*conversation))).token_ids[:NUM_TOKENS]


def is_inside(engine: Any, rid: str) -> bool:
    """Whether its prompt was cut inside a picture."""
    req = engine.engine_core.scheduler.chunked_req
    if req is None or req.rid != rid:
        return False
    computed = req.kv_committed_len
    return any(start < computed < end for item in req.multimodal_inputs.mm_items for start, end in item.offsets)


def check_the_rest(engine: Any, last: dict[str, Any], theirs: Theirs, failed: set[str], error: Any) -> None:
    """Those who failed say why, the others and whoever asks again have transformers' tokens; then nothing is held."""
    assert last.keys() == ASKED.keys()
    for rid, output in last.items():
        wanted = said(engine, theirs, *ASKED[rid])
        if rid in failed:
            assert output.finish_reason == "error" and output.error is error, rid
            assert output.token_ids == wanted[: len(output.token_ids)], rid
        else:
            assert (output.error, output.token_ids) == (None, wanted), rid
    assert engine.stats().num_finished["error"] == len(failed)
    for rid, output in serve(engine).items():
        assert (output.error, output.token_ids) == (None, said(engine, theirs, *ASKED[rid])), f"{rid}, again"
    check_flushed(engine)


# --- the tower --------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("error", [BOOM, torch.OutOfMemoryError("out of memory"), MemoryError()], ids=repr)
def test_a_tower_that_breaks_fails_its_step(
    make_engine: MakeEngine, their_model: Theirs, error: Exception, call: int
) -> None:
    tower = failing(error, call=call)
    engine: Any = make_engine(tower.parts, **setting(8, 32, multimodal={"encoder_budget": 20}))
    recorder = Recorder(engine.tracer)
    last = serve(engine)
    assert len(tower.calls) >= call
    failed = {rid for rid, output in last.items() if output.error is not None}
    batches = [set(batch.rids) for batch in recorder.events("batch")]
    assert failed and failed in [batch & failed for batch in batches] and len(failed) < len(ASKED)
    check_the_rest(engine, last, their_model, failed, error)


def test_a_run_that_failed_counts_for_nothing_and_leaves_nothing(make_engine: MakeEngine) -> None:
    engine: Any = make_engine(failing(BOOM, call=1).parts, **setting())
    recorder = Recorder(engine.tracer)
    assert engine.chat(asking("a", "b"), greedy(2)).error is BOOM
    assert counts(engine) == (0, 0, 0) and engine.stats().embedding_cache_bytes == 0
    assert not recorder.events("encoder_run") and not recorder.events("encoder_hit")
    assert engine.chat(asking("a", "b"), greedy(2)).error is None
    assert counts(engine) == (1, 2, 0)


def test_embeddings_of_nan_fail_their_request_and_are_not_kept(make_engine: MakeEngine, their_model: Theirs) -> None:
    """Of two pictures that are encoded in one pass the second is spoilt."""
    tower = Tower(lambda made: [made[0], made[1] * torch.nan], call=1)
    engine: Any = make_engine(tower.parts, **setting(8, 200, page_size=1))
    asked: dict[str, tuple[str | int, ...]] = {"well": ("a", 1), "ill": (2, "b"), "text": (3,)}
    last = serve(engine, asked)
    assert isinstance(last["ill"].error, ForwardError) and "NaN or infinite logits" in str(last["ill"].error)
    assert last["well"].error is last["text"].error is None
    for rid, output in serve(engine, asked).items():
        assert output.token_ids == said(engine, their_model, *asked[rid])
    assert tower.calls == [2, 1], "the good one was kept"
    check_flushed(engine)


def test_an_engine_that_is_closed_inside_a_picture_holds_neither_tower_nor_embeddings(seeing_directory: Path) -> None:
    config = ModelConfig(model=seeing_directory, device="cpu", dtype="float32")
    engine: Any = LLMEngine(model_config=config, **setting(8, 9))
    encoder = engine.engine_core.encoder
    weights = encoder.tower.network.pos_embed
    references = [weakref.ref(each) for each in (encoder.tower, weights.untyped_storage())]
    rid = engine.add_request(asking("c", 1), greedy(3))
    while not is_inside(engine, rid):
        engine.step()
    del encoder, weights
    runs = counts(engine)[0]
    engine.close()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert engine.stats().embedding_cache_bytes == 0 and counts(engine)[0] == runs
    engine.close()


# --- the update -------------------------------------------------------------------------------------------------------


def test_an_error_in_an_update_ends_all_and_forgets_all_pictures(make_engine: MakeEngine, their_model: Theirs) -> None:
    """With a picture in pieces, and another one that is kept."""
    due: list[Exception] = []

    class Fails(Scheduler):
        def update_from_output(self, batch: Any, output: Any) -> list[Req]:
            changed = super().update_from_output(batch, output)
            if due:
                raise due.pop()
            return changed

    engine: Any = make_engine({"scheduler": Fails}, **setting(8, 9, multimodal={"encoder_budget": 20}))
    asked: dict[str, tuple[str | int, ...]] = {"long": ("c", 2), "waits": ("b", 1), "text": (3,)}
    assert engine.chat(asking("a", 1), greedy(2)).error is None
    for rid, conversation in asked.items():
        engine.add_request(asking(*conversation), greedy(NUM_TOKENS), request_id=rid)
    while not is_inside(engine, "long"):
        engine.step()
    assert engine.stats().num_waiting and len(engine.engine_core.encoder.cache) == 2
    due.append(RuntimeError("the update broke"))
    outputs = engine.step()
    assert outputs.keys() == asked.keys() and all(isinstance(o.error, PartError) for o in outputs.values())
    check_step(engine)
    check_drained(engine)
    assert engine.stats().embedding_cache_bytes == 0
    asked["kept"] = ("a", 1)
    for rid, output in serve(engine, asked).items():
        assert output.token_ids == said(engine, their_model, *asked[rid]), rid


# --- the reader of media ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [BOOM, MemoryError("no room for pixels"), KeyboardInterrupt()], ids=repr)
def test_a_reader_that_breaks_harms_nobody(make_engine: MakeEngine, their_model: Theirs, error: BaseException) -> None:
    """What it raises comes out of the call as it is, before anything was queued."""
    broken: list[bool] = [False]

    class Breaks(MediaReader):
        def process(self, part: Mapping[str, Any], what: str) -> Any:
            if broken[0]:
                raise error
            return super().process(part, what)

    engine: Any = make_engine({"media_reader": Breaks}, **setting())
    prompt = engine.chat_prompt(asking("a", 1))
    wanted = their_model.answer(prompt).token_ids[:NUM_TOKENS]
    rid = engine.add_request(prompt, greedy(NUM_TOKENS))
    engine.step()
    recorder, broken[0] = Recorder(engine.tracer), True
    with pytest.raises(type(error)) as caught:
        engine.add_request(asking("b"))
    assert caught.value is error and recorder.records == []
    with pytest.raises(type(error)):
        engine.generate_batch([prompt, asking("b"), prompt], greedy(3))
    broken[0] = False
    last = finish(engine)
    assert last.keys() == {rid} and last[rid].token_ids == wanted, "those of the batch that broke are nobody's"
    assert engine.generate(asking("a", 1), greedy(NUM_TOKENS)).token_ids == wanted
    check_drained(engine)
    check_flushed(engine)
