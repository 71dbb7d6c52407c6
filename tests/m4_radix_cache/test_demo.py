"""The demo, run as a reader runs it: the tour, its facts, the flags of all milestones, and no traceback."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from m1_single_request.errors import EngineError
from m1_single_request.tracer import TraceRecord
from m4_radix_cache import CacheConfig, LLMEngine, SamplingParams, SchedulerConfig, TraceConfig, demo
from m4_radix_cache.demo_parts import cache_notes, measure as measuring, stories
from m4_radix_cache.demo_parts.cache_notes import CacheNotes
from m4_radix_cache.demo_parts.conversation import Turn, answer_tokens, of_answers, show_chat
from m4_radix_cache.demo_parts.little_memory import LITTLE, show_little_memory
from m4_radix_cache.demo_parts.measure import WITH, WITHOUT, Measured, measure
from m4_radix_cache.demo_parts.stage import Settings, Stage, faster
from m4_radix_cache.demo_parts.tour import kept_open
from m4_radix_cache.demo_parts.users import several, show_users
from m4_radix_cache.events import Admit, Audit, Matched, PolicyOrder, Retract
from m4_radix_cache.mem_cache.events import DuplicatesFreed, Evicted
from m4_radix_cache.tree_view import TreeView
from tests.m4_radix_cache.engines import MakeEngine, setting


def words(text: str) -> str:
    """A text without its line breaks: the console makes them where it likes."""
    return " ".join(text.split())


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A screen of 80 columns, and one round where there would be three."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(measuring, "ROUNDS", 1)


# --- the tour ---------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_tour_shares_converses_evicts_and_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    assert demo.main(["--trace-file", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    said = words(out)
    for part in (
        "5 users, all at the same time",
        "The first 502 are the same for all",
        "Why req-1 skips 496 tokens: its way through the trace",
        "req-1 joins: 18 tokens to compute, 496 more are in the cache",
        "cache_salt 'another tenant'",
        "The prompts of part 1 have 2,573 tokens in all. The KV of 1,984 was in the cache",
        "Step 1 lets only req-0 begin: req-1, req-2, req-3 and req-4 would compute the same tokens",
        "From step 2 on they begin and find 496 tokens each",
        "0 of its 515 tokens were found",
        "514 prompt tokens: 0 reused, 514 computed.",
        "The user takes turn 3 back",
        "572 prompt tokens: 544 reused, 28 computed. The last 30 reused are of the answer to turn 1.",
        "reused 1,696 of 1,788 prompt tokens, and computed at most 36 for a turn",
        "38 are of the answer just before",
        "With and without the cache 5 answers of 5 are the same",
        "slots are missing. Of what nobody uses,",
        "is retracted",
        "nothing that it had said is lost",
        "the least recently used first (lru)",
        "the user of req-0 asks once more: of 69 tokens none is cached",
        "the user of req-5 asks once more: of 71 tokens 64 are still cached, 7 must be computed",
        "The memory was audited after each of",
    ):
        assert part.lower() in said.lower(), part
    assert re.search(r"req-1 [a-z ]*496 of (its )?514 tokens", said), "the trace's own words"
    for answer in ("The code of lamp is 2175.", "The code of zebra is 4821.", "Prefix caching keeps the KV"):
        assert answer in said, "a wrong page would show in what is said"
    table = re.findall(r"^(req-\d) .* (\d+) +(\d+) +(\d+) +[\d.]+ ms +[\d.]+ ms", out, re.MULTILINE)
    assert [row[1:] for row in table] == [("515", "0", "515"), *[("514", "496", "18"), ("515", "496", "19")] * 2]
    assert len(re.findall(r"^turn \d .* ms", out, re.MULTILINE)) == 4
    assert len(re.findall(r"^tree of \d+ nodes: ", out, re.MULTILINE)) == 6, "one a part, and one for each turn"
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds.count("engine_started") == 2, "both engines write to the file; those that are measured do not"
    assert {"matched", "inserted", "split", "locked", "evicted", "retract", "policy_order", "admit"} <= set(kinds)
    assert kinds.count("finish") == 6 + 4 + 8


# --- its parts on a tiny model, which says nonsense: only the numbers count -------------------------------------------


class Parts:
    """Runs parts of the tour on engines around a tiny model."""

    def __init__(self, make_engine: MakeEngine) -> None:
        self.make_engine = make_engine
        self.console = Console(file=io.StringIO(), width=80)

    def stage(self, params: SamplingParams | None = None, *, num_users: int = 3, **changes: Any) -> Stage:
        notes, view, few = CacheNotes(), TreeView(), SamplingParams(max_tokens=8, ignore_eos=True)
        self.config = setting(**{"max_num_seqs": 8, "page_size": 16} | changes)
        engine = self.make_engine(**self.config, trace_config=TraceConfig(readers=(notes, view)))
        settings = Settings(
            model=engine.config.model,
            scheduler=self.config["scheduler_config"],
            little_scheduler=self.config["scheduler_config"],
            cache=self.config["cache_config"],
            little_cache=self.config["cache_config"],
            trace=TraceConfig(),
            params=params or few,
            num_users=num_users,
            num_answers=1,
        )
        return Stage(engine, notes, view, settings, self.console)

    def rivals(self) -> dict[str, LLMEngine]:
        own = self.config["cache_config"]
        chunk = replace(own, prefix_cache="chunk", eviction_policy="lru")
        scheduler = self.config["scheduler_config"]
        return {
            name: self.make_engine(scheduler_config=scheduler, cache_config=config)
            for name, config in {WITH: own, WITHOUT: chunk}.items()
        }

    @property
    def out(self) -> str:
        return words(self.console.file.getvalue())  # type: ignore[attr-defined]


@pytest.fixture
def parts(make_engine: MakeEngine) -> Parts:
    return Parts(make_engine)


def test_prompts_are_as_long_as_the_engine_takes(make_engine: MakeEngine) -> None:
    for limit in (80, 120, 250):
        engine = make_engine(**setting(), max_model_len=limit)
        lengths = [len(ask.token_ids) for ask in stories.users(engine, 6)]
        assert max(lengths) <= limit and len(stories.system_prompt(engine)) > 0
    assert [ask.title for ask in stories.users(engine, 8)][:2] == [ask.title for ask in stories.users(engine, 8)][6:]


def test_without_a_cache_nothing_is_said_to_be_shared(parts: Parts) -> None:
    stage = parts.stage(cache="chunk")
    said = words(" ".join(show_users(stage, {WITHOUT: parts.rivals()[WITHOUT]})))
    assert "nothing was found in a cache" in said and "times as long" not in said and "another tenant" not in said
    assert "nothing is shared" in parts.out and "empty cache: 0 tokens cached" in parts.out
    assert "skips" not in parts.out and parts.out.count("TTFT question") == 1, "one column of times"


def test_users_who_come_in_order_compute_the_same_twice(parts: Parts) -> None:
    stage = parts.stage(policy="fcfs")
    said = words(" ".join(show_users(stage, parts.rivals())))
    assert "req-1 and req-2 computed tokens that another request computed meanwhile." in said
    assert "held back" not in said
    assert "all of them were computed" in said.lower()


def test_several_answers_to_one_prompt_share_it(parts: Parts) -> None:
    stage = parts.stage()
    stage = replace(stage, settings=replace(stage.settings, num_answers=3))
    show_users(stage, parts.rivals())
    assert all(f"req-2/{n} " in parts.out for n in range(3))
    admits = stage.notes.first_admits()
    assert admits["req-2/1"][1].prefix > admits["req-2/0"][1].prefix, "the siblings find the whole prompt"


def test_several_greedy_answers_are_drawn() -> None:
    params = SamplingParams(max_tokens=9)
    assert several(params, 1) == params and several(params, 3).temperature == 1.0 and several(params, 3).n == 3
    drawing = SamplingParams(temperature=0.5, seed=1)
    assert several(drawing, 2) == replace(drawing, n=2)


def test_a_conversation_that_becomes_too_long_ends(parts: Parts, make_engine: MakeEngine) -> None:
    parts.make_engine = lambda **config: make_engine(**config, max_model_len=110)  # type: ignore[assignment, misc]
    said = show_chat(parts.stage(), parts.rivals())
    assert "The conversation ends: " in parts.out and "turn 1 " in parts.out and "turn 4 " not in parts.out
    assert all("turn" not in fact or "reused" in fact or "later" in fact for fact in said)


def test_little_memory_that_is_enough_is_not_said_to_be_too_little(parts: Parts) -> None:
    assert show_little_memory(parts.stage()) == []
    assert "Nothing was evicted, and no request was retracted." in parts.out


@pytest.mark.parametrize("cache", ["radix", "hash"])
def test_little_memory_evicts(parts: Parts, cache: str) -> None:
    (evicted, *_) = show_little_memory(parts.stage(tokens=160, cache=cache))
    assert "cached tokens had to go" in evicted
    assert ("page " in parts.out.split("go, the least")[1]) == (cache == "hash")


# --- what is said -----------------------------------------------------------------------------------------------------


def heard(*told: tuple[int, Any]) -> CacheNotes:
    notes = CacheNotes()
    for step, event in told:
        notes.read(TraceRecord(step, 0.0, event))
    return notes


def admit(rid: str, prefix: int, extend: int, num_output_tokens: int = 0) -> Admit:
    return Admit(
        rid=rid, prefix=prefix, extend=extend, num_output_tokens=num_output_tokens, need=9, rem_total=99, cur_rem=99,
        rem_input=99, evictable=0, result="continue", node=0, num_waiting=0,
    )  # fmt: skip


def order(*rids: str, held: int) -> PolicyOrder:
    return PolicyOrder(policy="lpm", active="lpm", rids=rids, num_held_back=held, num_retracted=0, hits=())


def evicted(asked: int, *counts: int) -> Evicted:
    return Evicted(
        asked=asked, freed=sum(counts), nodes=tuple(range(1, len(counts) + 1)), token_counts=counts, strategy="lru",
        evictable=0, protected=0,
    )  # fmt: skip


def test_nothing_is_said_where_there_is_nothing_to_say() -> None:
    facts = (cache_notes.shared, cache_notes.took_turns, cache_notes.computed_twice)
    facts += (cache_notes.evictions, cache_notes.retractions)
    assert [fact(heard()) for fact in facts] == [None] * 5 and cache_notes.audits(heard(), heard()) is None
    assert faster("Here", {WITHOUT: Measured([1.0], [])}) is None and of_answers([], 4) is None


def test_what_was_shared_is_counted_once_for_each_request() -> None:
    notes = heard((1, admit("a", 0, 100)), (2, admit("b", 80, 20)), (9, admit("b", 96, 9, num_output_tokens=5)))
    assert cache_notes.shared(notes) == (
        "The prompts of part 1 have 200 tokens in all. The KV of 80 was in the cache when its turn came; 120 were "
        "computed, 60%."
    )


def test_who_waited_is_told_with_what_it_found() -> None:
    one = heard((1, order("a", "b", held=1)), (1, admit("a", 0, 9)), (3, admit("b", 8, 1)))
    assert cache_notes.took_turns(one) == (
        "They came at the same time, so the cache had nothing for any of them. Step 1 lets only a begin: b would "
        "compute the same tokens, and is held back (lpm). From step 3 on it begins and finds 8 tokens each that need "
        "not be computed."
    )
    never = heard((1, order("a", "b", held=1)), (1, admit("a", 0, 9)))
    assert (cache_notes.took_turns(never) or "").endswith("is held back (lpm).")
    twice = heard((1, DuplicatesFreed(rid="b", start=0, num_tokens=8)))
    assert cache_notes.took_turns(twice) is None and "8 slots of such" in (cache_notes.computed_twice(twice) or "")


def test_a_retraction_is_told_with_its_return() -> None:
    loss = Retract(rid="c", num_tokens=96, num_output_tokens=26, needed=32, available=0, new_token_ratio=1.0)
    assert cache_notes.retractions(heard((7, loss))) == (
        "Step 7 retracts c: 32 slots are needed, 0 are free or evictable, and it has said least, 26 tokens."
    )
    back = cache_notes.retractions(heard((1, admit("c", 0, 70)), (7, loss), (8, admit("c", 64, 33, 26)), (9, loss)))
    assert back is not None and "1 step later it is back and finds 64 of its 97 tokens" in back
    assert back.endswith("In all there were 2 retractions.")


def test_an_eviction_names_what_went() -> None:
    texts = {1: "<|im_start|>user\\nWhat is LRU?<|im_end|>"}
    assert cache_notes.evicted_texts(evicted(1, 16), texts) == (
        "1 slot is missing. Of what nobody uses, 16 tokens go, the least recently used first: "
        '"user\\nWhat is LRU?" (16).'
    )
    many = cache_notes.evicted_texts(evicted(60, *[16] * 5), {})
    assert many.endswith("page 1 (16), page 2 (16), page 3 (16) and 2 more.")


def test_an_audit_that_fails_is_not_praised() -> None:
    sound = Audit(available=6, evictable=2, protected=1, owned=1, total=10)
    assert "after each of 2 steps" in (cache_notes.audits(heard((1, sound)), heard((1, sound))) or "")
    said = cache_notes.audits(heard((1, sound)), heard((1, replace(sound, owned=0))))
    assert said is not None and "1 slot lost" in said and "audited" not in said


def test_why_tells_the_last_look_before_a_request_ran(make_engine: MakeEngine) -> None:
    notes = CacheNotes()
    engine = make_engine(**setting(max_num_seqs=1, page_size=4), trace_config=TraceConfig(readers=(notes,)))
    for _ in range(2):
        engine.add_request(list(range(5, 14)), SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    told = [sentence for _, sentence in cache_notes.why(notes, "req-1")]
    assert told[-1].startswith("Extend batch of 1 request") and not any("req-0 joins" in sentence for sentence in told)
    look, again = (Matched(rid="a", query_len=9, limit=8, device_hit=hit, host_hit=0) for hit in (4, 8))
    notes = heard((1, look), (2, again), (2, admit("b", 0, 1)), (2, admit("a", 8, 1)))
    assert cache_notes.why(notes, "a") == [(2, again.explain()), (2, admit("a", 8, 1).explain())]


def test_the_gain_is_said_as_it_was() -> None:
    def said(with_cache: float, without: float) -> str:
        return faster("Here", {WITH: Measured([with_cache], []), WITHOUT: Measured([without], [])}) or ""

    assert said(0.01, 0.04) == (
        "Here the first token came after 10.0 ms with the cache, on average, and after 40.0 ms without: 4.0 times as "
        "long."
    )
    assert said(0.04, 0.04).endswith("the cache gained nothing here.") and said(0.05, 0.04).endswith("nothing here.")
    two = {WITH: Measured([9.0, 0.01], []), WITHOUT: Measured([9.0, 0.02], [])}
    assert "2.0 times as long" in (faster("Here", two, [1]) or "") and faster("Here", two, []) is None


def turn(prompt: list[int], answer: tuple[int, ...], reused: int, before: int | None) -> Turn:
    output: Any = SimpleNamespace(token_ids=answer, request_id="req")
    return Turn(stories.Ask("?", prompt), before, output, reused)


def test_only_what_the_model_said_counts_as_its_answer() -> None:
    first = turn([1, 2, 3], (7, 8, 9), 0, None)
    second = turn([1, 2, 3, 7, 8, 5, 5], (6,), 5, 0)
    assert answer_tokens(first, second) == 2, "behind its prompt, as far as it stands in the next one"
    assert answer_tokens(first, replace(second, reused=4)) == 1 and answer_tokens(first, replace(second, reused=2)) == 0
    assert of_answers([first, second], 4) == (
        "After its first turn the conversation reused 5 of 7 prompt tokens, and computed at most 2 for a turn: the new "
        "question, and what did not fill a page of 4 before it. Of those reused, 2 are of the answer just before: what "
        "the model says is kept, too."
    )
    assert of_answers([first, replace(second, reused=0)], 4) is None


# --- measuring --------------------------------------------------------------------------------------------------------


def test_engines_take_turns_from_an_empty_cache_and_the_first_round_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "ROUNDS", 3)
    calls: list[str] = []

    def engine(name: str) -> Any:
        return SimpleNamespace(name=name, flush_cache=lambda: calls.append(f"flush {name}"))

    seconds = iter([100.0, 100.0, 3.0, 30.0, 1.0, 10.0, 2.0, 20.0])

    def run(rival: Any) -> list[Any]:
        calls.append(rival.name)
        metrics = SimpleNamespace(time_to_first_token=next(seconds))
        return [SimpleNamespace(error=None, metrics=metrics, outputs=[SimpleNamespace(token_ids=(4,))])]

    measured = measure({"a": engine("a"), "b": engine("b")}, run)
    assert calls == ["flush a", "a", "flush b", "b"] * 4
    assert measured["a"] == Measured([2.0], [((4,),)]) and measured["b"].seconds_to_first_token == [20.0]


def test_a_request_that_fails_ends_the_tour() -> None:
    failed = SimpleNamespace(error=ValueError("no"), request_id="req-0")
    with pytest.raises(EngineError, match="req-0 failed: no"):
        measuring.checked([failed])  # type: ignore[list-item]


def test_a_reader_of_several_engines_is_closed_by_the_last() -> None:
    calls: list[str] = []
    reader = SimpleNamespace(read=lambda record: calls.append("read"), close=lambda: calls.append("close"))
    with kept_open(reader) as shared:
        shared.close()
        shared.read(TraceRecord(1, 0.0, order("a", held=0)))
        shared.close()
    assert calls == ["read", "close"]


# --- flags ------------------------------------------------------------------------------------------------------------


def parsed(flags: str) -> Any:
    return demo.make_parser().parse_args(flags.split())


@pytest.mark.parametrize(
    ("flags", "page_size", "tokens", "little"),
    [
        ("", 16, None, LITTLE),
        ("--page-size 5", 5, None, 420),
        ("--block-size 5", 5, None, 420),
        ("--num-blocks 50", 16, 800, 800),
        ("--block-size 4 --num-blocks 50", 4, 200, 200),
        ("--max-total-tokens 999", 16, 999, 999),
        ("--kv-cache-memory-bytes 1000000", 16, None, None),
    ],
)
def test_a_size_is_that_of_the_little_memory(
    flags: str, page_size: int, tokens: int | None, little: int | None
) -> None:
    config = demo.cache_config(parsed(flags))
    assert (config.page_size, config.max_total_tokens) == (page_size, tokens)
    assert demo.little(config).max_total_tokens == little and demo.little(config).debug
    plenty = demo.plenty(config)
    assert plenty.max_total_tokens is not None and 0 <= plenty.max_total_tokens - demo.PLENTY < page_size
    assert plenty.kv_cache_memory_bytes is None and plenty.page_size == page_size


def test_the_flags_reach_the_engine() -> None:
    args = parsed("--cache radix --eviction-policy slru --schedule-policy dfs-weight --max-num-seqs 3")
    assert demo.cache_config(args) == CacheConfig(prefix_cache="radix", eviction_policy="slru")
    assert demo.scheduler_config(args) == SchedulerConfig(max_num_seqs=3, schedule_policy="dfs-weight")
    assert demo.scheduler_config(args, conservativeness=0.1).schedule_conservativeness == 0.1
    given = parsed("--schedule-conservativeness 0.5")
    assert demo.scheduler_config(given, conservativeness=0.1).schedule_conservativeness == 0.5
    assert demo.request_options(parsed("--priority -3 --cache-salt x")) == {"priority": -3, "cache_salt": "x"}


def test_a_prompt_is_answered_by_n_who_share_it_in_the_namespace_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = "--prompt Explain. --n 3 --temperature 1 --max-tokens 4 --trace off --page-size 4 --cache-salt mine"
    assert demo.main([*flags.split(), "--trace-file", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and re.findall(r"^answer (\d)  ", out, re.MULTILINE) == ["0", "1", "2"]
    found = re.search(r"(\d+) prompt tokens: (\d+) reused, (\d+) computed", out)
    assert found is not None
    total, reused, computed = map(int, found.groups())
    assert total == reused + computed and reused == 2 * ((total // 3 - 1) // 4 * 4)
    assert salts_in(trace) == {"mine"}


def salts_in(trace: Path) -> set[str | None]:
    """The namespaces into which something was put."""
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    return {event["extra_key"] for event in events if event["event"] == "inserted"}


def test_the_verbose_trace_of_a_prompt_tells_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--prompt", "What is a KV cache?", "--max-tokens", "2"]) == 0
    out = words(capsys.readouterr().out)
    assert "req-0 joins: 18 tokens to compute" in out and "18 prompt tokens: 0 reused, 18 computed" in out


def test_a_conversation_says_after_each_answer_what_was_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    asked = "What is a KV cache?\nWhat is prefill?\n/reset\nWhat is a KV cache?\n/quit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(asked))
    assert demo.main(["--chat", "--max-tokens", "40", "--cache-salt", "mine", "--trace-file", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("model  >") == 3 and "forgotten" in out
    reuse = re.findall(r"^(\d+) prompt tokens: (\d+) reused, (\d+) computed$", out, re.MULTILINE)
    assert reuse == [("18", "0", "18"), ("69", "48", "21"), ("18", "16", "2")]
    assert salts_in(trace) == {"mine"}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--n 0", "n=0"),
        ("--chat --n 2", "n=2"),
        ("--threads 0", "threads=0"),
        ("--num-prompts 0", "num_prompts=0"),
        ("--page-size 0", "page_size=0"),
        ("--num-blocks 0", "num_blocks=0"),
        ("--num-blocks 9 --max-total-tokens 9", "give one of them"),
        ("--num-blocks 9 --kv-cache-memory-bytes 9", "give one of them"),
        ("--kv-cache-memory-bytes 100000", "1,024 tokens, the least that is chosen without max_model_len, needs"),
        ("--num-blocks 1", "the KV memory has room for 16"),
        ("--max-total-tokens 8", "max_total_tokens=8"),
        ("--max-num-batched-tokens 2", "max_num_batched_tokens=2 is less than max_num_seqs=16"),
        ("--cache hash --eviction-policy lfu", "eviction_policy='lfu'"),
        ("--cache chunk --eviction-policy lfu", "eviction_policy='lfu'"),
        ("--prompt a --cache-salt=", "cache_salt=''"),
        ("--prompt a --priority 99999999999999999999", "priority=99999999999999999999"),
        ("--schedule-conservativeness=-1", "schedule_conservativeness=-1.0"),
        ("--trace-file /nowhere/at/all/trace.jsonl", "/nowhere/at/all/trace.jsonl"),
        ("--model /nowhere/at/all", "/nowhere/at/all"),
    ],
)
def test_a_bad_value_is_one_clear_line(flags: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(flags.split()) == 2
    out, err = capsys.readouterr()
    assert len(err.strip().splitlines()) == 1 and named in err and "1. Many users" not in out


@pytest.mark.parametrize("flags", ["--preemption swap", "--schedule-policy foo", "--cache tree", "--eviction-policy x"])
def test_what_there_is_not_is_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(flags.split())
    assert caught.value.code == 2 and flags.split()[0] in capsys.readouterr().err


def test_every_flag_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "m4_radix_cache.demo" in words(out)
    for flag in (
        *("prompt", "chat", "model", "trace-file", "temperature", "n", "load-format", "attention-backend", "threads"),
        *("cache", "eviction-policy", "schedule-policy", "schedule-conservativeness", "cache-salt", "priority"),
        *("max-num-seqs", "max-num-batched-tokens", "num-prompts", "page-size", "block-size", "num-blocks"),
        *("max-total-tokens", "kv-cache-memory-bytes", "gpu-memory-utilization"),
    ):
        assert f"--{flag} " in out or f"--{flag}\n" in out, flag
    assert "--preemption of m3 is gone" in words(out)
