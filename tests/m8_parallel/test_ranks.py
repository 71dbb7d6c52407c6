"""What a rank does while its device waits for the others, and what it does with a step in flight."""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from m1_single_request.errors import ConfigError
from m1_single_request.tracer import Tracer
from m3_paged_attention.kv_cache_spec import KVCacheSpec
from m6_multimodal_pd.graph_runner import GraphCapture, GraphLimits
from m6_multimodal_pd.overlap.launcher import ForwardOutput
from m8_parallel import EngineConfig, ModelConfig, SchedulerConfig
from m8_parallel.errors import RankLostError
from m8_parallel.graphs import GraphCaptureOfRank
from m8_parallel.overlap import ParallelLauncher
from m8_parallel.ranks import CPU, Interrupted, Ranks
from m8_parallel.watch import Watch
from m8_parallel.wiring import of_rank


class Event:
    """An event of CUDA that comes after some looks."""

    def __init__(self, looks: float = float("inf")) -> None:
        self.looks = looks

    def query(self) -> bool:
        """Return whether it has come."""
        self.looks -= 1
        return self.looks < 0


@pytest.fixture
def ranks() -> Any:
    """A rank in a step."""
    found: Any = Ranks(store=dist.HashStore())
    found.size, found.watch, found.in_step = 2, SimpleNamespace(lost=None, is_raised=False), True
    return found


def test_a_rank_waits_for_its_device(ranks: Any) -> None:
    event = Event(looks=500)
    ranks.wait_for(event)
    assert event.looks == -1


def test_it_does_not_wait_for_ever_where_another_rank_is_lost(ranks: Any) -> None:
    ranks.watch.lost = "rank 1 gives no sign of life"
    with pytest.raises(RankLostError, match="rank 1 gives no sign of life"):
        ranks.wait_for(Event())
    assert ranks.watch.is_raised


@pytest.mark.parametrize(("why", "error"), [("", Interrupted), ("rank 1 has failed: no memory", RankLostError)])
def test_it_does_not_wait_where_another_rank_has_left_the_step(ranks: Any, why: str, error: type) -> None:
    ranks.store.set("left 0", why)
    with pytest.raises(error, match=why or "^$"):
        ranks.wait_for(Event())


def test_a_rank_without_nccl_reads_at_once_and_with_it_when_the_hosts_have_met(ranks: Any) -> None:
    calls: list[str] = []
    ranks.smallest, ranks.wait_for = lambda *_: calls.append("meet"), lambda: calls.append("wait")
    ranks.arrive()
    assert not calls
    ranks.device = torch.device("cuda", 0)
    ranks.arrive()
    assert calls == ["meet", "wait"]


