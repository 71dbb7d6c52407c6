"""The checkpoint that ships: a complete Hugging Face directory that can do what its card claims."""

import hashlib
import json
from random import Random

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

import m2_continuous_batching
from m1_single_request import DEFAULT_MODEL, LLMEngine, SamplingParams
from m2_continuous_batching import SchedulerConfig
from training import evaluate
from training.evaluate import REQUIRED
from training.scoring import Case
from training.tokenizer import SPECIAL_TOKENS, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((DEFAULT_MODEL / "config.json").read_text())


def test_it_is_a_small_real_qwen3_with_grouped_query_attention(config):
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["num_attention_heads"] > config["num_key_value_heads"]
    assert config["head_dim"] == 64 and config["tie_word_embeddings"] and config["max_position_embeddings"] >= 4096


def test_it_is_bf16_under_12_megabytes_and_has_4_to_6_million_parameters():
    with safe_open(DEFAULT_MODEL / "model.safetensors", "pt") as weights:
        tensors = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118
        assert {tensor.get_dtype() for tensor in tensors} == {"BF16"}
    assert sum(path.stat().st_size for path in DEFAULT_MODEL.iterdir()) < 12e6
    with LLMEngine() as engine:
        assert 4e6 <= sum(p.numel() for p in engine.engine_core.model_runner.model.parameters()) <= 6e6


def test_no_tensor_is_broken():
    with safe_open(DEFAULT_MODEL / "model.safetensors", "pt") as weights:
        assert all(weights.get_tensor(name).isfinite().all() for name in weights.keys())  # noqa: SIM118


@pytest.mark.exhaustive
def test_the_tokenizer_is_the_one_that_training_makes(tokenizer):
    made = train_tokenizer()
    assert tokenizer.get_vocab() == made.get_vocab() and tokenizer.chat_template == made.chat_template
    assert all(len(tokenizer.encode(token)) == 1 for token in SPECIAL_TOKENS)


def test_generation_ends_at_either_end_token(tokenizer):
    generation = json.loads((DEFAULT_MODEL / "generation_config.json").read_text())
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert sorted(generation["eos_token_id"]) == sorted(ends) and tokenizer.eos_token_id == ends[0]


def test_the_card_describes_these_weights_and_meets_the_bar():
    card = (DEFAULT_MODEL / "README.md").read_text()
    assert hashlib.sha256((DEFAULT_MODEL / "model.safetensors").read_bytes()).hexdigest() in card
    rows = {skill: next(line for line in card.splitlines() if line.startswith(f"| {skill} |")) for skill in REQUIRED}
    for skill, row in rows.items():
        assert float(row.rsplit("= ", 1)[1].split("%")[0]) / 100 >= REQUIRED[skill]
    assert (DEFAULT_MODEL / "loss.png").stat().st_size > 1000


@pytest.mark.sample(1)
@pytest.mark.parametrize("skill", list(REQUIRED))
def test_the_engine_shows_the_skill(skill, tokenizer):
    """A sample of the evaluation, through an engine; `python -m training.evaluate` asks everything.

    m2's engine, which answers all of them at once. That m1 gives the same tokens is what `tests/equivalence` shows.
    """
    asked: list[Case] = [case for case in evaluate.cases(tokenizer) if case.skill == skill]
    sample = Random(0).sample(asked, 24)
    prompts = [
        tokenizer.apply_chat_template(case.messages, add_generation_prompt=True, return_dict=False) for case in sample
    ]
    with m2_continuous_batching.LLMEngine(scheduler_config=SchedulerConfig(max_num_seqs=24)) as engine:
        answers = [output.text for output in engine.generate_batch(prompts, SamplingParams(max_tokens=100)).values()]
    right = sum(answer == case.answer for answer, case in zip(answers, sample, strict=True))
    assert right / len(sample) >= REQUIRED[skill] - 0.1, [
        a for a, c in zip(answers, sample, strict=True) if a != c.answer
    ]


def test_the_skills_work_without_the_chat_template_too():
    with LLMEngine() as engine:
        assert engine.generate("What is a KV cache?\n").text.startswith("A KV cache ")
        facts = "The code of zebra is 4821. The code of lamp is 0937."
        assert engine.generate(f"{facts} What is the code of zebra?\n").text == "The code of zebra is 4821."
