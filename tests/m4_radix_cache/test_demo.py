"""The demo: right numbers in the sentences of its tour, the flags of all milestones, and no traceback in any end."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from m1_single_request.flags import config_of
from m1_single_request.trace_file import read_trace
from m1_single_request.tracer import TraceRecord
from m4_radix_cache import CacheConfig, SamplingParams, SchedulerConfig, TraceConfig, demo, demo_tour
from m4_radix_cache.demo_tour import RECORDED, Stage, beside_recorded, with_room
from m4_radix_cache.events import Admit, Audit
from m4_radix_cache.views.radix_tree import RadixTreeView
from tests.support.demos import events_of, words

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A screen of 80 columns, and one round where there would be three."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(demo_tour, "ROUNDS", 1)


# --- the tour ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["radix", pytest.param("hash", marks=pytest.mark.exhaustive)])
def test_the_tour_shares_converses_evicts_and_explains(
    cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    assert demo.main(["--cache", cache, "--trace-file", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    for part in (
        "5 users at the same time",
        "req-0: 526 prompt tokens: 0 reused, 526 computed",
        "req-1: 526 prompt tokens: 512 reused, 14 computed",
        "Why req-1 skips 512 tokens: its way through the trace",
        "step 1: Order by lpm, with the tokens that are in the cache: req-0 (0). Held back for a round",
        "step 2: req-1 joins: 14 tokens to compute, 512 more are in the cache.",
        "cache_salt of another tenant: 526 prompt tokens: 0 reused, 526 computed",
        "The code of lamp is 9575. 584 prompt tokens: 560 reused, 24 computed",
        "The code of zebra is 4821. 616 prompt tokens: 592 reused, 24 computed",
        "The first token comes, on average, after",
        "The answers are the same, token for token, all 5 of them.",
        "the KV memory has room for 400",
        "is retracted: the next tokens need",
        "of all are its own output from before it lost its place",
        "evicted, chosen by lru",
        "The first user asks again: 62 prompt tokens: 0 reused, 62 computed. The last one: 62 prompt tokens: 48 reused",
        "400 slots: none is lost, none counted twice",
    ):
        assert part in words(out), part
    assert len(re.findall(r"^(?:tree|table) of \d+ ", out, re.MULTILINE)) == 3
    records = list(read_trace(trace, "m4_radix_cache"))
    kinds = [record.event.kind for record in records]
    assert kinds.count("engine_started") == 2 and {"matched", "inserted", "evicted", "retract", "audit"} <= set(kinds)
    check_last_cache(records)


def test_a_conversation_leaves_the_device_and_comes_back_and_a_later_process_finds_it_on_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--host-memory", "64MiB", "--disk", str(tmp_path / "disk")]
    outs = []
    for _ in range(2):
        assert demo.main(flags) == 0
        out, err = capsys.readouterr()
        assert err == "" and max(map(len, out.splitlines())) <= 80
        outs.append(words(out))
    for out in outs:
        for part in (
            "The device has room for 1,024 tokens, host memory for 64.0 MiB of KV.",
            "584 prompt tokens: 560 on the device, 0 in host memory, 24 computed.",
            "The device evicts 1,664 tokens that stay in host memory; 0 more are discarded.",
            "tree of 11 nodes: 576 tokens cached (0 locked), 448 of 1,024 slots free, 2,240 tokens in host memory",
            "614 prompt tokens: 16 on the device, 576 in host memory, 22 computed.",
            "req-5 finds 576 tokens more in host memory: 4 nodes (2.2 MiB) are copied to the device.",
            "4 nodes with 576 tokens have been copied to the device for req-5: 2.2 MiB in",
            "req-6, without cached KV: 614 prompt tokens: 0 on the device, 0 in host memory, 614 computed.",
            "The answers are the same.",
        ):
            assert part in out, part
    assert "526 prompt tokens: 0 on the device, 0 in host memory, 526 computed." in outs[0]
    assert "read from the disk" not in outs[0] and "has 11.6 MiB of KV" in outs[0]
    for part in (
        "526 prompt tokens: 0 on the device, 512 in host memory (512 of them read from the disk), 14 computed.",
        "The disk has KV of req-0: the pages of its next 512 tokens are read to host memory",
        "ms for the disk: KV of 512 of 512 tokens was read to host memory, of which 512 are new there: node 1.",
    ):
        assert part in outs[1], part


@pytest.mark.parametrize("flags", ["--write-policy write_back", "--host-memory 1MiB", "--page-size 5 --n 2"])
def test_the_tour_of_the_tiers_follows_its_flags(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--host-memory", "64MiB", *flags.split()]) == 0
    out = words(capsys.readouterr().out)
    assert "outlives the process" not in out and "directory" not in out and "The answers are the same." in out
    assert ("0 more are discarded" in out) == ("1MiB" not in flags)
    assert ("copied to the device for req-5" in out) == ("1MiB" not in flags)


def check_last_cache(records: list[TraceRecord]) -> None:
    """At the last audit, the view of all engines of a tour, drawn from its trace file, is the cache of the last one."""
    view, num_cached = RadixTreeView(), []
    for record in records:
        view.read(record)
        if isinstance(record.event, Audit):
            num_cached.append(sum(len(node.token_ids) for node in view.nodes.values()))
            assert num_cached[-1] == record.event.evictable + record.event.protected
    assert num_cached[-1] > 0


@pytest.mark.exhaustive
def test_without_a_cache_nothing_is_shared(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--cache", "chunk", "--num-prompts", "2", "--n", "2"]) == 0
    out = words(capsys.readouterr().out)
    assert out.count(": 0 reused") == 2 + 1 + 4 + 2 and "empty cache: 0 tokens cached" in out
    assert "its way through the trace" not in out
    assert "Each may need up to 160 tokens" in out, "a prompt, and two answers"


def test_a_comparison_follows_its_numbers_beside_the_recorded_ones() -> None:
    recorded = {"fast": 0.01, "slow": 0.02}
    quiet = {"fast": [0.01, 0.012, 0.011], "slow": [0.04, 0.044, 0.05]}
    assert beside_recorded(quiet, recorded, "once on a Xeon") == (
        "11.0 ms fast and 44.0 ms slow, 4.0 times as long. Recorded once on a Xeon: 10.0 ms fast and 20.0 ms slow, 2.0 "
        "times as long."
    )
    disturbed = beside_recorded({"fast": [0.01, 0.02], "slow": [0.01, 0.01]}, recorded, "once on a Xeon")
    assert disturbed.endswith("This run was disturbed, its rounds differ by half: take the recorded times.")


def test_the_recorded_numbers_are_those_of_the_benchmark() -> None:
    table = (
        (ROOT / "benchmarks/results/m4_radix_cache.md").read_text(encoding="utf-8").partition("start:reuse_embedded")
    )
    seconds = dict(re.findall(r"\| m4, (tree|no sharing) \|.*?\| ([\d.]+) s \|", table[2]))
    assert [float(seconds[name]) for name in ("tree", "no sharing")] == list(RECORDED.values())


def stage(*readers: Any) -> Stage:
    return Stage({"trace_config": TraceConfig(readers=readers)}, SamplingParams(), {}, Console(file=io.StringIO()))


def test_all_subjects_run_in_each_round_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_tour, "ROUNDS", 2)
    calls: list[int] = []

    def run(subject: int) -> int:
        calls.append(subject)
        return len(calls)

    assert stage().measured({"a": 1, "b": 2}, run) == {"a": [3, 5], "b": [4, 6]}
    assert calls == [1, 2] * 3


def test_a_reader_of_several_engines_is_closed_at_the_end_of_the_tour() -> None:
    calls: list[str] = []
    reader = SimpleNamespace(read=lambda record: calls.append("read"), close=lambda: calls.append("close"))
    own = stage(reader)
    with own.stack:
        for _ in range(2):
            _, shared = own.readers
            shared.read(TraceRecord(1, 0.0, Admit))  # type: ignore[arg-type]
            shared.close()
    assert calls == ["read", "read", "close"]


# --- flags ------------------------------------------------------------------------------------------------------------


def parsed(flags: str) -> Any:
    return demo.m1.make_parser("m4", demo.__doc__, demo.FLAGS).parse_args(flags.split())


@pytest.mark.parametrize(
    ("flags", "page_size", "tokens", "little"),
    [
        ("", 16, None, 400),
        ("--page-size 5", 5, None, 400),
        ("--max-total-tokens 999", 16, 999, 999),
        ("--kv-cache-memory-bytes 1000000", 16, None, None),
    ],
)
def test_a_size_is_that_of_the_little_memory(flags: str, page_size: int, tokens: int, little: int) -> None:
    config = config_of(parsed(flags), CacheConfig)
    assert (config.page_size, config.max_total_tokens) == (page_size, tokens)
    assert with_room(config, max_total_tokens=demo_tour.LITTLE).max_total_tokens == little


def test_the_flags_reach_the_engine() -> None:
    args = parsed("--cache radix --eviction-policy slru --schedule-policy dfs-weight --max-num-seqs 3 --priority -3")
    assert config_of(args, CacheConfig) == CacheConfig(prefix_cache="radix", eviction_policy="slru")
    assert config_of(args, SchedulerConfig) == SchedulerConfig(max_num_seqs=3, schedule_policy="dfs-weight")
    assert demo.request_options(args) == {"priority": -3, "cache_salt": None}


def test_the_answers_to_a_prompt_share_it_under_the_salt_of_the_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = "--prompt Explain. --n 3 --temperature 1 --max-tokens 4 --trace off --page-size 4 --cache-salt mine"
    assert demo.main([*flags.split(), "--trace-file", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and re.findall(r"^answer (\d)  ", out, re.MULTILINE) == ["0", "1", "2"]
    assert [admit["prefix"] > 0 for admit in events_of(trace, "admit")] == [False, True, True]
    assert {event["extra_key"] for event in events_of(trace, "inserted")} == {"mine"}


def test_a_prompt_has_a_verbose_trace_and_the_number_of_reused_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--prompt", "What is a KV cache?", "--max-tokens", "2"]) == 0
    out = words(capsys.readouterr().out)
    assert "req-0 joins: 18 tokens to compute" in out and "18 prompt tokens: 0 reused, 18 computed" in out


def test_each_answer_of_a_chat_has_the_number_of_reused_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = "What is a KV cache?\nWhat is prefill?\n/reset\nWhat is a KV cache?\n/quit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(asked))
    assert demo.main(["--chat", "--max-tokens", "40"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("model  >") == 3 and "forgotten" in out
    reuse = re.findall(r"^(\d+) prompt tokens: (\d+) reused, (\d+) computed$", out, re.MULTILINE)
    assert reuse == [("18", "0", "18"), ("69", "48", "21"), ("18", "16", "2")]
