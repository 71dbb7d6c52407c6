"""What a rank does while its device waits for the others, and what it does with a step in flight."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from m6_multimodal_pd.overlap.launcher import ForwardOutput
from m8_parallel import EngineConfig, ModelConfig, SchedulerConfig
from m8_parallel.errors import RankLostError
from m8_parallel.overlap import ParallelLauncher
from m8_parallel.ranks import Interrupted, Ranks
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
