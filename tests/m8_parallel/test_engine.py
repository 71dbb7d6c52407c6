"""An engine of several ranks gives the tokens of one process, and every verb of the face works on all of them."""

import json
import random
import sys
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import m6_multimodal_pd
from m1_single_request.errors import ConfigError
from m3_paged_attention.attention import native_library
from m8_parallel import LLMEngine, ParallelConfig
from tests.m8_parallel.conftest import MODELS
from tests.m8_parallel.groups import Group
from tests.m8_parallel.program import answers, configs
from tests.support.amounts import examples

Models = Callable[[str], str]
Groups = Callable[[int], Group]
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "model": MODELS,
    "backend": ("torch", "native"),
    "experts": (False, True),
    "chunks": (False, True),
    "cache": ("radix", "tight", "tiers"),
    "drafts": ("none", "ngram", "draft_model"),
    "late": (False, True),
    "graphs": (False, True),
}
"""`late`: steps overlap, on a device that is late. `graphs`: steps of few tokens are captured."""


def is_possible(case: dict[str, Any]) -> bool:
    """Whether there is such an engine."""
    sees, has_experts = case["model"].startswith("sees"), case["model"].endswith("moe")
    is_captured = not case["graphs"] or case["backend"] == "torch"  # whose kernels become some that can be captured
    return (has_experts or not case["experts"]) and not (sees and case["drafts"] == "draft_model") and is_captured


def pairs_of(case: dict[str, Any]) -> set[Any]:
    """The pairs of values that a case has."""
    return set(combinations(case.items(), 2))


EVERY = [dict(zip(DIMENSIONS, values, strict=True)) for values in product(*DIMENSIONS.values())]
POSSIBLE = [case for case in EVERY if is_possible(case)]


def cases() -> Iterator[dict[str, Any]]:
    """Cases that have every possible pair of values, in an order that is always the same."""
    possible = list(POSSIBLE)
    random.Random(0).shuffle(possible)
    missing = set().union(*map(pairs_of, possible))
    while missing:
        best = max(possible, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        yield best


CASES = list(cases())
BY_NAME = ["-".join(str(value) for value in case.values()) for case in CASES]


def check_same(group: Group, models: Models, case: dict[str, Any]) -> dict[str, Any]:
    if case["backend"] == "native" and native_library.obstacle():
        pytest.skip("no C++ compiler")
    found = group.ask("same", **case | {"model": models(case["model"])})
    assert found["together"] == found["alone"]
    assert found["held"] == 0
    if case.get("graphs"):
        assert found["num_captured"] and found["num_replays"]
    if case.get("late"):
        assert (found["num_behind"] > 0) == (case.get("drafts", "none") == "none")
    return found


def test_two_ranks_answer_as_one_process_and_each_has_its_part(groups: Groups, models: Models) -> None:
    found = check_same(groups(2), models, {"model": "qwen3", "backend": "torch"})
    first, second = found["ranks"]
    assert first["kv_bytes"] == second["kv_bytes"] > 0
    assert first["num_collectives"] == second["num_collectives"] > 100
    whole = sum(path.stat().st_size for path in Path(models("qwen3")).glob("*.safetensors"))
    assert whole * 0.49 < first["weight_bytes"] < whole * 0.55  # the file has a header; norms are whole


def test_one_process_is_an_engine_of_m6(models: Models) -> None:
    model = models("qwen3")
    with LLMEngine(**configs(model, chunks=True)) as engine:
        own = answers(engine, model, times=1)
        assert type(engine.stats()) is m6_multimodal_pd.EngineStats and not torch.distributed.is_initialized()
    with m6_multimodal_pd.LLMEngine(**configs(model, chunks=True)) as engine:
        assert own == answers(engine, model, times=1)
    for wrong, error in (({"tensor_parallel_size": 2}, "there is 1"), ({"expert_parallel": True}, "no effect")):
        with pytest.raises(ConfigError, match=error):
            LLMEngine(**configs(model), parallel_config=ParallelConfig(**wrong))


@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=BY_NAME[:2])
def test_some_ways_at_once(groups: Groups, models: Models, case: dict[str, Any]) -> None:
    check_same(groups(2), models, case)


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("torch", "the torch backend has no thread that runs all layers"),
        ("native", "an all-reduce follows the attention and the MLP of each layer"),
    ],
)
def test_on_cpus_the_trace_says_why_steps_of_ranks_do_not_overlap(
    groups: Groups, models: Models, backend: str, reason: str
) -> None:
    if backend == "native" and native_library.obstacle():
        pytest.skip("no C++ compiler")
    found = groups(2).ask("on_cpus", model=models("qwen3"), backend=backend)
    assert found == {"reasons": [reason], "num_tokens": 12}


