"""The vision tower: the features of transformers, for one picture or many, and every frame for itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from m3_paged_attention.models.weights import read_headers
from m6_multimodal_pd.models.vision import VisionTower, parted
from tests.m6_multimodal_pd.vl_models import VISION, picture, save_random_vl_model, theirs

CPU = torch.device("cpu")
TOLERANCE = 1e-5
HIDDEN, PARTS = VISION["out_hidden_size"], 1 + len(VISION["deepstack_visual_indexes"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vision = {"num_position_embeddings": 27, "deepstack_visual_indexes": [2, 0]}  # no square, and not in order
    return save_random_vl_model(tmp_path_factory.mktemp("tower"), vision=vision)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> VisionTower:
    return load_as(AutoConfig.from_pretrained(directory).vision_config, directory, dtype)


def load_as(config: Any, directory: Path, dtype: torch.dtype = torch.float32) -> VisionTower:
    of_tower, _ = parted(read_headers(str(directory), directory))
    return VisionTower.load(str(directory), of_tower, config, dtype, CPU)


@pytest.fixture(scope="module")
def tower(directory: Path) -> VisionTower:
    return load(directory)


@pytest.fixture(scope="module")
def network(directory: Path) -> Any:
    return theirs(directory).model.visual


@torch.no_grad()
def expected(network: Any, items: list[Any]) -> Tensor:
    """transformers' features, of all items one under another: `[tokens, parts * hidden]`."""
    found = network(torch.cat([pixels for pixels, _ in items]), grid_thw=torch.tensor([grid for _, grid in items]))
    return torch.cat([found.pooler_output, *found.deepstack_features], dim=1)


ITEMS = {
    "one image": [picture(1, (1, 4, 6))],
    "the smallest image": [picture(2, (1, 2, 2))],
    "three images of different sizes": [picture(3, (1, 4, 4)), picture(4, (1, 2, 8)), picture(5, (1, 10, 6))],
    "a video": [picture(6, (5, 4, 6))],
    "images and videos": [picture(7, (1, 6, 2)), picture(8, (3, 4, 4)), picture(9, (1, 4, 4)), picture(10, (2, 2, 6))],
}


@pytest.mark.parametrize("name", ITEMS)
def test_features_are_those_of_transformers(tower: VisionTower, network: Any, name: str) -> None:
    items = ITEMS[name]
    ours, wanted = tower.encode(items), expected(network, items)
    assert [part.shape for part in ours] == [(t * h * w // 4, PARTS * HIDDEN) for _, (t, h, w) in items]
    for part in wanted.chunk(PARTS, dim=1):
        assert float(part.std()) > 0.1, "the comparison means something"
    torch.testing.assert_close(torch.cat(ours), wanted, atol=TOLERANCE, rtol=0)


def test_what_is_kept_of_a_picture_does_not_keep_the_others(tower: VisionTower) -> None:
    for part in tower.encode(ITEMS["three images of different sizes"]):
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == len(part) * tower.bytes_per_token == part.nbytes


def test_no_pictures_are_no_forward(tower: VisionTower) -> None:
    assert tower.encode([]) == []


def test_half_precision_is_as_close_as_transformers(directory: Path, network: Any) -> None:
    dtype = torch.bfloat16
    half, items = load(directory, dtype), ITEMS["three images of different sizes"]
    ours, exact = half.encode(items), expected(network, items)
    usual = expected(theirs(directory, dtype).model.visual, [(pixels.to(dtype), grid) for pixels, grid in items])
    assert {part.dtype for part in ours} == {dtype} and half.bytes_per_token == 3 * 64 * 2
    error, usual_error = ((found.float() - exact).abs().mean() for found in (torch.cat(ours), usual))
    assert error < 1.1 * usual_error + 1e-6