@pytest.fixture
def nccl(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What NCCL is to a rank, which notes the calls; and a watch that calls at once."""
    calls: list[Any] = []
    backend = SimpleNamespace(
        calls=calls,
        _set_default_timeout=lambda timeout: calls.append(timeout.total_seconds()),
        abort=lambda: calls.append("abort"),
    )
    ranks.device = torch.device("cuda", 0)
    ranks.meet = list
    ranks.watch.guard = lambda note, end: calls.extend([note, end])
    ranks.watch.release = lambda: calls.append("release")
    ranks.wait_for = lambda: calls.append("wait")
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: calls.append(name))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *_: calls.append(tuple(tensor.shape)))
    monkeypatch.setattr("m8_parallel.ranks._abort_process_group", lambda: calls.append("leave"))
    monkeypatch.setattr("m8_parallel.ranks.current_device", nullcontext)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    world: Any = dist.group
    world.WORLD = SimpleNamespace(_get_backend=lambda _: backend)
    yield backend
    world.WORLD = None


def test_devices_are_connected_when_a_group_is_formed_and_when_it_is_formed_anew(ranks: Any, nccl: Any) -> None:
    agreement, first = (1,), (1,)  # sizes of what is added up
    ranks._form()
    connected = ["cpu:gloo,cuda:nccl", ranks.long_timeout_s, "left 1", nccl.abort, agreement, first, "wait"]
    assert nccl.calls == connected
    assert ranks.record.num_collectives == 0
    nccl.calls.clear()
    ranks.form_anew()
    connected[2] = "left 2"
    assert nccl.calls == ["release", "leave", *connected]
    assert ranks.store.check(["left 1"])


def test_a_device_that_cannot_be_used_is_a_typed_error_and_leaves_no_group(
    ranks: Any, nccl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError("invalid device ordinal")

    monkeypatch.setattr(torch, "zeros", fail)
    monkeypatch.setattr(Ranks, "meet", lambda _: None)
    ranks.watch.close = lambda: nccl.calls.append("close")
    with pytest.raises(ConfigError, match="rank 0 cannot use cuda:0: invalid device ordinal"):
        Ranks(0, 2, ranks.store, ranks.watch, device=ranks.device)
    assert nccl.calls[-3:] == ["release", "leave", "close"]


def test_a_rank_that_leaves_the_job_has_not_raised_its_own_loss(ranks: Any, nccl: Any) -> None:
    ranks.store = SimpleNamespace(check=lambda _: (_ for _ in ()).throw(dist.DistNetworkError("no store")))
    ranks.leave("no memory")
    assert nccl.calls == ["release", "leave"] and not ranks.watch.is_raised
    assert ranks.watch.lost == "rank 0 has left the job: no memory"


def lost(*_: Any) -> None:
    """Find that another rank is lost."""
    raise RankLostError("rank 1 gives no sign of life")


@pytest.mark.parametrize("call", ["capture", "measure"])
def test_a_rank_that_is_lost_while_graphs_are_captured_ends_the_job(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    ranks.watch.release = list
    capture = GraphCaptureOfRank(ranks, GraphCapture(page_size=16, is_alone=True, tracer=Tracer()))
    monkeypatch.setattr(GraphCapture, "_captured", lost)
    spec = KVCacheSpec(block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float32)
    backend = SimpleNamespace(name="triton")
    model: Any = SimpleNamespace(backend=backend, kv_cache_spec=lambda _: spec, device=CPU)
    arguments = {"capture": ("target", model, SimpleNamespace(step=None)), "measure": (model,)}[call]
    with pytest.raises(RankLostError, match="rank 1 gives no sign of life"):
        getattr(capture, call)(*arguments, GraphLimits(max_num_seqs=1, max_model_len=16))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """The heartbeat of rank 0 of 2, which beats often."""
    monkeypatch.setattr("m8_parallel.watch.BEAT_S", 0.001)
    found = Watch(0, 2, dist.HashStore())
    yield found
    found.close()


def beats(watch: Watch, number: int = 5) -> None:
    """Return after some heartbeats."""
    first = int(watch._store.get("beat 0"))
    while int(watch._store.get("beat 0")) < first + number:
        pass


def test_the_heartbeat_ends_a_group_that_another_rank_has_left_and_no_other(watch: Watch) -> None:
    ended: Queue[str] = Queue()
    watch.guard("left 1", lambda: ended.put("first"))
    beats(watch)
    assert ended.empty()
    watch._store.set("left 1", "")
    assert ended.get(timeout=10) == "first"
    beats(watch)
    watch.guard("left 2", lambda: ended.put("second"))
    beats(watch)
    assert ended.empty()
    watch.release()
    watch._store.set("left 2", "")
    beats(watch)
    assert ended.empty()


def test_the_heartbeat_ends_the_group_where_a_rank_is_lost(watch: Watch) -> None:
    ended: Queue[str] = Queue()
    watch.guard("left 1", lambda: ended.put("first"))
    watch.lost = "rank 1 gives no sign of life"
    assert ended.get(timeout=10) == "first"


def test_the_heartbeat_ends_the_group_of_a_part_that_hangs(watch: Watch) -> None:
    ended: Queue[str] = Queue()
    watch.guard("left 1", lambda: ended.put("first"))
    watch.deadline = time.monotonic() + 60.0
    beats(watch)
    assert watch.lost is None and ended.empty()
    watch.deadline = time.monotonic()
    assert ended.get(timeout=10) == "first" and "too long" in str(watch.lost)


def test_only_a_part_of_a_step_has_a_deadline() -> None:
    ranks = Ranks(long_timeout_s=60.0)
    ranks.watch = SimpleNamespace(deadline=math.inf)
    left = ranks.together(lambda: ranks.watch.deadline - time.monotonic())
    assert 0 < left <= 60.0 and ranks.watch.deadline == math.inf
    with pytest.raises(ZeroDivisionError):
        ranks.together(lambda: 1 / 0)
    assert ranks.watch.deadline == math.inf


@pytest.fixture
def launcher() -> Any:
    """A launcher whose parts of steps are what a test gives them."""
    found: Any = ParallelLauncher.__new__(ParallelLauncher)
    found.worker = SimpleNamespace(on_device=nullcontext(), step_threads=nullcontext())
    found.runner = SimpleNamespace(on_all_ranks=lambda part: part(), capture_graphs=list)
    found._flying = []
    return found


def step() -> Any:
    """A step that is to be launched."""
    return ForwardOutput(batch=None)  # type: ignore[arg-type]


def launch(_: Any) -> None:
    """Launch a step."""


def fail(_: Any) -> None:
    """Do not."""
    raise MemoryError("no memory left")


def arrive(launched: Any) -> None:
    """Read the tokens of a step."""
    launched.output = object()


def test_a_step_in_flight_has_the_error_of_the_launch_behind_it(launcher: Any) -> None:
    first, second, third = step(), step(), step()
    launcher._run(launch, first)
    launcher._run(fail, second)
    assert first.error is second.error is not None
    launcher._run(launch, third)
    assert third.error is None


def test_a_step_in_flight_has_the_error_of_the_arrival_before_it(launcher: Any) -> None:
    first, second = step(), step()
    launcher._run(launch, first)
    launcher._run(launch, second)
    launcher._run(fail, first)
    assert first.error is second.error is not None


def test_a_step_in_flight_has_the_error_of_what_is_prepared_behind_it(launcher: Any) -> None:
    captures: list[int] = []
    launcher.runner.capture_graphs = lambda: captures.append(1)
    first, second = step(), step()
    launcher._run(launch, first)
    with pytest.raises(MemoryError) as raised:
        launcher.on_all_ranks(lambda: fail(None))
    assert first.error is raised.value
    launcher._run(launch, second)
    assert second.error is None and len(captures) == 2  # none is in flight before the two


def test_a_step_that_has_arrived_keeps_its_tokens(launcher: Any) -> None:
    first, second = step(), step()
    launcher._run(launch, first)
    launcher._run(arrive, first)
    launcher._run(fail, second)
    assert first.error is None and first.output is not None


@pytest.mark.parametrize("asked", [None, False, True])
def test_graphs_and_overlap_of_ranks_on_gpus_must_be_asked_for(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, asked: bool | None
) -> None:
    monkeypatch.setattr(ModelConfig, "torch_device", lambda _: torch.device("cuda"))
    ranks.device = torch.device("cuda", 1)
    config = of_rank(
        EngineConfig(model=ModelConfig(cuda_graphs=asked), scheduler=SchedulerConfig(enable_overlap=asked)), ranks
    )
    assert config.model.device == "cuda:1"
    assert config.model.wants_graphs == config.scheduler.overlaps("cuda") == bool(asked)
