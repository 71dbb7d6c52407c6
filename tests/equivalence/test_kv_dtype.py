"""With KV in one format, every milestone and every way of running it gives these requests the same greedy tokens.

Between formats tokens may differ; `tests/m3_paged_attention/test_kv_dtype.py` bounds the logits.
"""

from importlib import import_module
from typing import Any

import pytest

from m1_single_request.config import DEFAULT_MODEL
from notebooks.shapes import Shape, picture

SHARED = "The capital of Peru is Lima. The code of Ann is 4410. The code of Tom is 7321. "
PROMPTS = [
    f"{SHARED}{question}" for question in ("What is the code of Tom?", "What is the code of Ann?", "Repeat that.")
]
TEXT = {"type": "text", "text": "What do you see?"}
Run = tuple[str, dict[str, dict[str, Any]]]
DRAFTS = {"speculative": {"method": "draft_model"}}
RUNS: dict[str, Run] = {
    "m3": ("m3_paged_attention", {}),
    "m3, one at a time": ("m3_paged_attention", {"scheduler": {"max_num_seqs": 1}}),
    "m3, swapped": (
        "m3_paged_attention",
        {"cache": {"num_blocks": 40, "block_size": 4}, "scheduler": {"preemption_mode": "swap"}},
    ),
    "m4": ("m4_radix_cache", {"scheduler": {"max_num_seqs": 1}}),  # so that prefixes are shared
    "m5, in pieces": ("m5_chunked_prefill_spec", {"scheduler": {"max_num_batched_tokens": 24}}),
    "m5, n-grams": ("m5_chunked_prefill_spec", {"speculative": {"method": "ngram"}}),
    "m5, draft model": ("m5_chunked_prefill_spec", DRAFTS),
    "m6, overlapped": ("m6_multimodal_pd", {"scheduler": {"enable_overlap": True}}),
    "m6, prefill and decode": ("m6_multimodal_pd", {"disaggregation": {"transport": "in_process"}} | DRAFTS),
}
IN_SHORT = ("m3", "m3, swapped", "m4", "m5, draft model", "m6, overlapped", "m6, prefill and decode")


def answers(run: str, kv_dtype: str, device: str = "cpu") -> list[list[int]]:
    """The tokens of all prompts, and the check that the memory is as large as the format says."""
    package, settings = RUNS[run]
    module: Any = import_module(package)
    values = {name: dict(fields) for name, fields in settings.items()}
    values.setdefault("cache", {})["kv_cache_dtype"] = kv_dtype
    values["model"] = {"model": DEFAULT_MODEL, "device": device, "dtype": "float32"} | values.get("model", {})
    configs = {f"{name}_config": getattr(module, f"{name.title()}Config")(**fields) for name, fields in values.items()}
    with module.LLMEngine(**configs) as engine:
        outputs = engine.generate_batch(PROMPTS, module.SamplingParams(max_tokens=16, ignore_eos=True))
        if run == "m3, swapped":
            assert engine.stats().num_preemptions
        return [list(output.token_ids) for output in outputs.values()]


@pytest.mark.parametrize(
    ("kv_dtype", "runs"),
    [
        ("int8", IN_SHORT),
        pytest.param("int8", tuple(RUNS), marks=pytest.mark.exhaustive),
        pytest.param("fp8", tuple(RUNS), marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", tuple(RUNS), marks=pytest.mark.exhaustive),
    ],
    ids=["int8", "int8, all", "fp8, all", "bfloat16, all"],
)
def test_all_ways_give_the_same_tokens(kv_dtype: str, runs: tuple[str, ...]) -> None:
    first, *others = (answers(run, kv_dtype) for run in runs)
    for run, other in zip(runs[1:], others, strict=True):
        assert other == first, run


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_all_ways_give_the_same_tokens_on_a_gpu(kv_dtype: str) -> None:
    """m6 replays graphs there."""
    first, *others = (answers(run, kv_dtype, "cuda") for run in ("m3", "m3, swapped", "m4", "m6, overlapped"))
    assert all(other == first for other in others)


IMAGE_RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "whole": {},
    "overlapped": {"scheduler": {"enable_overlap": True}},
    "in pieces": {"scheduler": {"max_num_batched_tokens": 24}},
    "prefill and decode": {"disaggregation": {"transport": "in_process"}},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_all_ways_describe_an_image_with_the_same_tokens(kv_dtype: str) -> None:
    module: Any = import_module("m6_multimodal_pd")
    content = [{"type": "image", "image": picture(Shape("big", "red", "circle", "center"))}, TEXT]
    found = []
    for settings in IMAGE_RUNS.values():
        configs = {f"{name}_config": getattr(module, f"{name.title()}Config")(**v) for name, v in settings.items()}
        with module.LLMEngine(cache_config=module.CacheConfig(kv_cache_dtype=kv_dtype), **configs) as engine:
            output = engine.chat([{"role": "user", "content": content}], module.SamplingParams(max_tokens=12))
            found.append(output.token_ids)
    assert "red circle" in output.text and all(tokens == found[0] for tokens in found)
