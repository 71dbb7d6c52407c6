"""Qwen3-VL's decoder: transformers' logits, with pictures, whole and cut, over blocks and in flat batches."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from m3_paged_attention.attention import native_library
from m3_paged_attention.config import ModelConfig
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.models.rotary import RotaryTable
from m6_multimodal_pd.model_loader import LoadedModel, load_model
from m6_multimodal_pd.models.qwen3_vl import Qwen3VLDecoder, VisualTokens
from tests.m3_paged_attention.test_decoder import Paged, tokens_of
from tests.m6_multimodal_pd.vl_models import TOKENS, WIDE_HEADS, Prompt, save_random_vl_model, theirs

BACKENDS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(bool(native_library.obstacle()), reason="no C++ compiler")),
]
TOLERANCE = 1e-4
SHAPES: dict[str, dict[str, Any]] = {
    "heads of 64": {},
    "heads of 128": {"text": WIDE_HEADS},
    "not tied": {"tie_word_embeddings": False},
    "layers of the tower in another order": {"vision": {"deepstack_visual_indexes": [2, 0]}},
    "as many deepstack layers as there are": {"vision": {"deepstack_visual_indexes": [0, 1, 2]}},
    "no deepstack": {"vision": {"deepstack_visual_indexes": []}},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`directory(shape)`: one of `SHAPES`, as files."""

    @functools.cache
    def saved(shape: str = "heads of 64") -> Path:
        return save_random_vl_model(tmp_path_factory.mktemp("vl"), **SHAPES[shape])

    return saved


def load(directory: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(**{"model": directory, "device": "cpu", "attention_backend": "torch"} | settings))


class Seeing:
    """The decoder as m3's `Paged` calls it, with what `Paged` knows nothing of laid beside it before each step."""

    def __init__(self, decoder: Any) -> None:
        self.decoder, self.config, self.compute_logits = decoder, decoder.config, decoder.compute_logits
        self.positions: Tensor | None = None
        self.visual: VisualTokens | None = None

    def forward(self, input_ids: Tensor, positions: Tensor, kv: Any, metadata: Any) -> Tensor:
        positions = positions if self.positions is None else self.positions
        hidden: Tensor = self.decoder.forward(input_ids, positions, kv, metadata, self.visual)
        return hidden


class VLPaged(Paged):
    """`Paged` for prompts with pictures, whose positions come from transformers."""

    def __init__(self, loaded: LoadedModel, prompts: dict[str, Prompt], reference: Any, **settings: Any) -> None:
        super().__init__(loaded, **settings)
        self.seeing, self.prompts = Seeing(loaded.model), prompts
        self.model: Any = self.seeing
        self.places: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.positions: dict[str, Tensor] = {}
        assert loaded.vision is not None
        for rid, prompt in prompts.items():
            given = {key: value for key, value in prompt.arguments().items() if not key.startswith("pixel")}
            self.positions[rid] = reference.model.get_rope_index(**given)[0][:, 0]
            self.places[rid] = torch.tensor(prompt.kinds).nonzero().flatten()
            encoded = loaded.vision.encode(prompt.shown)
            self.rows[rid] = torch.cat(encoded) if encoded else torch.empty(0, loaded.vision.width)

    def advance(self, counts: dict[str, int], *, no_deepstack: bool = False) -> dict[str, Tensor]:
        """Run so many tokens more of these prompts."""
        rows = sorted(counts.items(), key=lambda row: row[1] == 1)  # as `Paged` does: prefills first
        batch, positions, places, embeddings, first = {}, [], [], [], 0
        for rid, count in rows:
            done = self.lengths.get(rid, 0)
            batch[rid] = self.prompts[rid].tokens[done : done + count]
            positions.append(self.positions[rid][:, done : done + count])
            inside = (self.places[rid] >= done) & (self.places[rid] < done + count)
            places.append(self.places[rid][inside] - done + first)
            embeddings.append(self.rows[rid][inside])
            first += count
        rows_seen = torch.cat(embeddings)
        if no_deepstack:
            rows_seen = rows_seen.clone()
            rows_seen[:, self.model.config.hidden_size :] = 0.0
        self.seeing.positions = torch.cat(positions, dim=1)
        self.seeing.visual = VisualTokens(torch.cat(places), rows_seen) if len(rows_seen) else None
        return self.step(batch)

    def run(self, plan: list[dict[str, int]]) -> dict[str, Tensor]:
        """The logits of all prompts, piece by piece."""
        found: dict[str, list[Tensor]] = {rid: [] for rid in self.prompts}
        for counts in plan:
            for rid, logits in self.advance(counts).items():
                found[rid].append(logits)
        return {rid: torch.cat(parts) for rid, parts in found.items()}


