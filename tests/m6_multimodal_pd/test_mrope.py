"""Where the tokens of a prompt with pictures stand, against transformers and against reference rows."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, strategies as st
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from m6_multimodal_pd.multimodal.mrope import Block, get_rope_index

TEXT, IMAGE, VIDEO = 0, 1, 2

Run = tuple[int, ...]  # (TEXT, tokens), (IMAGE, height, width) or (VIDEO, frames, height, width): merged patches


def of_transformers(runs: list[Run]) -> tuple[np.ndarray, int]:
    """Its positions of such a prompt, with one token between the frames of a video, and the delta."""
    types: list[int] = []
    grids: dict[int, list[list[int]]] = {IMAGE: [], VIDEO: []}
    for kind, *size in runs:
        if kind == TEXT:
            types += [TEXT] * size[0]
        elif kind == IMAGE:
            types += [IMAGE] * (size[0] * size[1])
            grids[IMAGE].append([1, 2 * size[0], 2 * size[1]])
        else:
            types += ([TEXT] + [VIDEO] * (size[1] * size[2])) * size[0]
            grids[VIDEO].append([size[0], 2 * size[1], 2 * size[2]])
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = lambda *args, **kwargs: Qwen3VLModel.get_vision_position_ids(model, *args, **kwargs)
    positions, deltas = Qwen3VLModel.get_rope_index(
        model,
        torch.zeros(1, len(types), dtype=torch.long),
        torch.tensor([types]),
        torch.tensor(grids[IMAGE]) if grids[IMAGE] else None,
        torch.tensor(grids[VIDEO]) if grids[VIDEO] else None,
    )
    return positions[:, 0].numpy(), int(deltas[0, 0])


def of_ours(runs: list[Run]) -> tuple[np.ndarray, int]:
    blocks, at = [], 0
    for kind, *size in runs:
        if kind == TEXT:
            at += size[0]
        for _ in range(0 if kind == TEXT else 1 if kind == IMAGE else size[0]):
            at += kind == VIDEO
            blocks.append(Block(at, size[-2], size[-1]))
            at = blocks[-1].end
    return get_rope_index(at, blocks)


def separated(runs: list[Run]) -> list[Run]:
    """No two pictures touch: the markers around each are text."""
    return [run for own in runs for run in ((TEXT, 1), own)]


SIZES = st.integers(1, 5)
RUNS = st.lists(
    st.one_of(
        st.tuples(st.just(TEXT), st.integers(1, 9)),
        st.tuples(st.just(IMAGE), SIZES, SIZES),
        st.tuples(st.just(VIDEO), st.integers(1, 3), SIZES, SIZES),
    ),
    min_size=1,
    max_size=6,
)


@given(RUNS)
def test_positions_and_delta_are_those_of_transformers(runs):
    wanted, delta = of_transformers(separated(runs))
    positions, own_delta = of_ours(separated(runs))
    assert positions.tolist() == wanted.tolist() and own_delta == delta
