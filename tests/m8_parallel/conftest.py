"""Models and groups of ranks that tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.equivalence.models import save_random_model
from tests.m6_multimodal_pd.seeing import save_seeing_model
from tests.m6_multimodal_pd.vl_models import EXPERTS
from tests.m8_parallel.groups import Group

MODELS = ("qwen3", "qwen2", "llama", "qwen3_moe", "sees", "sees_moe")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Directories of tiny random models, made when they are asked for."""
    root, made = tmp_path_factory.mktemp("models-of-ranks"), dict[str, str]()

    def make(name: str) -> str:
        if name not in made:
            path = root / name
            if name == "sees":
                save_seeing_model(path)
            elif name == "sees4":
                save_seeing_model(path, text={"num_attention_heads": 4})
            elif name == "sees_moe":
                save_seeing_model(path, text=EXPERTS | {"num_experts": 8})
            elif name == "wide":  # a rank's part of each linear has whole groups of 128 weights
                save_random_model(path, "qwen3", intermediate_size=256, head_dim=64)
            elif name == "wide_moe":
                save_random_model(
                    path, "qwen3_moe", intermediate_size=256, moe_intermediate_size=256, head_dim=64, num_experts=8
                )
            elif name == "qwen3_moe":
                save_random_model(path, name, num_experts=8, num_experts_per_tok=3)
            else:
                save_random_model(path, name.removesuffix("-other"), **({"seed": 5} if "-other" in name else {}))
            made[name] = str(path)
        return made[name]

    return make


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Group]]:
    """One group of each size for the whole session; a new one if it has ended."""
    root, running, number = Path(tmp_path_factory.mktemp("groups")), dict[int, Group](), 0

    def group(size: int) -> Group:
        nonlocal number
        if size not in running or running[size].process.poll() is not None:
            if size in running:
                running[size].close()
            number += 1
            running[size] = Group(size, root / f"group-{number}")
        return running[size]

    yield group
    for each in running.values():
        each.close()