def empty(directory: Path) -> Prompt:
    config = AutoConfig.from_pretrained(directory)
    return Prompt({name: getattr(config, name) for name in TOKENS})


def prompts_of(directory: Path) -> dict[str, Prompt]:
    def begin(seed: int, count: int) -> Prompt:
        return empty(directory).text(tokens_of(seed, count))

    return {
        "text": begin(1, 20),
        "one image": begin(2, 5).image(1, 8, 6).text(tokens_of(3, 7)),
        "two images": begin(4, 2).image(2, 4, 4).text(tokens_of(5, 3)).image(3, 2, 10).text(tokens_of(6, 4)),
        "a video": begin(7, 3).video(4, 3, 4, 6).text(tokens_of(8, 5)),
        "all": begin(9, 1).image(5, 4, 4).video(6, 2, 4, 4).image(7, 6, 4).text(tokens_of(10, 3)),
        "a picture first and last": empty(directory).image(8, 4, 6),
        "a small image": begin(11, 2).image(9, 4, 4).text(tokens_of(12, 2)),
    }


@torch.inference_mode()
def expected(reference: Any, prompt: Prompt) -> Tensor:
    logits: Tensor = reference(**prompt.arguments()).logits[0].float()
    return logits


def pieces(prompt: Prompt, size: int) -> list[int]:
    return [min(size, len(prompt.tokens) - start) for start in range(0, len(prompt.tokens), size)]


def check(directory: Path, names: tuple[str, ...] = (), size: int | None = None, **settings: Any) -> None:
    """All tokens of these prompts or all, each alone and in pieces of `size`, have transformers' logits."""
    reference, loaded = theirs(directory), load(directory, **settings)
    if "attention_backend" in settings:
        assert loaded.model.backend.name == settings["attention_backend"]
    prompts = {name: prompt for name, prompt in prompts_of(directory).items() if name in (names or (name,))}
    for name, prompt in prompts.items():
        paged = VLPaged(loaded, {name: prompt}, reference)
        ours = paged.run([{name: count} for count in pieces(prompt, size or len(prompt.tokens))])[name]
        wanted = expected(reference, prompt)
        assert ours.dtype == torch.float32 and ours.shape == wanted.shape
        assert float(wanted.std()) > 0.5, "the comparison means something"
        torch.testing.assert_close(ours, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(directory: Any, shape: str) -> None:
    check(directory(shape))


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 3, 7, 16])
def test_a_cut_inside_a_picture_changes_nothing(directory: Any, size: int) -> None:
    check(directory(), size=size)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", ["heads of 64", "heads of 128"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_sees(directory: Any, backend: str, shape: str) -> None:
    check(directory(shape), ("two images", "a video"), 9, attention_backend=backend)


@pytest.mark.interpreter
def test_triton_kernels_see_in_the_interpreter(directory: Any) -> None:
    """Few tokens, for a program takes milliseconds there; one of them alone, as in a decode."""
    pytest.importorskip("triton")
    check(directory(), ("a small image",), 7, attention_backend="triton")
    check(directory(), ("a small image",), 9, attention_backend="triton")


def test_requests_in_one_batch_do_not_see_each_others_pictures(directory: Any) -> None:
    """Pictures, pieces of pictures, text and decodes in one step."""
    reference, loaded, prompts = theirs(directory()), load(directory()), prompts_of(directory())
    paged = VLPaged(loaded, prompts, reference, block_size=16)
    left, plan = {name: len(prompt.tokens) for name, prompt in prompts.items()}, []
    for number in range(100):
        counts = {name: min(1 + (number + place) % 5, left[name]) for place, name in enumerate(left) if left[name]}
        left = {name: count - counts.get(name, 0) for name, count in left.items()}
        plan += [counts] if counts else []
    found = paged.run(plan)
    for name, prompt in prompts.items():
        torch.testing.assert_close(found[name], expected(reference, prompt), atol=TOLERANCE, rtol=0)


