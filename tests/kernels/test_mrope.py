"""The angles of a step at positions of three axes: the kernel reads, from tables, what float64 would compute."""

import pytest
import torch

from m3_paged_attention.models.rotary import RotaryTable, default_rope
from m6_multimodal_pd.models.rotary import MRopeTable, axes_of_pairs
from tests.kernels import references

pytestmark = pytest.mark.sample(2)

LENGTH = 300
SECTIONS = {64: (12, 10, 10), 128: (24, 20, 20), 80: (14, 13, 13), 16: (4, 2, 2)}


@pytest.fixture(
    params=[pytest.param("interpreter", marks=pytest.mark.interpreter), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def kind(request: pytest.FixtureRequest) -> str:
    """Native kernels on a CPU have none of this: torch gathers."""
    return request.param


@pytest.fixture(params=SECTIONS)
def table(request: pytest.FixtureRequest, device: torch.device) -> MRopeTable:
    """As a decoder on the Triton backend has it."""
    pytest.importorskip("triton")
    head_dim = request.param
    return MRopeTable(RotaryTable(default_rope(10_000.0, head_dim), LENGTH, device), SECTIONS[head_dim], "triton")


def positions_of(num_tokens: int, device: torch.device) -> torch.Tensor:
    return torch.randint(LENGTH, (3, num_tokens), device=device)


@pytest.mark.parametrize("num_tokens", [1, 5, 40, 130])
def test_angles_are_those_of_each_axis(table, device, num_tokens) -> None:
    positions = positions_of(num_tokens, device)
    pairs = table.table.cos.shape[1]
    axes = axes_of_pairs(SECTIONS[2 * pairs], pairs)
    inverse = torch.tensor(default_rope(10_000.0, 2 * pairs).frequencies, dtype=torch.float64, device=device)
    wanted = torch.stack([positions[axis].double() * inverse[pair] for pair, axis in enumerate(axes)], dim=1)
    cos, sin = table(positions)
    for found, expected in ((cos, wanted.cos()), (sin, wanted.sin())):
        assert found.shape == (num_tokens, pairs) and found.is_contiguous()
        references.assert_close(found, expected, {torch.float32: 3e-5})  # 300 radians in float32 have steps of 3e-5


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 64])
def test_the_kernel_reads_what_torch_reads(table, device, num_tokens) -> None:
    """Bitwise: both are lookups. The last position of the table is there on every axis."""
    plain = MRopeTable(table.table, SECTIONS[2 * table.table.cos.shape[1]], "torch")
    edges = torch.full((3, 3), 0, device=device).fill_diagonal_(LENGTH - 1)
    for positions in (positions_of(num_tokens, device), edges):
        for found, expected in zip(table(positions), plain(positions), strict=True):
            assert torch.equal(found, expected)


def test_positions_may_be_a_part_of_longer_rows(table, device) -> None:
    positions = positions_of(50, device)
    whole = table(positions)
    for found, expected in zip(table(positions[:, 11:43]), whole, strict=True):
        assert torch.equal(found, expected[11:43])
