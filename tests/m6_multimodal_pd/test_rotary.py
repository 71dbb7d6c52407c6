"""M-RoPE: the angles of transformers at positions of three axes, m3's own at positions of one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from m1_single_request import ModelLoadError
from m3_paged_attention.models.rotary import RotaryTable, default_rope
from m6_multimodal_pd.models.rotary import MRopeTable, mrope_section

LENGTH, THETA = 512, 10_000.0
SECTIONS = {64: (12, 10, 10), 128: (24, 20, 20), 16: (4, 2, 2), 12: (2, 2, 2)}
CPU = torch.device("cpu")


def tables(head_dim: int) -> tuple[MRopeTable, RotaryTable]:
    flat = RotaryTable(default_rope(THETA, head_dim), LENGTH, CPU)
    return MRopeTable(flat, SECTIONS[head_dim], "torch"), flat


def positions_of(num_tokens: int) -> Tensor:
    """Three axes that know nothing of each other."""
    return torch.randint(LENGTH, (3, num_tokens), generator=torch.Generator().manual_seed(num_tokens))


@pytest.mark.parametrize("head_dim", SECTIONS)
def test_angles_are_those_of_transformers(head_dim: int) -> None:
    rope = {"rope_type": "default", "rope_theta": THETA, "mrope_section": list(SECTIONS[head_dim])}
    config = Qwen3VLTextConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=LENGTH)
    positions = positions_of(40)
    theirs = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    for mine, wanted in zip(tables(head_dim)[0](positions), theirs, strict=True):
        assert mine.shape == (40, head_dim // 2) and mine.dtype == torch.float32 and mine.is_contiguous()
        torch.testing.assert_close(mine, wanted[0, :, : head_dim // 2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("head_dim", SECTIONS)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_on_equal_axes_it_is_the_rotary_embedding_of_text(head_dim: int, num_tokens: int) -> None:
    mrope, flat = tables(head_dim)
    positions = positions_of(num_tokens)[0]
    for given in (positions, positions.expand(3, -1)):
        for mine, wanted in zip(mrope(given), flat(positions), strict=True):
            assert torch.equal(mine, wanted)


# --- what the config may say ------------------------------------------------------------------------------------------


def test_a_config_that_names_no_section_means_the_usual_one() -> None:
    assert mrope_section("model", {}, 128) == (24, 20, 20)
    with pytest.raises(ModelLoadError, match=r"mrope_section=\(24, 20, 20\).* add up to the 32 pairs of head_dim=64"):
        mrope_section("model", {}, 64)


@pytest.mark.parametrize(
    "section",
    [[16, 24, 24, 0], [12, 10], [12, 10, 11], [12, 10, 10.0], [12, 21, -1], ["a", "b", "c"], "abc", None, 32, [32]],
    ids=str,
)
def test_sections_that_do_not_share_out_all_pairs_are_refused(section: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"^somebody: mrope_section=.* must be three whole numbers, for time"):
        mrope_section("somebody", {"mrope_section": section}, 64)


@pytest.mark.parametrize("section", [[2, 15, 15], [11, 10, 11], [10, 12, 10]], ids=str)
def test_sections_that_cannot_be_dealt_out_in_turn_are_refused(section: list[int]) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot be assigned in turn: .*, at most 11 and 10"):
        mrope_section("somebody", {"mrope_section": section}, 64)


@pytest.mark.parametrize("value", [False, None, "yes", 1])
def test_sections_one_after_another_are_another_model(value: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"^somebody: mrope_interleaved=.*Qwen2-VL"):
        mrope_section("somebody", {"mrope_section": [12, 10, 10], "mrope_interleaved": value}, 64)
