"""The trace of pictures among texts is the stored one.

The model is a random one, and transformers' versions may draw it otherwise; so every answer is forced by a bias, and
contents, whose hashes may differ in the last bit of a feature, are named in the order in which they come. What stays
are decisions: which pictures came and where they stand, what was encoded, found, cut and evicted. When a change of the
trace is intended, record it again and read the difference before committing it:

    python -m tests.m6_multimodal_pd.test_golden_trace
"""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from m6_multimodal_pd import JsonlReader, LLMEngine, ModelConfig, SamplingParams
from tests.m6_multimodal_pd.engines import setting
from tests.m6_multimodal_pd.seeing import asking, messages, save_seeing_model
from tests.support.engines import unfinished
from tests.support.golden import GoldenTrace

PAGE_SIZE, BUDGET, ENCODER_BUDGET = 4, 24, 12
TOKEN_BYTES = 3 * 64 * 4
"""Of an embedding of the tiny model: the token's own and two of DeepStack."""
SAID = 500
CONTENT = re.compile(r"\b[0-9a-f]{64}\b")


def record(path: Path) -> None:
    """Steps of 24 tokens, of which the tower makes 12; a cache of 24 embeddings; write the stable trace to `path`.

    A picture of 20 tokens is cut, beside a text that streams, and a clip comes after it. The picture comes again in a
    second turn, whose cached prompt spares everything, and behind another text, where its second piece finds what its
    first one made; of two pictures in one prompt the second must wait for a step that can pay for it.
    """
    params = SamplingParams(max_tokens=4, logit_bias={SAID: 100.0}, ignore_eos=True)
    limits = setting(
        page_size=PAGE_SIZE,
        tokens=256,
        max_num_batched_tokens=BUDGET,
        multimodal={"encoder_budget": ENCODER_BUDGET, "embedding_cache_bytes": 24 * TOKEN_BYTES},
    )
    with TemporaryDirectory() as directory:
        model = ModelConfig(
            model=save_seeing_model(Path(directory)), device="cpu", dtype="float32", attention_backend="torch"
        )
        engine = LLMEngine(model_config=model, **limits)
    with engine:
        engine.tracer.attach(JsonlReader(path, stable=True))  # now: the first events name the model's directory

        def ask(rid: str, conversation: Any) -> None:
            engine.add_request(engine.chat_prompt(conversation), params, request_id=rid)

        def serve() -> None:
            for _ in unfinished(engine):
                engine.step()

        ask("text", asking(1))
        engine.step()
        ask("sees", asking("c", 2))
        ask("clip", asking(3, "v"))
        serve()
        ask("turn", messages((("c", 2), (4,))))
        serve()
        ask("again", asking(5, "c"))
        serve()
        ask("other", asking("b", "a", 6))
        serve()
        assert engine.flush_cache()
    engine.tracer.close()
    path.write_text(named_in_order(path.read_text(encoding="utf-8")), encoding="utf-8")


def named_in_order(trace: str) -> str:
    """The trace with a name for every content: the first that comes, the second, ..."""
    found = {content: f"content {i}" for i, content in enumerate(dict.fromkeys(CONTENT.findall(trace)))}
    return CONTENT.sub(lambda content: found[content.group()], trace)


GOLDEN = GoldenTrace(Path(__file__).parent / "golden" / "pictures.jsonl", record)


@cache
def by_kind() -> dict[str, list[Any]]:
    """The stored events."""
    found: dict[str, list[Any]] = defaultdict(list)
    for event in GOLDEN.stored():
        found[event["event"]].append(event)
    return found


def of(rid: str, kind: str) -> list[Any]:
    """Those of one request."""
    return [event for event in by_kind()[kind] if rid in event.get("rids", (event.get("rid"),))]


def test_the_stored_trace_shows_every_kind_of_decision() -> None:
    found = by_kind()
    new = {"item_received", "positions_assigned", "encoder_run", "encoder_hit", "item_evicted"}
    assert found.keys() >= new | {"matched", "chunk_cut", "batch", "audit", "cache_flushed"}
    assert {event["modality"] for event in found["item_received"]} == {"image", "video"}
    assert {event["mode"] for event in found["batch"]} >= {"extend", "decode", "mixed"}
    assert {event["bound_by"] for event in found["chunk_cut"]} == {"max_num_batched_tokens", "encoder_budget"}
    (cut,) = of("again", "chunk_cut")
    (shown,) = of("again", "item_received")
    assert shown["offsets"][0][0] < cut["start"] + cut["given"] < shown["offsets"][0][1], "inside the picture"
    assert shown["num_tokens"] == 20 > ENCODER_BUDGET
    assert {event["reason"] for event in found["finish"]} == {"length"} and len(found["finish"]) == 6


if __name__ == "__main__":
    GOLDEN.record_again()
