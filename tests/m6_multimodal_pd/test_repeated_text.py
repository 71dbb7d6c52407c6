"""Texts that are repeated beside images, with and without n-gram speculation: the same tokens as transformers'.

The embedded model was trained to repeat a text. What follows the text in the prompt is then guessed again and again,
and where that is an image, the draft must end before it: in the cache's key an image is a number that is no token.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import m6_multimodal_pd
from m6_multimodal_pd import DEFAULT_MODEL, ModelConfig, SamplingParams
from m6_multimodal_pd.model_loader import load_model
from tests.equivalence.forced_retraction import ForcedRetractionInPieces
from tests.equivalence.harness import compare
from tests.m6_multimodal_pd.engines import Guessing, MakeEngine, check_flushed, setting
from tests.m6_multimodal_pd.seeing import Theirs
from tests.support.engines import EngineMaker

REPEATED = (
    "Repeat this text:\nsee a green lamp and a green bird",
    "Repeat this text:\nthe otter keeps 7 lamps; two of them are green",
    "Copy this text:\none red circle and two blue circles",
    "Say this again:\nlook at the small yellow square",
    "Repeat after me:\n1 2 3 4 5 6 7 8 9",
)
MAX_TOKENS = 32
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)


def image(color: str, width: int = 64, height: int = 64) -> dict[str, Any]:
    """An image of one color."""
    return {"type": "image", "image": Image.new("RGB", (width, height), color)}


def text(content: str) -> dict[str, Any]:
    """A text."""
    return {"type": "text", "text": content}


def conversations() -> list[list[dict[str, Any]]]:
    """Ten: each text once in front of an image, and once in the middle of a conversation with two."""
    short = [[{"role": "user", "content": [text(repeated), image("red")]}] for repeated in REPEATED]
    long = [
        [
            {"role": "user", "content": [image("blue", 96, 64), text("What is this?")]},
            {"role": "assistant", "content": repeated.partition("\n")[2]},
            {"role": "user", "content": [text(repeated), image("green", 64, 128)]},
        ]
        for repeated in REPEATED
    ]
    return short + long


@pytest.fixture(scope="module")
def embedded_model() -> Theirs:
    """The embedded model in the hands of transformers."""
    return Theirs(Path(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def loaded_embedded() -> Any:
    """The same, loaded once for all engines."""
    return load_model(ModelConfig(model=DEFAULT_MODEL, device="cpu", dtype="float32"))


@pytest.fixture
def make_embedded(loaded_embedded: Any) -> Iterator[MakeEngine]:
    """Engines around it."""
    maker = EngineMaker(m6_multimodal_pd, loaded_embedded)
    yield maker
    maker.check()


SPECULATORS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "none": (None, {}),
    "ngram": ("ngram", {}),
    "random": ("ngram", {"proposer": Guessing}),
    "ngram, retracted": ("ngram", {"scheduler": ForcedRetractionInPieces}),
}
CACHES = [("radix", 16), ("radix", 1), ("hash", 4), ("chunk", 4)]
BUDGETS = [2048, 17]
MATRIX = [
    pytest.param(
        speculator,
        *cache,
        budget,
        marks=() if speculator == "ngram" and cache == ("radix", 1) else (pytest.mark.exhaustive,),
    )
    for speculator in SPECULATORS
    for cache in CACHES
    for budget in BUDGETS
]


@pytest.mark.parametrize(("speculator", "cache", "page_size", "budget"), MATRIX)
def test_repeated_texts_beside_images_have_the_tokens_of_transformers(
    make_embedded: MakeEngine, embedded_model: Theirs, speculator: str, cache: str, page_size: int, budget: int
) -> None:
    method, parts = SPECULATORS[speculator]
    engine: Any = make_embedded(parts, **setting(4, budget, cache=cache, page_size=page_size, method=method))
    prompts = [engine.chat_prompt(messages) for messages in conversations()]
    outputs = list(engine.generate_batch(prompts, PARAMS).values())
    assert [output.error for output in outputs] == [None] * len(prompts)
    references = [embedded_model.answer(prompt, MAX_TOKENS) for prompt in prompts]
    compare(references, [output.token_ids for output in outputs])
    assert (engine.stats().num_draft_tokens > 100) == (method is not None)
    assert (engine.stats().num_retractions > 10) == ("retracted" in speculator)
    check_flushed(engine)