def test_what_the_middle_layers_saw_matters(directory: Any) -> None:
    reference, loaded = theirs(directory()), load(directory())
    prompt = prompts_of(directory())["one image"]
    seen, blind = (
        VLPaged(loaded, {"a": prompt}, reference).advance({"a": len(prompt.tokens)}, no_deepstack=no)["a"]
        for no in (False, True)
    )
    first = prompt.kinds.index(1)
    torch.testing.assert_close(seen[:first], blind[:first])
    assert float((seen[first:] - blind[first:]).abs().amax(dim=1).min()) > 0.1
    assert float((seen[-1] - blind[-1]).abs().max()) > 0.1, "text behind the picture as well"


def test_rows_and_columns_matter(directory: Any) -> None:
    reference, loaded = theirs(directory()), load(directory())
    prompt = prompts_of(directory())["one image"]
    paged, swapped = (VLPaged(loaded, {"a": prompt}, reference) for _ in range(2))
    swapped.positions["a"] = swapped.positions["a"][[0, 2, 1]]
    ours, others = (each.advance({"a": len(prompt.tokens)})["a"] for each in (paged, swapped))
    assert float((ours[-1] - others[-1]).abs().max()) > 0.05


def test_text_at_equal_axes_is_text_on_one_axis_bit_for_bit(directory: Any) -> None:
    loaded, text = load(directory()), tokens_of(11, 20)
    flat = Paged(loaded).step({"a": text})["a"]
    paged = Paged(loaded)
    paged.model = seeing = Seeing(loaded.model)  # type: ignore[assignment]
    seeing.positions = torch.arange(20).expand(3, -1)
    assert torch.equal(paged.step({"a": text})["a"], flat)


def test_a_step_without_pictures_is_a_step_of_m3(directory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operations, so also the same cost: every row from m3's table, and nothing between the layers."""
    loaded, text = load(directory()), tokens_of(12, 9)
    assert isinstance(loaded.model, Qwen3VLDecoder)
    asked: list[Tensor] = []
    read = RotaryTable.__call__
    monkeypatch.setattr(RotaryTable, "__call__", lambda table, given: asked.append(given) or read(table, given))
    monkeypatch.setattr(loaded.model.mrope, "gather", None)
    ours = Paged(loaded).step({"a": text})["a"]
    monkeypatch.setattr(Qwen3VLDecoder, "forward", Decoder.forward)
    assert torch.equal(Paged(loaded).step({"a": text})["a"], ours)
    assert [given.tolist() for given in asked] == [list(range(9))] * 2


def test_the_id_of_a_picture_may_be_anything(directory: Any) -> None:
    """It is replaced; an engine may keep a name of the picture there, above the vocabulary."""
    reference, loaded = theirs(directory()), load(directory())
    prompt = prompts_of(directory())["two images"]
    usual = VLPaged(loaded, {"a": prompt}, reference).advance({"a": len(prompt.tokens)})["a"]
    named = VLPaged(loaded, {"a": prompt}, reference)
    prompt.tokens = [2**30 + 7 if kind else token for token, kind in zip(prompt.tokens, prompt.kinds, strict=True)]
    assert torch.equal(named.advance({"a": len(prompt.tokens)})["a"], usual)


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_close_as_transformers(directory: Any, dtype: str, backend: str) -> None:
    reference, half = theirs(directory()), theirs(directory(), getattr(torch, dtype))
    loaded = load(directory(), dtype=dtype, attention_backend=backend)
    errors, usual = [], []
    for name, prompt in prompts_of(directory()).items():
        paged = VLPaged(loaded, {name: prompt}, reference)
        ours = paged.run([{name: count} for count in pieces(prompt, 11)])[name]
        exact = expected(reference, prompt)
        errors.append((ours - exact).abs().mean())
        usual.append((expected(half, prompt) - exact).abs().mean())
        assert ours.dtype == torch.float32
    assert sum(map(float, errors)) < 1.2 * sum(map(float, usual))
