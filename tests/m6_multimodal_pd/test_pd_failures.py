"""Whatever goes wrong between engines that work together: an end for everybody, the right tokens, and nothing left.

Requests are aborted, engines are lost, at every step from the first to the last; so every state is met, and which they
were is written down. Everything runs in one process, where the same thing happens every time.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from m6_multimodal_pd import EngineDeadError, ForwardError, KVCapacityError, RequestOutput, SamplingParams
from m6_multimodal_pd.disaggregation import page_store
from m6_multimodal_pd.disaggregation.runtime.links import LocalLinks
from m6_multimodal_pd.disaggregation.runtime.messages import Chunk, Decode, FirstToken, Prefill, Received, Relay, Tokens
from m6_multimodal_pd.disaggregation.staging import StagedSource
from m6_multimodal_pd.errors import EngineLostError, RemoteError, TransferError, WireError
from tests.m6_multimodal_pd.engines import greedy
from tests.m6_multimodal_pd.pd_engines import Asked, Group, aggregated, check_alike, setting
from tests.m6_multimodal_pd.seeing import asking
from tests.m6_multimodal_pd.transfers import Memory

Answers = dict[str, RequestOutput]
LIMITS = setting(3, 12, tokens=128)
"""Three rows and room for three of the prompts: somebody waits everywhere."""
VICTIM = "c"
ASKED: Asked = {
    "a": (asking("a", 1), greedy(7, logprobs=1), {}),
    "b": (asking(2, 3), greedy(9, temperature=0.9, seed=3), {}),
    "d": (asking("v", 5), greedy(5, frequency_penalty=1.0), {}),
    "e": (asking(6), greedy(1), {}),
    "c": (asking("c", 4), greedy(6, prompt_logprobs=1), {}),
}


@pytest.fixture(scope="module")
def wanted(seeing_directory: Path) -> Answers:
    """What all of them are answered if nothing goes wrong."""
    return aggregated(seeing_directory, ASKED)


def without(answers: Mapping[str, Any], *rids: str) -> dict[str, Any]:
    return {rid: output for rid, output in answers.items() if rid not in rids}


def failed_in(group: Group) -> set[str]:
    """The requests that have ended with an error."""
    return {rid for rid, output in group.last.items() if output.finish_reason == "error"}


# --- aborts -----------------------------------------------------------------------------------------------------------


def check_aborted(group: Group, wanted: Answers, rid: str) -> None:
    """It ended once, by an abort, with what it had said; all others are as if nothing had been."""
    output, whole = group.last[rid], wanted[rid]
    assert (output.finish_reason, output.error) == ("abort", None)
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    check_alike(group.last, without(wanted, rid))
    assert group.engine.stats().num_finished["abort"] == 1


ON_THE_WAY = {"bootstrap queue", "in pieces", "inflight queue", "transfer queue", "running", "finished"}
AT_ONCE = {"at the router", "prealloc queue", "arrivals, aborted"}
"""States between two steps of an engine."""


@pytest.mark.parametrize(
    ("shape", "rid", "stride", "states"),
    [
        pytest.param((1, 1), "c", 1, ON_THE_WAY | AT_ONCE, marks=pytest.mark.exhaustive),
        pytest.param((1, 1), "b", 2, {"waiting on prefill"}, marks=pytest.mark.exhaustive),
        ((2, 2), "c", 9, {"transfer queue"}),
    ],
    ids=["the last", "the second", "with four engines"],
)
def test_an_abort_at_any_step_ends_its_request_once_and_disturbs_nobody(
    seeing_directory: Path, wanted: Answers, shape: tuple[int, int], rid: str, stride: int, states: set[str]
) -> None:
    seen: set[str] = set()
    frames = {"transfer_buffer_bytes": 1} if shape == (2, 2) else {}
    for number in range(0, 100, stride):
        with Group(seeing_directory, *shape, **LIMITS, group=frames) as group:
            group.add(ASKED, num_steps=number)
            seen |= (now := group.states(rid))
            if now == {"finished"}:
                assert not group.engine.abort_request(rid)
                break
            watch_arrivals(group, seen)
            assert group.engine.abort_request(rid) and not group.engine.abort_request(rid)
            group.run()
            check_aborted(group, wanted, rid)
            group.check_flushed()
    assert seen >= states, seen


def watch_arrivals(group: Group, seen: set[str]) -> None:
    """Note whether a request is aborted after all has come and before its first step, which is between two steps."""
    for engine in group.of_role("decode"):
        scheduler: Any = engine.core.scheduler
        get_next = scheduler.get_next_batch_to_run

        def noted(scheduler: Any = scheduler, get_next: Any = get_next) -> Any:
            if any(req.to_finish is not None for req in scheduler.arrivals.values()):
                seen.add("arrivals, aborted")
            return get_next()

        scheduler.get_next_batch_to_run = noted


@pytest.mark.exhaustive
def test_who_aborts_may_ask_again_under_the_same_id_at_once(seeing_directory: Path, wanted: Answers) -> None:
    """The engines may still know the first one."""
    for number in range(1, 12, 2):
        with Group(seeing_directory, 1, 1, **LIMITS) as group:
            group.add(ASKED, num_steps=number)
            assert group.engine.abort_request(VICTIM)
            while not (VICTIM in group.last and group.last[VICTIM].finished):
                group.step()
            assert group.last.pop(VICTIM).finish_reason == "abort"
            group.add({VICTIM: ASKED[VICTIM]})
            group.run()
            check_alike(group.last, wanted)


# --- a device without memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [0, 3])
def test_a_chunk_for_which_there_is_no_memory_costs_its_request_an_attempt_and_no_engine(
    seeing_directory: Path, wanted: Answers, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """On either side."""
    numbers, usual = count(), page_store.to_device

    def full(*args: Any) -> Any:
        if next(numbers) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return usual(*args)

    monkeypatch.setattr(page_store, "to_device", full)
    with Group(seeing_directory, **LIMITS) as group:
        group.check_all(wanted, ASKED)
        assert group.num_retries == 1 and group.engines.keys() == {"prefill-0", "decode-0"}


@pytest.mark.parametrize(
    ("error", "raised"),
    [(torch.OutOfMemoryError("CUDA out of memory"), TransferError), (torch.AcceleratorError("gone"), EngineDeadError)],
)
@pytest.mark.parametrize("call", ["read", "fetch", "write", "is_done"])
def test_errors_of_a_copy_s_device_are_those_of_a_transfer_or_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, call: str, error: Exception, raised: type[Exception]
) -> None:
    def fail_so(*args: Any, **options: Any) -> Any:
        raise error

    store = Memory(num_pages=3, seed=1).store
    rows = torch.zeros((1, store.page_bytes), dtype=torch.uint8)
    calls: dict[str, Callable[[], Any]] = {
        "read": lambda: store.read([1], rows),
        "fetch": lambda: store.fetch(rows),
        "write": lambda: store.write([1], rows),
        "is_done": page_store.Copy(rows, SimpleNamespace(query=fail_so)).is_done,
    }
    monkeypatch.setattr(page_store, "to_device", fail_so)
    monkeypatch.setattr(torch.cuda, "stream", fail_so)
    store._stream = object()  # as on a GPU
    with pytest.raises(raised):
        calls[call]()


# --- engines that are lost --------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["prefill-0", "prefill-1", "decode-0", "decode-1"])
def test_an_engine_lost_at_any_step_costs_nobody_a_token(seeing_directory: Path, wanted: Answers, name: str) -> None:
    """Nobody hears a token twice either: `Group.step` looks at every output."""
    seen: set[str] = set()
    retried = 0
    frames = {"transfer_buffer_bytes": 1} if name.endswith("1") else {}
    for number in range(int(name[-1]), 100, 10 if frames else 2):
        with Group(seeing_directory, 2, 2, **LIMITS, group=frames) as group:
            group.add(ASKED, num_steps=number)
            for rid in ASKED:
                if any(engine is group.engines[name] for engine, _ in group.sides(rid).values()):
                    seen |= group.states(rid)
            if not group.engine.has_unfinished_requests():
                break
            group.lose(name)
            group.check_all(wanted)
            retried += group.num_retries
            assert group.engine.stats().num_finished == {"length": len(ASKED)}
    assert retried >= 4
    held = "inflight queue" if name.startswith("prefill") else "transfer queue"
    assert seen >= {held} | (set() if frames else {"in pieces", "running"}), seen


def test_a_request_goes_on_behind_what_it_has_said(seeing_directory: Path, wanted: Answers) -> None:
    with Group(seeing_directory, 1, 2, **LIMITS, is_traced=True) as group:
        group.add({"b": ASKED["b"]})
        group.until(lambda: "b" in group.last and len(group.last["b"].token_ids) == 4)
        group.lose("decode-0")
        group.run()
        check_alike(group.last, {"b": wanted["b"]})
        routed = [(e.attempt, e.num_output_tokens, e.decode) for e in group.listener.events("request_routed")]
        assert routed == [(1, 0, "decode-0"), (2, 4, "decode-1")]
        (lost,) = group.listener.events("engine_lost")
        assert (lost.name, lost.rids) == ("decode-0", ("b",)) and "pulled out" in lost.why


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["stop string", "stop id", "min_tokens", "penalties", "logprobs", "family"])
def test_a_second_attempt_ends_where_the_first_would_have(seeing_directory: Path, kind: str) -> None:
    plain = aggregated(seeing_directory, {"r": (asking("a", 9), greedy(12), {})})["r"]
    text = plain.text
    kinds: dict[str, SamplingParams] = {
        "stop string": greedy(12, stop=text[len(text) // 2 : len(text) // 2 + 6]),
        "stop id": greedy(12, stop_token_ids=[plain.token_ids[6]]),
        "min_tokens": greedy(12, stop_token_ids=list(plain.token_ids[:3]), min_tokens=9),
        "penalties": greedy(12, repetition_penalty=1.5, frequency_penalty=1.0, temperature=0.8, seed=2),
        "logprobs": greedy(8, logprobs=2, prompt_logprobs=1),
        "family": greedy(6, n=3, temperature=1.0, logprobs=0),
    }
    asked: Asked = {"r": (asking("a", 9), kinds[kind], {})}
    wanted = aggregated(seeing_directory, asked)
    for name in ("prefill-0", "decode-0"):
        for number in (3, 9):
            with Group(seeing_directory, 2, 2, **LIMITS) as group:
                group.add(asked, num_steps=number)
                if not group.engine.has_unfinished_requests():
                    break
                group.lose(name)
                group.run()
                check_alike(group.last, wanted)
                check_alike(wanted, group.last)


@pytest.mark.sample(2)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("number", [0, 2, 5, 9])
def test_without_an_engine_of_a_role_requests_end_with_an_error(seeing_directory: Path, role: str, number: int) -> None:
    with Group(seeing_directory, 1, 1, **LIMITS) as group:
        group.add(ASKED, num_steps=number)
        ended = {rid for rid, output in group.last.items() if output.finished}
        group.lose(f"{role}-0")
        group.run()
        failed = failed_in(group)
        assert failed and group.last.keys() == ASKED.keys() and not failed & ended
        for rid in failed:
            error = group.last[rid].error
            assert isinstance(error, EngineLostError), repr(error)
            assert f"no {role} engine" in str(error) or f"{role}-0" in str(error)
        output = group.engine.generate(asking(1), greedy(3))
        assert output.finish_reason == "error" and isinstance(output.error, EngineLostError)
        assert group.engine.stats().num_finished["error"] == len(failed) + 1
        group.settle()
        group.check_flushed()
        group.engine.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("max_retries", [0, 1, 2])
def test_a_request_is_tried_as_often_as_it_may_be(seeing_directory: Path, max_retries: int) -> None:
    """One decode engine after the other is lost while it answers."""
    with Group(seeing_directory, 1, 5, **LIMITS, group={"max_retries": max_retries}) as group:
        group.add({"r": (asking("a", 1), greedy(60), {})})
        for number in range(max_retries + 1):
            said = len(group.last["r"].token_ids) if number else 0
            group.until(lambda said=said: "r" in group.last and len(group.last["r"].token_ids) > said)
            group.lose(decode_of(group, "r"))
        group.run()
        output = group.last["r"]
        assert output.finish_reason == "error" and isinstance(output.error, EngineLostError)
        assert len(group.wire.commands(Decode)) == max_retries + 1 and group.num_retries == max_retries
        assert group.engine.generate(asking(1), greedy(3)).finish_reason == "length", "the others still work"


def test_a_segment_that_cannot_be_mapped_is_replaced(seeing_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine had no memory at that moment. The error names the cause, and the pair of engines works again."""
    with Group(seeing_directory, 1, 1, **LIMITS, group={"max_retries": 0}) as group:
        wanted = aggregated(seeing_directory, ASKED, **LIMITS)
        segments = group.engines["decode-0"].side.transport.segments
        with monkeypatch.context() as patch:
            patch.setattr(segments, "open", refuse_memory)
            group.run({"first": (asking("a", 1), greedy(4), {})})
        error = group.last["first"].error
        assert isinstance(error, TransferError) and "no memory now" in str(error)
        check_alike(group.run(ASKED), wanted)


