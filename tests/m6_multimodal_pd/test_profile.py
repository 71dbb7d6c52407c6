"""What the largest step takes of a device, on which the size of its KV memory depends: the tower and its work count."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.m6_multimodal_pd.engines import MakeEngine, runner_of, setting

BUDGET, NUM_TOKENS = 70, 48
CACHE_BYTES = 2**24


def tensor_bytes() -> int:
    """What all tensors take that somebody holds."""
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def watched(call: Callable[..., Any], held: list[int], calls: list[Any] | None = None) -> Callable[..., Any]:
    """The same; what is held when it begins is noted, and what it is given."""

    def watching(*args: Any, **keywords: Any) -> Any:
        held.append(tensor_bytes())
        if calls is not None:
            calls.append(args)
        return call(*args, **keywords)

    return watching


def test_the_largest_step_holds_embeddings_and_a_run_of_the_tower(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = setting(multimodal={"encoder_budget": BUDGET, "embedding_cache_bytes": CACHE_BYTES})
    engine: Any = make_engine(**limits)
    runner: Any = runner_of(engine)
    tower, of_model, of_tower, calls = runner.encoder.tower, list[int](), list[int](), list[Any]()
    monkeypatch.setattr(runner.model, "forward", watched(runner.model.forward, of_model))
    monkeypatch.setattr(tower, "encode", watched(tower.encode, of_tower, calls))
    before = tensor_bytes()
    kv_bytes = runner.profile_run(NUM_TOKENS)
    after = tensor_bytes()
    assert kv_bytes >= NUM_TOKENS * runner.kv_cache_spec(16).bytes_per_token
    assert of_model[0] - before >= CACHE_BYTES + BUDGET * tower.bytes_per_token + kv_bytes
    assert of_tower[0] - after >= CACHE_BYTES + kv_bytes
    [[items]] = calls
    assert [tower.num_tokens(grid) for _, grid in items] == [64], "the largest square within the budget"
    assert after - before < CACHE_BYTES / 2, "nothing of it stays"
