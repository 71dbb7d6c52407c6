"""Who may join a group: an engine that does not fit is refused when it comes, is told why, and disturbs nobody."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from m6_multimodal_pd import ConfigError, EngineLostError
from m6_multimodal_pd.disaggregation.engine import Engine
from m6_multimodal_pd.disaggregation.members import Member, incompatibility, vocabulary_of
from m6_multimodal_pd.disaggregation.runtime.messages import Joined, LengthFixed
from m6_multimodal_pd.model_loader import load_model
from tests.m6_multimodal_pd.engines import greedy
from tests.m6_multimodal_pd.pd_engines import Group, add, engine_of, setting

OURS, OTHERS = "0" * 64, "1" * 64
JOINED = Joined("decode", 16, 4096, 512, "float32[2, 16]", "tiny", OURS)
PROMPT = [5, 6, 7]


# --- what fits --------------------------------------------------------------------------------------------------------


def test_the_first_engine_fits_if_its_tokens_mean_the_same() -> None:
    assert incompatibility(JOINED, [], OURS) is None
    assert "other tokens than the router" in str(incompatibility(JOINED, [], OTHERS))


@pytest.mark.parametrize(
    ("field", "value"), [("page_size", 8), ("layout", "float16[2, 16]"), ("max_model_len", 100), ("model", "another")]
)
def test_what_must_be_the_same_is_compared_with_those_who_are_there(field: str, value: Any) -> None:
    there = [Member("prefill-0", msgspec.structs.replace(JOINED, role="prefill", total_tokens=5), 0.0)]
    assert incompatibility(JOINED, there, OURS) is None, "memory may be of any size"
    why = str(incompatibility(msgspec.structs.replace(JOINED, **{field: value}), there, OURS))
    assert field in why and str(value) in why and str(getattr(JOINED, field)) in why and "prefill-0" in why


def tokenizer_of(model: Path, directory: Path, change: Callable[[dict[str, Any]], None]) -> Any:
    """The tokenizer of a model, with a change in its file."""
    copy = shutil.copytree(model, directory)
    file = copy / "tokenizer.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
    return AutoTokenizer.from_pretrained(copy)


def swap_two_tokens(values: dict[str, Any]) -> None:
    vocabulary = values["model"]["vocab"]
    first, second = [token for token, number in vocabulary.items() if number in (300, 301)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def test_a_vocabulary_is_known_by_what_its_ids_mean(seeing_directory: Path, tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(seeing_directory)
    again = tokenizer_of(seeing_directory, tmp_path / "same", lambda values: None)
    swapped = tokenizer_of(seeing_directory, tmp_path / "swapped", swap_two_tokens)
    assert len(vocabulary_of(own)) == 64
    assert vocabulary_of(own) == vocabulary_of(again) != vocabulary_of(swapped)
    again.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    assert vocabulary_of(own) != vocabulary_of(again)


# --- who does not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"page_size": 8}, "its page_size is 8, and that"),
        ({"kv_cache_dtype": "int8"}, r"int8, and that of prefill-0 is .* float32"),
        ({"kv_cache_dtype": "fp8"}, r"float8_e4m3fn, and that of prefill-0 is .* float32"),
    ],
    ids=["page size", "int8", "fp8"],
)
def test_a_late_engine_that_does_not_fit_is_refused(seeing_directory: Path, changes: Any, why: str) -> None:
    with Group(seeing_directory, is_traced=True, **setting(page_size=4)) as group:
        group.add({"r": (PROMPT, greedy(9), {})})
        group.until(lambda: "r" in group.last)
        config = replace(group.engine.config, cache=replace(group.engine.config.cache, **changes))
        shared = group.engines["decode-0"].side.transport.segments
        add(group.links, "decode-1", partial(engine_of, "decode", config, shared))
        group.run()
        assert set(group.router.members) == set(group.engines) == {"prefill-0", "decode-0"}
        (refused,) = group.listener.events("engine_refused")
        assert (refused.name, refused.role) == ("decode-1", "decode") and re.search(why, refused.why)
        assert not group.listener.events("engine_lost") and not group.num_retries
        assert group.last["r"].finish_reason == "length"
        add(group.links, "decode-1", partial(engine_of, "decode", group.engine.config, shared))
        for _ in range(2):  # it reports its length, then joins
            group.router.receive(0)
        assert set(group.router.members) == {"prefill-0", "decode-0", "decode-1"}, "one that fits may have its name"


def test_engines_that_do_not_fit_do_not_start(seeing_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Engine.joined.fget
    assert before is not None

    def joined(engine: Engine) -> Joined:
        own: Joined = before(engine)
        return msgspec.structs.replace(own, max_model_len=7) if engine.role == "decode" else own

    monkeypatch.setattr(Engine, "joined", property(joined))
    with pytest.raises(ConfigError, match=r"its max_model_len is 7, and that of prefill-0 .*\(on decode-0\)"):
        Group(seeing_directory)


def test_weights_wait_for_no_engine_that_has_the_name_of_one_that_was_lost(seeing_directory: Path) -> None:
    """A supervisor starts it again under its name, while another engine still loads: the new one never got the call."""
    with Group(seeing_directory, parts={"model_loader": load_model}, **setting(page_size=4)) as group:
        links, members = group.links, group.router.members
        prefill, decode = (group.engines[name] for name in ("prefill-0", "decode-0"))
        first, usual, held, num_ticks = members["prefill-0"], decode.tick, list[Any](), count()
        again = partial(engine_of, "prefill", group.engine.config, decode.side.transport.segments)

        def die(messages: Any) -> None:
            links.drop("prefill-0", "it was killed")

        def load_slowly(messages: Any) -> None:
            held.extend(messages)
            assert next(num_ticks) < 99, "somebody waits for ever"
            if "prefill-0" not in links.engines and "prefill-0" not in members:
                add(links, "prefill-0", again)
            elif members.get("prefill-0") not in (None, first):
                usual(held)
                held.clear()

        prefill.tick, decode.tick = die, load_slowly  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineLostError, match="'prefill-0' was lost while it loaded"):
            group.engine.update_weights(seeing_directory)
        assert group.engine.generate(PROMPT, greedy(3)).error is None


def test_the_length_may_be_told_twice_and_the_engine_goes_on(seeing_directory: Path) -> None:
    """An engine accepts a message that comes twice."""
    with Group(seeing_directory, **setting(page_size=4)) as group:
        for engine in group.engines.values():
            engine.tick([LengthFixed(512)])
        assert group.engine.generate(PROMPT, greedy(3)).error is None


def test_an_engine_that_fails_at_its_start_leaves_nothing(
    seeing_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    with Group(seeing_directory, **setting(page_size=4)) as group:
        shared = group.engines["decode-0"].side.transport.segments
        engine = engine_of("decode", group.engine.config, shared, lambda message: None)
        core_type = type(group.engines["decode-0"].core)
        monkeypatch.setattr(core_type, "close", lambda core: closed.append(core))
        monkeypatch.setattr("m6_multimodal_pd.disaggregation.engine.PageStore", lambda kv: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.start(512)
        assert [type(core) for core in closed] == [core_type]
        monkeypatch.undo()
