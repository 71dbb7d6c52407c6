"""Packed linear layers compute what the layers they replace compute, and replace no others."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from m1_single_request import DEFAULT_MODEL
from m2_continuous_batching import packed_linear
from m2_continuous_batching.packed_linear import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32, torch.device("cpu")), reason="this build of torch has no oneDNN"
)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(1,), (16,), (3, 5), (1, 200)], ids=str)
def test_a_packed_layer_equals_the_layer(rows: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(200, 760, bias=bias)
    hidden = torch.randn(*rows, 200)
    with torch.inference_mode():
        packed = PackedLinear(linear)(hidden)
    assert packed.shape == (*rows, 760)
    assert torch.allclose(packed, linear(hidden), atol=1e-5)


def test_the_logits_of_a_packed_model_stay() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32).eval()
    ids = torch.arange(300, 340)[None]
    with torch.inference_mode():
        before = model(input_ids=ids, use_cache=False).logits
        assert pack_linears(model) == 3 * model.config.num_hidden_layers + 1, "the MLPs and the head"
        after = model(input_ids=ids, use_cache=False).logits
    assert (before - after).abs().max() < 1e-4
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size, "tied: the embedding keeps its own"
    assert pack_linears(model) == 0, "whatever is packed stays so"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_other_precision_are_left_alone(dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=dtype)
    assert pack_linears(model) == 0


def test_a_torch_without_the_operations_keeps_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "can_pack", lambda dtype, device: False)
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)
    assert pack_linears(model) == 0
    assert type(model.get_output_embeddings()) is nn.Linear
