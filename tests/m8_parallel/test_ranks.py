"""What a rank does while its device waits for the others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from m8_parallel.errors import RankLostError
from m8_parallel.ranks import Interrupted, Ranks


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
    found.watch, found.in_step = SimpleNamespace(lost=None, is_raised=False), True
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
