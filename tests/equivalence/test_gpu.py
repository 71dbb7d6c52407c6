"""On a CUDA device, natively, every milestone from m4 on gives the tokens that transformers gives on the CPU.

m3 has more to say about its kernels there: `tests/m3_paged_attention/test_gpu.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.equivalence.harness import VARIANTS, Prompt, Reference, ReferenceModel, Variant, compare
from tests.equivalence.prompts import MAX_TOKENS

pytestmark = pytest.mark.gpu

ON_GPU = [
    replace(variant, name=f"{variant.name}-{backend}", backend=backend)
    for variant in VARIANTS
    if variant.milestone >= "m4" and variant.backend == "torch"
    for backend in ("triton", "torch")
]


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """float32 means float32: no TF32 in the products that are compared."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("model", ["embedded", "llama"])  # llama's heads are wide enough for native kernels
@pytest.mark.parametrize("variant", ON_GPU, ids=str)
def test_greedy_answers_are_those_of_transformers_on_the_cpu(
    variant: Variant,
    model: str,
    references: Callable[[str], tuple[list[Prompt], list[Reference]]],
    reference_model: Callable[[str], ReferenceModel],
) -> None:
    prompts, expected = references(model)
    params = variant.package.SamplingParams(max_tokens=MAX_TOKENS)
    with variant.make_engine(reference_model(model).directory, "cuda") as engine:
        for _ in range(2):  # what the first round has left is found by the second
            outputs = list(engine.generate_batch(prompts, params).values())
            assert [output.error for output in outputs] == [None] * len(prompts)
            compare(expected, [output.token_ids for output in outputs])
        assert engine.stats().kv_tokens == 0
        assert not variant.preempts or variant.num_preemptions(engine) > 0
        assert not variant.evicts or variant.num_evicted_tokens(engine) > 0