def refuse_memory(*args: Any) -> Any:
    raise TransferError("no memory now")


def test_a_retry_takes_other_engines(seeing_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Group(seeing_directory, 1, 2, **LIMITS) as group:
        bad = group.engines["decode-0"]
        monkeypatch.setattr(bad.side.transport, "map", refuse_memory)
        output = group.run({"r": (asking("a", 1), greedy(4), {})})["r"]
        assert output.error is None and group.num_retries == 1


def test_the_drafts_of_all_attempts_are_counted(seeing_directory: Path) -> None:
    with Group(seeing_directory, 1, 2, **setting(8, 32, method="ngram", drafts=3)) as group:
        group.add({"r": ([5, 6, 7, 8] * 5, greedy(40), {})})
        group.until(lambda: "r" in group.last and group.last["r"].metrics.num_draft_tokens > 2)
        group.lose(decode_of(group, "r"))
        group.run()
        counts = {own.room: (own.num_draft_tokens, own.num_accepted_tokens) for own in heard(group, Tokens)}
        metrics = group.last["r"].metrics
        assert len(counts) == 2 and all(own[0] > 2 for own in counts.values())
        assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == tuple(
            map(sum, zip(*counts.values(), strict=True))
        )


def heard(group: Group, kind: type) -> list[Any]:
    """The messages of one kind that came to the router."""
    return [message for _, message in group.wire.heard if isinstance(message, kind)]


def decode_of(group: Group, rid: str) -> str:
    """The name of the engine that answers a request."""
    return next(attempt.decode for attempt in group.router.attempts.values() if attempt.req.rid == rid)


def test_a_prompt_whose_decode_engine_turns_out_to_be_gone_is_not_begun(seeing_directory: Path) -> None:
    """It would wait at the prefill engine for ever."""
    with Group(seeing_directory, 1, 2, **LIMITS) as group:
        group.engines.pop("decode-0").close()  # and no report of it has come
        assert group.run({"r": ASKED["a"]})["r"].error is None
        assert set(group.router.members) == {"prefill-0", "decode-1"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_who_waits_for_another_attempt_may_be_aborted(seeing_directory: Path, wanted: Answers, name: str) -> None:
    for number in (3, 7):
        with Group(seeing_directory, 2, 2, **LIMITS) as group:
            group.add(ASKED, num_steps=number)
            group.lose(name)
            group.step()
            waits = [req.rid for req in group.router.waiting]
            assert waits
            for rid in waits:
                assert group.engine.abort_request(rid)
            group.check_all(without(wanted, *waits))
            for rid in waits:
                assert group.last[rid].finish_reason == "abort"
                assert group.last[rid].token_ids == wanted[rid].token_ids[: len(group.last[rid].token_ids)]


# --- scarcity ---------------------------------------------------------------------------------------------------------


def test_who_has_no_room_on_the_decode_side_waits_and_is_not_computed(seeing_directory: Path, wanted: Answers) -> None:
    with Group(seeing_directory, 1, 1, **setting(8, 32, tokens=64)) as group:
        group.add(ASKED)
        (prefill,), (decode,) = group.of_role("prefill"), group.of_role("decode")
        most = 0
        while group.engine.has_unfinished_requests():
            group.step()
            prealloc = decode.core.scheduler.prealloc_queue
            most = max(most, len(prealloc))
            assert len(prefill.core.scheduler.bootstrap_queue) >= len(prealloc) - 1
        assert most >= 3
        group.check_all(wanted)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("page_size", "prompt_len"), [(1, 62), (4, 60), (4, 62), (16, 50), (16, 62)])
def test_a_prompt_that_fills_memory_is_answered_so_far(tiny_directory: Path, page_size: int, prompt_len: int) -> None:
    limits = setting(8, 32, tokens=64, page_size=page_size)
    prompt = list(range(5, 5 + prompt_len))
    asked: dict[str, Any] = {
        "long": (prompt, greedy(100), {}),
        "short": ([7, 8, 9], greedy(5), {}),
        "same": (prompt, greedy(1), {}),
    }
    alone = {rid: aggregated(tiny_directory, {rid: asked[rid]}, **limits)[rid] for rid in asked}
    assert isinstance(alone["long"].error, KVCapacityError) and len(alone["long"].token_ids) >= 64 - prompt_len
    with Group(tiny_directory, 1, 1, **limits) as group:
        group.run(asked)
        for rid, output in group.last.items():
            wanted = alone[rid]
            assert (output.token_ids, output.finish_reason) == (wanted.token_ids, wanted.finish_reason), rid
            assert type(output.error) is type(wanted.error), (rid, output.error)
        group.check_flushed()


# --- forwards that fail -----------------------------------------------------------------------------------------------


def fail(name: str, owners: Iterable[Any], error: BaseException, *, call: int) -> None:
    """Let a method of these raise once, in its nth call on all of them together."""
    calls = count(1)

    def failing(usual: Callable[..., Any], *args: Any) -> Any:
        if next(calls) == call:
            raise error
        return usual(*args)

    for owner in owners:
        setattr(owner, name, partial(failing, getattr(owner, name)))


def fail_forward(group: Group, role: str, error: BaseException, call: int) -> None:
    """Let the nth forward of engines of this role raise."""
    runners = [engine.core.executor.worker.model_runner for engine in group.of_role(role)]
    fail("forward", runners, error, call=call)


@pytest.mark.sample(2)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize(
    ("error", "kind"),
    [(RuntimeError("it broke"), RemoteError), (ForwardError("NaN"), ForwardError)],
    ids=["unknown", "known"],
)
def test_a_forward_that_fails_ends_the_requests_of_its_step_and_no_others(
    seeing_directory: Path, wanted: Answers, role: str, call: int, error: Exception, kind: type
) -> None:
    with Group(seeing_directory, 1, 1, **LIMITS) as group:
        fail_forward(group, role, error, call)
        group.run(ASKED)
        failed = failed_in(group)
        assert failed and len(failed) < len(ASKED)
        for rid in failed:
            output = group.last[rid]
            assert type(output.error) is kind and str(error) in str(output.error) and f"{role}-0" in str(output.error)
            assert output.token_ids == wanted[rid].token_ids[: len(output.token_ids)]
        check_alike(group.last, without(wanted, *failed))
        assert not group.num_retries
        group.check_all(wanted, {rid: ASKED[rid] for rid in failed})


@pytest.mark.sample(1)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_without_its_device_is_lost_and_others_go_on(
    seeing_directory: Path, wanted: Answers, role: str
) -> None:
    for call in (1, 4):
        with Group(seeing_directory, 2, 2, **LIMITS, group={"max_retries": 1}) as group:
            fail_forward(group, role, EngineDeadError("the device is gone"), call)
            group.check_all(wanted, ASKED)
            assert len(group.engines) == 3 and len(group.of_role(role)) == 1


# --- frames that are corrupted ----------------------------------------------------------------------------------------


def corrupting(monkeypatch: pytest.MonkeyPatch, *, chunks: Callable[[int], bool]) -> list[int]:
    """Flip the last byte of the first page of these chunks, by number, before they are received. Returns which."""
    numbers, flipped, send = count(1), list[int](), StagedSource.send

    def corrupted(self: StagedSource, target: str, pages: Any) -> Any:
        ticket = send(self, target, pages)
        if ticket is not None and chunks(number := next(numbers)):
            flipped.append(number)
            self.targets[target].memory[ticket.first_frame, -1] ^= 1
        return ticket

    monkeypatch.setattr(StagedSource, "send", corrupted)
    return flipped


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_chunk_that_was_spoilt_on_its_way_is_noticed_and_the_request_is_tried_anew(
    seeing_directory: Path, wanted: Answers, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    flipped = corrupting(monkeypatch, chunks=lambda n: n == number)
    with Group(seeing_directory, 1, 1, **LIMITS) as group:
        group.check_all(wanted, ASKED)
        assert flipped == [number] and group.num_retries == 1


# --- messages that come twice, or are too large ----------------------------------------------------------------------


def body_of(message: Any) -> Any:
    """The message itself, or that to another engine in it."""
    return message.body if isinstance(message, Relay) else message


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [Chunk, FirstToken, Received, Prefill, Decode])
def test_a_message_may_come_twice(
    seeing_directory: Path, wanted: Answers, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = LocalLinks.send

    def twice(self: LocalLinks, name: str, message: Any) -> None:
        send(self, name, message)
        if isinstance(body_of(message), kind):
            send(self, name, message)

    monkeypatch.setattr(LocalLinks, "send", twice)
    with Group(seeing_directory, 1, 1, **LIMITS) as group:
        group.check_all(wanted, ASKED)
        assert not group.num_retries


@pytest.mark.sample(3)
@pytest.mark.parametrize("is_heard_last", [False, True])
@pytest.mark.parametrize(
    ("sender", "kind"),
    [("prefill-0", FirstToken), ("decode-0", Tokens), ("router", FirstToken)],
    ids=["from prefill", "from decode", "passed on"],
)
def test_a_message_that_is_too_large_fails_its_request_alone_and_is_not_tried_anew(
    seeing_directory: Path, monkeypatch: pytest.MonkeyPatch, sender: str, kind: type, is_heard_last: bool
) -> None:
    """It would be as large the second time. The other side's messages may be read before the report of the sender."""
    with Group(seeing_directory, 1, 1, **LIMITS) as group:
        receive = group.links.receive
        end: Any = group.links if sender == "router" else group.engines[sender].side
        send, sent = end.send, list[Any]()

        def too_large(*args: Any) -> None:
            if isinstance(body_of(args[-1]), kind) and not sent:
                sent.append(args)
                raise WireError("a message of 9 bytes; 8 are the limit")
            send(*args)

        def in_order(timeout_s: float) -> Any:
            return iter(sorted(receive(timeout_s), key=lambda came: (came[0] == sender) == is_heard_last))

        monkeypatch.setattr(end, "send", too_large)
        monkeypatch.setattr(group.links, "receive", in_order)
        found = group.run(ASKED)
        (failed,) = [output for output in found.values() if output.error is not None]
        assert isinstance(failed.error, WireError) and "8 are the limit" in str(failed.error)
        assert failed.finish_reason == "error" and not group.num_retries
        assert set(group.router.members) == {"prefill-0", "decode-0"}
        assert group.run({"again": ASKED["a"]})["again"].error is None
        group.check_flushed()
