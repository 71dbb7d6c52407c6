"""Engines that do both: a group of one answers as an engine without a group, and two share the requests."""

from pathlib import Path
from typing import Any

import pytest

from m6_multimodal_pd import ConfigError, EngineLostError, SamplingParams
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.runtime.messages import Generate
from tests.m6_multimodal_pd.engines import greedy
from tests.m6_multimodal_pd.pd_engines import Asked, Group, aggregated, check_alike, setting
from tests.m6_multimodal_pd.seeing import asking

ASKED: Asked = {
    "text": (asking(1, 2), greedy(12), {}),
    "image": (asking("a", 1), greedy(8, logprobs=2), {}),
    "several": (asking(3, "c", "b"), greedy(6, logprobs=0, prompt_logprobs=1), {}),
    "family": (asking("b", 4), greedy(5, temperature=1.0, top_p=0.9, n=3, seed=5), {"priority": 1}),
    "unseeded": (asking("d", 7), greedy(6, temperature=1.0, logprobs=1), {"cache_salt": "s"}),
    "words": ("What is a KV cache?", greedy(10, prompt_logprobs=2), {}),
    "eos": (asking(2, 3), SamplingParams(max_tokens=20), {}),
}


def both_of(model: Path, number: int, **group: Any) -> Group:
    """A group of engines that do both, in this process."""
    return Group(model, group={"both": number, **group})


@pytest.mark.parametrize("number", [1, 2])
def test_a_group_of_engines_that_do_both_answers_as_one_engine(seeing_directory: Path, number: int) -> None:
    with both_of(seeing_directory, number) as group:
        group.run(ASKED)
        check_alike(group.last, aggregated(seeing_directory, ASKED))
        assert {name for name, _ in group.wire.sent if name.startswith("both")} == set(group.engines)
        assert len(group.wire.commands(Generate)) == len(ASKED) + 2
        group.check_flushed()


def test_a_request_of_a_lost_engine_continues_on_the_other(seeing_directory: Path) -> None:
    wanted = aggregated(seeing_directory, ASKED)
    with both_of(seeing_directory, 2) as group:
        group.add(ASKED, num_steps=3)
        group.lose("both-0")
        check_alike(group.run(), wanted)
        assert group.num_retries > 0
        group.check_flushed()


def test_without_an_engine_a_request_ends_with_the_loss(seeing_directory: Path) -> None:
    with both_of(seeing_directory, 1) as group:
        group.add({"long": (asking(1), greedy(200), {})}, num_steps=3)
        group.lose("both-0")
        group.until(lambda: not group.engine.has_unfinished_requests())
        assert isinstance(group.last["long"].error, EngineLostError)


def test_an_aborted_request_frees_everything(seeing_directory: Path) -> None:
    with both_of(seeing_directory, 1) as group:
        group.add({"long": (asking(1), greedy(200), {})}, num_steps=3)
        group.engine.abort_request("long")
        group.run()
        assert group.last["long"].finish_reason == "abort"
        group.check_flushed()


def test_requests_that_wait_in_an_engine_are_counted_as_waiting(seeing_directory: Path) -> None:
    with Group(seeing_directory, group={"both": 1}, **setting(2)) as group:
        group.add({f"{number}": (asking(number), greedy(30), {}) for number in range(5)}, num_steps=3)
        stats = group.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (2, 3)
        group.run()
        stats = group.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_an_engine_makes_texts_for_stop_strings_alone(seeing_directory: Path) -> None:
    """The router makes all others."""
    asked: Asked = {"ids": (asking(1), greedy(30), {}), "stop": (asking(1), greedy(30, stop=["no such text"]), {})}
    with both_of(seeing_directory, 1) as group:
        group.add(asked, num_steps=12)
        requests = dict(group.engines["both-0"].core.scheduler.requests)
        group.run()
        num_read = {rid: req.sequence.detokenizer.reading.end for rid, req in requests.items()}
        assert num_read["ids"] == 0 < num_read["stop"]


def test_prompts_with_cached_tokens_are_counted_as_in_one_engine(seeing_directory: Path) -> None:
    with both_of(seeing_directory, 1) as group:
        asked: Asked = {"first": (list(range(5, 69)), greedy(2), {})}
        group.run(asked)
        group.run({"again": asked["first"]})
        assert group.last["first"].metrics.cached_tokens == 0
        assert group.last["again"].metrics.cached_tokens > 32


@pytest.mark.parametrize("settings", [{"prefill": 2}, {"decode": 2}])
def test_other_roles_have_no_effect_beside_engines_that_do_both(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="have no effect"):
        DisaggregationConfig(both=1, **settings)  # type: ignore[arg-type]


def test_engines_that_do_both_have_devices() -> None:
    group = DisaggregationConfig(both=2, devices="cuda:0,cuda:1")
    assert [group.device_of(name) for name in ("both-0", "both-1", "both-1_3")] == ["cuda:0", "cuda:1", "cuda:1"]
    with pytest.raises(ConfigError, match=r"2 engines \(both=2\)"):
        DisaggregationConfig(both=2, devices="cuda:0")
