"""What each rank keeps of a model: together it is the whole, nothing twice but what every rank needs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from m1_single_request import ConfigError
from m3_paged_attention.models.weights import PREFIX, read_headers
from m6_multimodal_pd import ModelConfig
from m8_parallel.model_loader import ParallelLoader
from m8_parallel.models.plan import plan_of
from m8_parallel.models.shards import Shard
from m8_parallel.models.shared_tower import shared_out
from tests.equivalence.models import save_random_model
from tests.m3_paged_attention.test_experts import stack

CPU = torch.device("cpu")
ARCHITECTURES = ("qwen3", "qwen2", "llama", "qwen3_moe")


class OneOf:
    """A rank of so many that loads its part alone."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.is_first = rank, size, rank == 0

    def agreed(self, call: Callable[[], Any]) -> Any:
        """As if no other rank had an error."""
        return call()


def shards(directory: Path, size: int) -> list[Shard]:
    config = ModelConfig(model=directory, device="cpu", dtype="float32")
    from m6_multimodal_pd.model_loader import describe_model

    described = describe_model(config)
    return [ParallelLoader(OneOf(rank, size), config).shard_of(described) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_parts_of_all_ranks_are_the_whole(architecture: str, size: int, tmp_path: Path) -> None:
    directory = save_random_model(tmp_path, architecture)
    for name, whole in load_file(directory / "model.safetensors").items():
        cut = shards(directory, size)
        parts = [shard.cut(whole, name, PREFIX, "single") for shard in cut]
        if ".k_proj." in name or ".v_proj." in name:
            each = max(1, size // cut[0].config.num_kv_heads)  # ranks with the same KV head
            assert all(torch.equal(part, parts[rank // each * each]) for rank, part in enumerate(parts))
            assert torch.equal(torch.cat(parts[::each]), whole)
            continue
        if all(part.shape == whole.shape for part in parts):
            assert "norm" in name or "mlp.gate." in name or name.endswith("o_proj.bias") or size == 1, name
            continue
        dimension = next(d for d in range(whole.dim()) if parts[0].shape[d] != whole.shape[d])
        assert torch.equal(torch.cat(parts, dimension), whole), name


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_are_cut_gate_and_up_apart(transposed: bool, tmp_path: Path) -> None:
    directory = save_random_model(tmp_path, "qwen3_moe")
    single = [
        each.load(read_headers("moe", directory), torch.float32, CPU, PREFIX, None) for each in shards(directory, 2)
    ]
    stack(directory, transposed=transposed)
    found = [
        each.load(read_headers("moe", directory), torch.float32, CPU, PREFIX, None) for each in shards(directory, 2)
    ]
    for one, other in zip(single, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "num_attention_heads=6 cannot be cut into 4"),
        ({"intermediate_size": 126}, 4, "intermediate_size=126 cannot be cut into 4"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 KV heads cannot be shared by 2"),
    ],
    ids=str,
)
def test_what_cannot_be_cut_is_refused_by_name(change: dict[str, Any], size: int, message: str, tmp_path: Path) -> None:
    directory = save_random_model(tmp_path, "qwen3", head_dim=32, **change)
    with pytest.raises(ConfigError, match=message):
        shards(directory, size)


def test_a_style_of_a_plan_that_is_not_known_is_refused() -> None:
    class Odd:
        base_model_tp_plan: ClassVar = {"layers.*.mlp.up_proj": "sequence_parallel"}

    with pytest.raises(ConfigError, match="cut in a way that is not supported: 'sequence_parallel'"):
        plan_of("odd", Odd())  # type: ignore[arg-type]


def test_images_go_to_the_rank_with_fewest_patches_the_largest_first() -> None:
    assert shared_out([1000, 100, 200, 50], 2) == [[0], [2, 1, 3]]
    assert shared_out([5], 3) == [[0], [], []]


def drawn(make: Callable[[Shard], Any], directory: Path, size: int) -> list[Any]:
    return [make(shard) for shard in shards(directory, size)]


def test_random_weights_are_those_of_one_process(tmp_path: Path) -> None:
    directory = save_random_model(tmp_path, "llama", tie_word_embeddings=False)
    (whole,) = drawn(lambda shard: shard.dummy(torch.float32, CPU, 3, None), directory, 1)
    parts = drawn(lambda shard: shard.dummy(torch.float32, CPU, 3, None), directory, 2)
    assert torch.equal(torch.cat([part.embedding for part in parts])[: len(whole.embedding)], whole.embedding)
    assert torch.equal(torch.cat([part.layers[1].down for part in parts], 1), whole.layers[1].down)