@pytest.mark.parametrize("graphs", [False, True])
def test_ranks_launch_a_step_behind_one_in_flight(groups: Groups, models: Models, graphs: bool) -> None:
    found = check_same(groups(2), models, {"model": "qwen3", "backend": "torch", "late": True, "graphs": graphs})
    assert found["num_behind"] > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=BY_NAME)
def test_two_ranks_answer_as_one_process_in_every_pair_of_ways(
    groups: Groups, models: Models, case: dict[str, Any]
) -> None:
    check_same(groups(2), models, case)


@pytest.mark.exhaustive
@settings(max_examples=examples(20))
@given(case=st.sampled_from(POSSIBLE), seed=st.integers(0, 1000))
def test_two_ranks_answer_any_requests_as_one_process(
    groups: Groups, models: Models, case: dict[str, Any], seed: int
) -> None:
    check_same(groups(2), models, case | {"seed": seed})


FOUR = [(case, name) for case, name in zip(CASES, BY_NAME, strict=True) if not case["model"].startswith("sees")][::2]
SEEING = {"model": "sees4", "backend": "torch", "chunks": True, "cache": "tiers", "drafts": "ngram"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*(case for case, _ in FOUR), SEEING], ids=[*(name for _, name in FOUR), "sees"])
def test_four_ranks_answer_as_one_process_though_they_share_kv_heads(
    groups: Groups, models: Models, case: dict[str, Any]
) -> None:
    check_same(groups(4), models, case)


def test_a_step_has_the_collectives_of_the_arithmetic(groups: Groups, models: Models) -> None:
    steps = groups(2).ask("step", model=models("qwen3"), num_requests=4)["steps"]
    num_layers, hidden_size, num_requests = 2, 64, 4
    kinds, sizes = steps[-1]
    assert kinds == ["broadcast"] + ["all-reduce"] * (2 * num_layers + 1) + ["gather", "broadcast"]
    vocab = json.loads((Path(models("qwen3")) / "config.json").read_text("utf-8"))["vocab_size"]
    all_reduce, logits = num_requests * hidden_size * 4, num_requests * -(-vocab // 2) * 4
    assert sizes == [1024, *[all_reduce] * (2 * num_layers + 1), logits, 1024]


def test_so_it_has_in_a_graph_and_a_capture_is_not_counted(groups: Groups, models: Models) -> None:
    eager, replayed = (
        groups(2).ask("step", model=models("qwen3"), num_requests=4, graphs=graphs)["steps"] for graphs in (False, True)
    )
    assert eager == replayed


@pytest.mark.parametrize(
    ("model", "backend", "int8"),
    [
        ("wide", "torch", "weights"),
        *(
            pytest.param(model, backend, int8, marks=pytest.mark.exhaustive)
            for model, backend, int8 in product(("wide", "wide_moe"), ("torch", "native"), ("weights", "kv"))
        ),
    ],
)
def test_ranks_quantise_as_one_process(groups: Groups, models: Models, model: str, backend: str, int8: str) -> None:
    for experts in (False, True) if model == "wide_moe" else (False,):
        case = {"model": models(model), "backend": backend, "int8": int8, "experts": experts}
        found = groups(2).ask("logprobs", **case)
        for together, alone in zip(found["found"], found["alone"], strict=True):
            # the last bit of a sum may round a stored key or value to its neighbour: a step of 1 / 127
            assert together == pytest.approx(alone, abs=1e-3 if int8 == "weights" else 2e-2)


@pytest.mark.parametrize("late", [False, True])
def test_several_outputs_end_together_on_all_ranks(groups: Groups, models: Models, late: bool) -> None:
    found = groups(2).ask("end", model=models("qwen3"), late=late)
    assert found["together"] == found["alone"]
    *aborted, ends, held = found["together"]
    assert (aborted, held) == ([True, True, True], 0)
    assert [ends[rid][0] for rid in ("several", "waits", "later")] == ["abort"] * 3
    assert sum(map(len, ends["several"][1])) > 0


@pytest.mark.parametrize("late", [False, True])
def test_a_request_whose_output_cannot_be_made_ends_on_all_ranks(groups: Groups, models: Models, late: bool) -> None:
    found = groups(2).ask("spoil", model=models("qwen3"), late=late)
    assert found["together"] == found["alone"]
    (_, kept, _), (_, spoilt, _), *_ = found["together"]
    assert (kept, spoilt) == ("None", "no words for this token")


@pytest.mark.exhaustive
@pytest.mark.parametrize("late", [False, True])
def test_each_rank_reads_images_in_processes_of_its_own(groups: Groups, models: Models, late: bool) -> None:
    found = groups(2).ask("read", model=models("sees"), late=late)
    assert found["together"] == found["alone"]
    assert found["together"][2:4] == [["InvalidMediaError"], ["InvalidMediaError"]]


@pytest.mark.exhaustive
def test_messages_to_ranks_are_as_large_as_requests(groups: Groups, models: Models) -> None:
    found = groups(2).ask("many", model=models("sees"))
    assert found["together"] == found["alone"]


def test_an_engine_that_nobody_closes_ends_on_all_ranks(groups: Groups, models: Models) -> None:
    first, second = groups(2).ask("forget", model=models("qwen3"))["found"]
    assert first == second and len(first) == 12


def test_ranks_with_whole_experts_trace_those_of_all(groups: Groups, models: Models) -> None:
    found = groups(2).ask("chosen", model=models("qwen3_moe"))
    assert found["together"] == found["alone"] != []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["before", "between", "sample"])
