"""Copies that run beside the steps: nobody reads or frees too early, or waits; and the memory that they go through.

The device is one on a CPU whose copies are late by a seed, through host memory and through the memory of GPUs that are
GPUs in name (`late_copies.py`). What a real GPU does is in `test_pd_copies_gpu.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from m1_single_request.trace_readers import Records
from m6_multimodal_pd import RequestOutput
from m6_multimodal_pd.disaggregation import staging
from m6_multimodal_pd.disaggregation.decode_side import DecodeSide
from m6_multimodal_pd.disaggregation.events import PathChosen
from m6_multimodal_pd.disaggregation.runtime import child, device_memory
from m6_multimodal_pd.disaggregation.runtime.device_memory import DeviceSegments, page_lock
from m6_multimodal_pd.disaggregation.runtime.in_process import InProcessSegments
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Call,
    Chunk,
    DeviceSegment,
    FirstToken,
    Offer,
    Taken,
    Ticket,
)
from m6_multimodal_pd.disaggregation.staging import StagedSource, StagedTarget
from m6_multimodal_pd.errors import TransferError
from tests.m6_multimodal_pd.late_copies import (
    NEVER,
    POISON,
    GPUSegments,
    LateStore,
    gpus as gpus,
    late_copies as late_copies,
)
from tests.m6_multimodal_pd.pd_engines import Group, aggregated, check_alike, free_frames, setting
from tests.m6_multimodal_pd.test_pd_failures import ASKED, LIMITS, body_of, fail, fail_forward, failed_in, without
from tests.m6_multimodal_pd.transfers import Memory

Answers = dict[str, RequestOutput]
TROUBLES = ("none", "aborts", "a lost prefill engine", "a lost decode engine", "a failed step", "new books")
COSTLY = ("a failed step", "new books")
"""Some requests end with an error."""
PATHS = ("host memory", "GPU memory")


@pytest.fixture(scope="module")
def wanted(seeing_directory: Path) -> Answers:
    """What all of them are answered if nothing goes wrong."""
    return aggregated(seeing_directory, ASKED)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """The memory that KV goes through. With GPUs in name, all engines can read all of them."""
    if request.param == "GPU memory":
        request.getfixturevalue("gpus")
    return str(request.param)


def paths_of(group: Group) -> set[str]:
    """What the trace says about the ways of KV: through which memory, and why."""
    return {event.text.partition(" goes through ")[2] for event in group.listener.told("path_chosen")}


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("seed", range(6))
def test_any_traffic_gets_the_tokens_of_one_engine_while_copies_are_late(
    seeing_directory: Path, wanted: Answers, late_copies: type[LateStore], path: str, trouble: str, seed: int
) -> None:
    rng = Random(f"{trouble} {seed} {path}")
    shape = (2, 2) if trouble.startswith("a lost") else rng.choice([(1, 1), (2, 2)])
    limits = setting(3, 12, tokens=128, debug=seed % 2 == 0, enable_overlap=seed % 3 == 1)  # debug: with checksums
    frames = {"transfer_buffer_bytes": rng.choice([1, 2**12, 2**20])}
    with Group(seeing_directory, *shape, **limits, group=frames, is_traced=True) as group:
        if trouble == "a failed step":
            fail_forward(group, rng.choice(["prefill", "decode"]), RuntimeError("it broke"), rng.randrange(1, 6))
        if trouble == "new books":
            schedulers = [engine.core.scheduler for engine in group.of_role(rng.choice(["prefill", "decode"]))]
            fail("get_next_batch_to_run", schedulers, torch.OutOfMemoryError("no memory"), call=rng.randrange(2, 12))
        aborted = set()
        for rid in rng.sample(sorted(ASKED), len(ASKED)):
            group.add({rid: ASKED[rid]}, num_steps=rng.randrange(3))
            if trouble == "aborts" and rng.random() < 0.5:
                for _ in range(rng.randrange(8)):
                    group.step()
                if group.engine.abort_request(rid):
                    aborted.add(rid)
        for _ in range(rng.randrange(12)):
            group.step()
        if trouble.startswith("a lost"):
            group.lose(f"{trouble.split()[2]}-{rng.randrange(2)}")
        group.run()
        failed = failed_in(group)
        assert bool(failed) <= (trouble in COSTLY) and aborted <= group.last.keys()
        check_alike(group.last, without(wanted, *aborted, *failed))
        assert {where.partition(":")[0] for where in paths_of(group)} == {path}
        assert any(copy.num_polls < -1 for copy in late_copies.everywhere), "some copy had to wait for another"
        group.check_flushed()


def test_the_other_engine_may_write_to_frames_as_soon_as_they_are_taken(
    seeing_directory: Path, wanted: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: dict[int, torch.Tensor] = {}
    receive, say = StagedTarget.receive, DecodeSide.say

    def received(self: StagedTarget, source: str, ticket: Ticket, pages: Any) -> Any:
        arrival = receive(self, source, ticket, pages)
        rows[ticket.number] = arrival.copy.rows
        return arrival

    def said(self: DecodeSide, peer: str, body: Any) -> None:
        if isinstance(body, Taken) and body.number in rows:
            rows.pop(body.number).fill_(POISON)  # a process writes at once: it has a core of its own
        say(self, peer, body)

    monkeypatch.setattr(StagedTarget, "receive", received)
    monkeypatch.setattr(DecodeSide, "say", said)
    with Group(seeing_directory, 1, 1, **LIMITS) as group:
        group.add(ASKED)
        group.run()
        check_alike(group.last, wanted)


# --- one chunk, looked at ---------------------------------------------------------------------------------------------


class Ends:
    """Both ends of a transport, with copies that come when a test says so."""

    def __init__(self, segments: Any, **options: Any) -> None:
        self.ours, self.theirs = Memory(num_pages=9, seed=1), Memory(num_pages=9, seed=2)
        stores = [LateStore(memory.storages) for memory in (self.ours, self.theirs)]
        for store in stores:
            store.most_polls = NEVER
            store.rng = SimpleNamespace(randrange=lambda stop: stop - 1)  # type: ignore[assignment]
        self.source = StagedSource(stores[0], segments, num_frames=4, **options)
        self.target = StagedTarget(stores[1], segments)

    def meet(self) -> None:
        """What the sides do first."""
        offer = self.source.offer("d", self.target.readable)
        if offer is not None:
            assert self.source.send("d", [1]) is None, "it has no answer"
            self.target.map("p", offer.ticket, offer.memory)
            self.source.release("d", offer.ticket.number)

    def ready(self, ticket: Ticket) -> Ticket:
        """Let the copies of the source come; the ticket as it goes out."""
        assert self.source.ready("d", ticket) is None
        come(self.source)
        found = self.source.ready("d", ticket)
        assert found is not None
        return found


def come(end: Any) -> None:
    """Let all copies of an end come now."""
    for copy in end.store.stream:
        copy.come()


@pytest.fixture(params=[InProcessSegments, GPUSegments], ids=PATHS)
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(LateStore, "everywhere", [])
    ends = Ends(request.param(), checksums=True)
    ends.meet()
    yield ends
    ends.source.close(), ends.target.close()


def test_a_page_may_change_when_it_is_sent_and_arrives_as_it_was(ends: Ends) -> None:
    """On both sides pages are used between two steps, and copies run from frame to frame."""
    expected, before = ends.ours.page(3), ends.theirs.pages()
    ticket = ends.source.send("d", [3])
    assert ticket is not None and not ticket.checksums and free_frames(ends.source, "d") == 3
    assert set(ends.source.targets["d"].memory[0].tolist()) == {POISON}
    ends.ours.storages[0].blocks[:, 3] = 0
    ticket = ends.ready(ticket)
    assert len(ticket.checksums) == 1 and ends.source.ready("d", ticket) == ticket
    arrival = ends.target.receive("p", ticket, [5])
    assert not arrival.copy.is_done() and ends.theirs.pages() == before
    with pytest.raises(AssertionError, match="on its way"):
        arrival.write()
    come(ends.target)
    assert arrival.copy.is_done() and ends.theirs.pages() == before
    arrival.write()
    assert ends.theirs.page(5) == expected and ends.theirs.pages()[:5] == before[:5]


def test_a_ticket_cannot_be_released_while_its_frames_are_written(ends: Ends) -> None:
    """A target that forges it would get frames that a copy still writes to."""
    ticket = ends.source.send("d", [3, 1])
    assert ticket is not None
    with pytest.raises(TransferError, match="not in transit"):
        ends.source.release("d", ticket.number)
    assert free_frames(ends.source, "d") == 2
    ends.source.release("d", ends.ready(ticket).number)
    assert free_frames(ends.source, "d") == 4


def test_memory_goes_when_nothing_is_copied_to_it_or_from_it(ends: Ends) -> None:
    first = ends.source.send("d", [3])
    assert first is not None
    arrival = ends.target.receive("p", ends.ready(first), [4])
    second = ends.source.send("d", [7])
    ends.source.forget("d"), ends.target.forget("p")
    assert all(copy.has_come for copy in LateStore.everywhere)
    arrival.write()
    assert ends.theirs.page(4) == ends.ours.page(3)
    assert second is not None and ends.source.ready("d", second) == second, "its message disturbs nobody"
    assert ends.source.send("d", [1]) is not None


# --- a group whose copies stand still ---------------------------------------------------------------------------------


@pytest.fixture
def still(late_copies: type[LateStore], monkeypatch: pytest.MonkeyPatch) -> type[LateStore]:
    """Copies come when a test lets them come."""
    monkeypatch.setattr(LateStore, "most_polls", NEVER)
    monkeypatch.setattr(LateStore, "rng", SimpleNamespace(randrange=lambda stop: stop - 1))
    return late_copies


def of_group(group: Group, role: str) -> Any:
    """The only engine of a role, and its end of the transport."""
    (engine,) = group.of_role(role)
    return engine, engine.side.transport


def test_a_chunk_is_announced_when_its_pages_are_there_and_the_first_token_after_it(
    seeing_directory: Path, wanted: Answers, still: type[LateStore], path: str
) -> None:
    with Group(seeing_directory, **LIMITS) as group:
        (prefill, source), (decode, target) = of_group(group, "prefill"), of_group(group, "decode")
        group.add({"b": ASKED["b"]}, num_steps=12)
        assert prefill.side.in_flight and not group.wire.relayed(Chunk) and not group.wire.relayed(FirstToken)
        assert prefill.core.scheduler.inflight_queue.keys() == {"b"}, "its steps go on meanwhile"
        come(source)
        for _ in range(4):
            group.step()
        chunks, freed = group.wire.relayed(Chunk), len(group.wire.relayed(Taken))
        assert chunks and group.wire.relayed(FirstToken) and len(decode.side.in_flight) == len(chunks)
        assert freed == (path == "GPU memory") and decode.core.scheduler.transfer_queue.keys() == {"b"}
        while group.engine.has_unfinished_requests():
            come(source), come(target)
            group.step()
        assert len(group.wire.relayed(Taken)) == freed + len(group.wire.relayed(Chunk))
        check_alike(group.last, {"b": wanted["b"]})


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_aborted_request_leaves_at_once_and_its_copies_write_no_page(
    seeing_directory: Path, wanted: Answers, still: type[LateStore], path: str, role: str
) -> None:
    """Its pages belong to others when the copies come."""
    with Group(seeing_directory, **LIMITS) as group:
        (prefill, source), (decode, target) = of_group(group, "prefill"), of_group(group, "decode")
        group.add({"b": ASKED["b"]})
        group.until(lambda: bool(prefill.side.in_flight))
        if role == "decode":
            group.until(lambda: come(source) or bool(decode.side.in_flight))
        assert group.engine.abort_request("b")
        group.step()
        for _ in range(6):
            group.router.listen(0)
        assert not prefill.side.rooms and not decode.side.rooms and group.last["b"].finish_reason == "abort"
        side = (prefill if role == "prefill" else decode).side
        assert side.in_flight and free_frames(source, "decode-0") < source.num_frames
        kept = decode.store._memories[0].clone()
        come(source), come(target)
        for _ in range(6):
            come(target)
            group.router.listen(0)
        assert not side.in_flight and torch.equal(decode.store._memories[0], kept)
        while group.engine.has_unfinished_requests() or "a" not in group.last:
            group.add({"a": ASKED["a"]} if "a" not in group.router.requests else {})
            come(source), come(target)
            group.step()
        group.settle()
        check_alike(group.last, {"a": wanted["a"]})


@pytest.mark.parametrize(("lost", "left"), [("prefill-0", "decode"), ("decode-0", "prefill")])
def test_a_lost_engine_takes_its_copies_along(
    seeing_directory: Path, still: type[LateStore], path: str, lost: str, left: str
) -> None:
    with Group(seeing_directory, **LIMITS) as group:
        (prefill, source), (decode, _) = of_group(group, "prefill"), of_group(group, "decode")
        group.add({"b": ASKED["b"]})
        group.until(lambda: bool(prefill.side.in_flight))
        if left == "decode":
            group.until(lambda: come(source) or bool(decode.side.in_flight))
        group.lose(lost)
        num_heard = len(group.wire.heard)
        group.run()
        (engine,) = group.of_role(left)
        assert not engine.side.in_flight and all(copy.has_come for copy in engine.store.stream)
        late = [message for _, message in group.wire.heard[num_heard:] if isinstance(body_of(message), Chunk | Taken)]
        assert not late, "an engine that comes under this name would take it for its own"


# --- which memory -----------------------------------------------------------------------------------------------------


def test_a_pair_that_shares_no_gpu_uses_host_memory_and_the_trace_says_why(
    seeing_directory: Path, wanted: Answers, gpus: type[GPUSegments], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "readable", ())
    with Group(seeing_directory, is_traced=True, **LIMITS) as group:
        check_alike(group.run(ASKED), wanted)
        assert paths_of(group) == {"host memory: the two engines share no GPU memory."}
        assert not group.wire.relayed(Offer)


@pytest.mark.parametrize(("role", "words"), [("prefill", "no memory left"), ("decode", "it could not map the segment")])
def test_gpu_memory_that_cannot_be_had_costs_no_request_an_attempt(
    seeing_directory: Path, wanted: Answers, gpus: type[GPUSegments], role: str, words: str
) -> None:
    with Group(seeing_directory, is_traced=True, group={"max_retries": 0}, **LIMITS) as group:
        _, end = of_group(group, role)
        end.device_segments.why_not = "no memory left"
        check_alike(group.run(ASKED), wanted)
        (where,) = paths_of(group)
        assert where.startswith("host memory: ") and words in where and "no memory left" in where
        assert len(group.wire.relayed(Offer)) == (role == "decode"), "it is tried once"


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "another size": ({"num_bytes": 8}, "8 bytes of GPU memory, not"),
    "a foreign GPU": ({"device": "GPU-99"}, "GPU 'GPU-99' cannot be read"),
    "an unknown handle": ({"handle": b"nobody's"}, "cannot be opened: CUDA error: invalid device context"),
}


@pytest.mark.parametrize("name", FORGED)
def test_an_offer_that_makes_no_sense_is_refused_and_the_true_one_works(name: str) -> None:
    LateStore.everywhere.clear()
    ends, (changes, words) = Ends(GPUSegments()), FORGED[name]
    offer = ends.source.offer("d", ends.target.readable)
    assert offer is not None
    with pytest.raises(TransferError, match=words):
        ends.target.map("p", offer.ticket, msgspec.structs.replace(offer.memory, **changes))
    with pytest.raises(TransferError, match="there is no segment 'gpu-"):
        ends.target.receive("p", offer.ticket, [])
    with pytest.raises(TransferError, match="share no GPU memory"):
        StagedTarget(ends.target.store, InProcessSegments()).map("p", offer.ticket, offer.memory)
    ends.target.map("p", offer.ticket, offer.memory)
    ends.source.release("d", offer.ticket.number)
    come_of = ends.source.send("d", [3])
    assert come_of is not None
    arrival = ends.target.receive("p", ends.ready(come_of), [5])
    come(ends.target)
    arrival.write()
    assert ends.theirs.page(5) == ends.ours.page(3)


def test_a_refusal_of_another_ticket_is_no_answer_to_an_offer() -> None:
    source = StagedSource(Memory(num_pages=3, seed=1).store, GPUSegments(), num_frames=2)
    offer = source.offer("d", GPUSegments.readable)
    assert offer is not None
    with pytest.raises(TransferError, match="not in transit"):
        source.refused("d", offer.ticket.number + 1, "it is forged")
    assert source.send("d", [1]) is None, "the target may map the segment yet"
    source.refused("d", offer.ticket.number, "CUDA does not open it")
    assert source.send("d", [1]) is not None
    source.close()


# --- CUDA, by name ----------------------------------------------------------------------------------------------------


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees three GPUs, and GPU 1 can read GPU 2."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: {own, other} == {1, 2})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"uuid-{number}"))


def test_an_engine_can_read_its_own_gpu_and_those_that_it_can_access(three_gpus: None) -> None:
    assert DeviceSegments(torch.device("cuda:1")).readable == ("uuid-1", "uuid-2")
    assert DeviceSegments(torch.device("cuda:0")).readable == ("uuid-0",)
    segment = DeviceSegment("uuid-0", 4, b"handle", 0, "/torch_1_2_3", 0)
    with pytest.raises(TransferError, match="cannot be read from cuda:1"):
        DeviceSegments(torch.device("cuda:1")).open(segment, 4)


class Cudart:
    """CUDA's runtime, as far as torch has it."""

    def __init__(self, code: int) -> None:
        self.code, self.calls = code, list[tuple[Any, ...]]()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append((address, num_bytes, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append((address,))
        return 0


@pytest.mark.parametrize(("is_read_only", "flags"), [(False, 0), (True, 8)])
@pytest.mark.parametrize("code", [0, 801])
def test_host_memory_is_page_locked_for_a_gpu_and_else_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, is_read_only: bool, flags: int, code: int
) -> None:
    cudart, launches = Cudart(code), list[Any]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: cudart.calls.append((str(device),)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    memory = torch.empty(2**20, dtype=torch.uint8)
    monkeypatch.setattr(device_memory.torch, "zeros", lambda *args, **options: launches.append(options))
    unlock, problem = page_lock(memory, torch.device("cuda:1"), is_read_only=is_read_only)
    assert cudart.calls == [(memory.data_ptr(), 2**20, flags)]
    assert bool(problem) == bool(launches) == bool(code)
    assert not code or "1.0 MiB of it cannot be page-locked (CUDA error 801)" in problem
    unlock()
    assert cudart.calls[1:] == ([] if code else [("cuda:1",), (memory.data_ptr(),)]), "the other end may copy yet"
    assert page_lock(memory, torch.device("cpu"))[1] == "" and len(cudart.calls) == (1 if code else 3)


def test_locked_memory_is_unlocked_when_it_goes_and_the_trace_says_what_is_not_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlocked, records = list[Any](), Records()
    refuse = lambda memory, device, **options: (lambda: unlocked.append(options), "4 KiB of it cannot be page-locked")  # noqa: E731
    monkeypatch.setattr(staging, "page_lock", refuse)
    monkeypatch.setattr(LateStore, "everywhere", [])
    ends = Ends(InProcessSegments())
    for end in (ends.source, ends.target):
        end.tracer.attach(records)
    for number in range(2):
        ticket = ends.source.send("d", [3])
        assert ticket is not None
        ends.target.receive("p", ends.ready(ticket), [4])
        if number == 0:
            ends.source.forget("d"), ends.target.forget("p")
    assert unlocked == [{}, {"is_read_only": True}]
    ends.source.close(), ends.target.close()
    assert unlocked == 2 * [{}, {"is_read_only": True}]
    said = [(event.peer, event.path, event.why) for _, event in records.of(PathChosen)]
    problem = "4 KiB of it cannot be page-locked"
    both = [("d", "host memory", f"{staging.NO_SHARED_GPU}; {problem}"), ("p", "host memory", problem)]
    assert said == 2 * both


@pytest.fixture
def process() -> Any:
    """The part of an engine's process that runs its loop."""
    process: Any = child.Process.__new__(child.Process)
    process.config = SimpleNamespace(disaggregation=SimpleNamespace(step_timeout_s=1.0))
    process.socket = SimpleNamespace(send=lambda message: None)
    process.is_stopping = False
    return process


def test_the_loop_of_a_process_sleeps_in_its_socket_but_not_past_a_copy(
    process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, side = list[float](), SimpleNamespace(in_flight=[], rooms={})
    monkeypatch.setattr(child, "Watchdog", lambda limit_s: nullcontext())

    def receive(timeout_s: float) -> list[Any]:
        waits.append(timeout_s)
        side.in_flight = [[], ["a chunk"], ["a chunk"], []][len(waits) % 4]
        process.is_stopping = len(waits) == 5
        return []

    process._receive = receive
    process._work(SimpleNamespace(side=side, joined=None, tick=lambda messages: False, close=lambda: None))
    assert waits == [0.0, child.COPY_POLL_S, child.COPY_POLL_S, child.HEARTBEAT_S, child.HEARTBEAT_S]
    assert 0 < child.COPY_POLL_S <= 0.002


@pytest.mark.parametrize(("verb", "has_limit"), [("stats", True), ("update_weights", False)])
def test_a_call_that_reads_files_has_no_watchdog(
    process: Any, monkeypatch: pytest.MonkeyPatch, verb: Any, has_limit: bool
) -> None:
    watched = list[object]()

    @contextmanager
    def watchdog() -> Iterator[None]:
        watched.append(verb)
        yield

    monkeypatch.setattr(child, "Watchdog", lambda limit_s: watchdog())

    def tick(messages: Any) -> bool:
        process.is_stopping = True
        return False

    process._receive = lambda timeout_s: [Call(1, verb)]
    side = SimpleNamespace(in_flight=[], rooms={})
    process._work(SimpleNamespace(side=side, joined=None, tick=tick, close=lambda: None))
    assert bool(watched) == has_limit