def test_a_step_that_fails_on_one_rank_fails_on_all_and_the_engine_goes_on(
    groups: Groups, models: Models, rank: int, where: str
) -> None:
    found = groups(2).ask("fail", model=models("qwen3"), rank=rank, where=where)
    assert "no memory left" in found["error"]
    assert rank == 0 or "on rank 1" in found["error"]
    assert found["num_groups"] == 1 or sys.platform != "linux"  # threads of the one before have ended
    assert found["together"] == found["alone"]
    assert found["held"] == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["before", "queued", "sample"])
def test_a_launched_step_that_fails_on_one_rank_fails_on_all(
    groups: Groups, models: Models, rank: int, where: str
) -> None:
    found = groups(2).ask("fail", model=models("qwen3"), rank=rank, where=where, late=True)
    assert "no memory left" in found["error"]
    assert found["together"] == found["alone"]
    assert found["held"] == 0


def test_a_part_of_a_step_ends_on_no_rank_before_it_has_ended_on_all(groups: Groups) -> None:
    (error,) = groups(2).ask("apart")["errors"]
    assert "no memory left" in error and "on rank 1" in error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_for_logits_fails_the_step_on_all_where_a_gather_is_only_queued(
    groups: Groups, models: Models, rank: int
) -> None:
    found = groups(2).ask("fail", model=models("qwen3"), rank=rank, where="logits", queued=True)
    assert "no memory left" in found["error"]
    assert found["together"] == found["alone"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_whose_penalties_cannot_be_counted_on_one_rank_fails_on_all(
    groups: Groups, models: Models, rank: int
) -> None:
    found = groups(2).ask("fail", model=models("qwen3"), rank=rank, where="counted", late=True)
    assert "no memory left" in found["error"]
    assert found["together"] == found["alone"]
    assert found["held"] == 0


def test_a_host_that_waits_in_c_learns_that_another_rank_has_left_the_step(groups: Groups, models: Models) -> None:
    found = groups(2).ask("blocked", model=models("qwen3"))
    assert "no memory left" in found["error"] and "on rank 1" in found["error"]
    assert found["seconds"] < 10
    assert found["together"] == found["alone"]


@pytest.mark.parametrize("late", [False, True])
def test_after_an_error_steps_are_captured_again_when_none_is_in_flight(
    groups: Groups, models: Models, late: bool
) -> None:
    found = groups(2).ask("fail", model=models("qwen3"), rank=1, where="before", graphs=True, late=late)
    assert "no memory left" in found["error"]
    assert found["together"] == found["alone"]
    before, after = found["num_graphs"]
    assert after == 2 * before and sum(found["num_replays"][before:]) > 10
    assert found["captured_between_steps"] == [True]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "error"), [("step", "no memory for a graph"), ("all-reduce", "no such operation in a capture")]
)
def test_steps_that_one_rank_cannot_capture_run_eagerly_on_all_and_are_not_captured_again(
    groups: Groups, models: Models, rank: int, what: str, error: str
) -> None:
    found = groups(2).ask("uncapturable", model=models("qwen3"), rank=rank, what=what)
    assert "no memory left" in found["error"]
    assert found["together"] == found["alone"]
    assert found["num_replays"] == 0 and found["tries"] == ["target"]
    (reason,) = found["reasons"]
    assert error in reason and (rank == 0 or "on rank 1" in reason)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_draft_model_that_one_rank_cannot_capture_leaves_the_graphs_of_the_target(
    groups: Groups, models: Models, rank: int
) -> None:
    found = groups(2).ask("uncapturable", model=models("qwen3"), rank=rank, what="draft")
    assert "no memory left" in found["error"]
    assert found["together"] == found["alone"]
    assert found["num_replays"] > 0
    captured, unavailable = ["graphs_captured", "target"], ["graphs_unavailable", "draft"]
    assert found["events"] == [captured, unavailable, captured, captured]  # the last one is behind the error


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("where", ["before", "between", "sample", "drafts"])
def test_so_it_does_with_more_ranks_chunks_and_drafts(groups: Groups, models: Models, size: int, where: str) -> None:
    for rank in (0, size - 1):
        found = groups(size).ask(
            "fail", model=models("qwen3"), rank=rank, where=where, chunks=True, drafts="draft_model"
        )
        assert "no memory left" in found["error"]
        assert found["together"] == found["alone"]


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_every_verb_of_the_face_works_on_all_ranks(groups: Groups, models: Models, tmp_path: Path, late: bool) -> None:
    found = groups(2).ask("use", model=models("qwen3"), other=models("qwen3-other"), folder=str(tmp_path), late=late)
    assert found["other"] == found["alone"] != found["first"]
    assert found["again"] == found["first"]
    assert found["flushed"] is True
    assert len(found["profiles"]) == 2 and all(Path(name).is_file() for name in found["profiles"])
    assert [error.partition(":")[0] for error in found["errors"]] == [
        "EngineUsageError",
        "ModelLoadError",
        *["ConfigError"] * 3,
    ]
    assert {path.name for path in tmp_path.glob("*.json*")} == {"trace.json", "trace.jsonl", "trace.rank-1.jsonl"}
    events = json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    bars: dict[int, list[Any]] = {}
    for event in events:
        if event.get("name") == "all-reduce":
            bars.setdefault(event["pid"], []).append(event)
    first, second = bars.values()
    assert len(first) == len(second) and all(each["args"]["bytes"] for each in first)
    apart = [abs(a["ts"] + a["dur"] - b["ts"] - b["dur"]) for a, b in zip(first, second, strict=True)]
    assert sorted(apart)[len(apart) // 2] < 50_000  # they end together, in microseconds


def test_a_later_engine_finds_kv_on_the_disks_of_all_ranks(groups: Groups, models: Models, tmp_path: Path) -> None:
    first, second = groups(2).ask("restart", model=models("qwen3"), disk=str(tmp_path))["found"]
    assert first[0] == second[0]
    assert (first[1], second[1] > 0) == (0, True)
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0-of-2", "rank-1-of-2"}


def test_settings_that_ranks_cannot_follow_are_refused_on_all(groups: Groups, models: Models) -> None:
    size, experts, other, traced = groups(2).ask("wrong", model=models("qwen3"))["found"]
    assert size == (
        "ConfigError: tensor_parallel_size=3 needs as many ranks, and there are 2: start the program with "
        "`torchrun --nproc-per-node 3`"
    )
    assert experts.startswith("ConfigError") and "it has no experts" in experts
    assert other.startswith("ConfigError: all ranks need the same scheduler_config: rank 0 has {")
    assert traced == "ConfigError: all ranks need the same number of Chrome traces: rank 0 has 1, and rank 1 has 0"


@pytest.mark.exhaustive
@pytest.mark.parametrize("late", [False, True])
def test_ranks_that_decide_differently_end_the_job_with_both_decisions(
    models: Models, tmp_path: Path, late: bool
) -> None:
    group = Group(2, tmp_path / "group")
    try:
        for error in group.ask("differ", model=models("qwen3"), late=late)["errors"]:
            assert error.startswith("RanksDifferError: in step 1 the ranks have decided differently")
            assert "rank 0 runs req-0 (16 tokens of 21)" in error and "rank 1 runs req-1 (" in error
        group.process.wait(60)
        assert group.process.returncode
    finally:
        group.close()
