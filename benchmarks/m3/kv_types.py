"""m3 with each format of the KV memory: answers, perplexity, log-probabilities, and the time of decode attention.

The skills and the texts are those of `training.evaluate`: lists, sentences and wordings that training never had. All
engines compute in float32, so that only the format of the KV differs. Attention is measured alone, over blocks in
random order, the formats in turns; a ratio is the median of the ratios of its rounds.
"""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.engines import TEXT_MODEL
from benchmarks.lesson import SEED, Lesson, Row, Size
from benchmarks.timing import in_turns, ratio
from training.evaluate import cases
from training.scoring import Case

FORMATS = ("auto", "bfloat16", "int8", "fp8")
SHAPES = {"embedded, float32": (4, 2, 64, "float32"), "0.6B, bfloat16": (16, 8, 128, "bfloat16")}
"""Query heads, KV heads, head_dim and precision of the model."""
BATCHES, CONTEXT, BLOCK_SIZE, LAYERS = (16, 64), 300, 16, 4


def quality(size: Size) -> Row:
    """Return a row for each format: skills, perplexity, and the change of log-probabilities."""
    tokenizer = AutoTokenizer.from_pretrained(TEXT_MODEL)
    asked = cases(tokenizer)[:: 40 if size.quick else 1]
    results = [answered(name, asked, tokenizer) for name in FORMATS]
    usual, rows = results[0][1], []
    for row, found in results:
        change = (found - usual).abs()
        rows.append(row | {"mean_change": change.mean().item(), "largest_change": change.max().item()})
    return {"rows": rows, "questions": len(asked), "tokens": len(usual)}


def answered(name: str, asked: list[Case], tokenizer: Any) -> tuple[Row, torch.Tensor]:
    """Return the skills with KV of one format, and the log-probabilities of the tokens of all right answers."""
    from m3_paged_attention import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig

    config = ModelConfig(model=TEXT_MODEL, device="cpu", dtype="float32")
    limits = SchedulerConfig(max_num_seqs=64)
    with LLMEngine(
        model_config=config, scheduler_config=limits, cache_config=CacheConfig(kv_cache_dtype=name)
    ) as engine:
        template = partial(tokenizer.apply_chat_template, tokenize=False)
        prompts = [template(list(case.messages), add_generation_prompt=True) for case in asked]
        lengths = [len(tokenizer.encode(case.answer)) + 4 for case in asked]
        outputs = engine.generate_batch(prompts, [SamplingParams(max_tokens=length) for length in lengths])
        right = [output.text == case.answer for output, case in zip(outputs.values(), asked, strict=True)]
        encode = partial(tokenizer.encode, add_special_tokens=False)
        texts = [(encode(prompt), encode(case.answer)) for prompt, case in zip(prompts, asked, strict=True)]
        rated = engine.generate_batch(
            [prompt + answer for prompt, answer in texts], SamplingParams(max_tokens=1, prompt_logprobs=0)
        )
        of_answers = [
            output.prompt_logprobs[len(prompt) :] for output, (prompt, _) in zip(rated.values(), texts, strict=True)
        ]
        found = [next(iter(each.values())).logprob for answer in of_answers for each in answer]
        skills = dict.fromkeys(case.skill for case in asked)
        shares = {
            skill: statistics.mean(ok for ok, case in zip(right, asked, strict=True) if case.skill == skill)
            for skill in skills
        }
        spec = engine.engine_core.executor.kv_cache_spec(BLOCK_SIZE)
    row = {"format": name, "bytes_per_token": spec.bytes_per_token, "skills": shares}
    return row | {"perplexity": math.exp(-statistics.mean(found))}, torch.tensor(found)


def attention(size: Size) -> Row:
    """Return a row for each shape and number of requests: decode attention in each format against the model's own."""
    rows = []
    for shape, (heads, kv_heads, head_dim, precision) in SHAPES.items():
        for batch in BATCHES:
            dtype = getattr(torch, precision)
            sides = {name: decode_attention(name, batch, heads, kv_heads, head_dim, dtype) for name in FORMATS}
            times = in_turns(sides, rounds=1 if size.quick else 5 * size.rounds)
            ratios = {name: ratio(times["auto"], times[name]) for name in FORMATS[1:]}
            rows.append({"shape": shape, "batch": batch, "auto": statistics.median(times["auto"]), "ratios": ratios})
    return {"rows": rows, "context": CONTEXT}


def decode_attention(
    name: str, batch: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Callable[[], float]:
    """Return a function that measures one layer's attention of a decode step, in seconds."""
    from m3_paged_attention.attention.metadata import AttentionMetadata
    from m3_paged_attention.attention.registry import resolve
    from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
    from m3_paged_attention.kv_dtype import KV_DTYPES
    from m3_paged_attention.kv_storage import KVStorage

    backend, device, generator = resolve("auto", torch.device("cpu")), torch.device("cpu"), torch.Generator()
    generator.manual_seed(SEED)
    spec = KVCacheSpec(
        block_size=BLOCK_SIZE,
        num_layers=LAYERS,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=KV_DTYPES.get(name, dtype),
    )
    each = spec.blocks_for(CONTEXT)
    kv = KVStorage(KVCacheConfig(spec=spec, num_blocks=batch * each), device=device)
    tables = 1 + torch.randperm(batch * each, generator=generator, dtype=torch.int32).view(batch, each)
    slots = torch.arange(BLOCK_SIZE, (batch * each + 1) * BLOCK_SIZE)
    for layer in range(LAYERS):
        key, value = torch.randn(2, len(slots), kv_heads, head_dim, generator=generator).to(dtype)
        backend.store_kv(key, value, kv.layer(layer), slots)
    query = torch.randn(batch, heads, head_dim, generator=generator).to(dtype)
    new = np.zeros(batch, dtype=np.int64)
    metadata = AttentionMetadata.build([1] * batch, [CONTEXT - 1] * batch, tables.numpy(), new)
    times = max(1, 2**21 // (batch * CONTEXT * heads * head_dim))

    def measure() -> float:
        began = time.perf_counter()
        for _ in range(times):
            for layer in range(LAYERS):
                backend.attention(query, kv.layer(layer), metadata, head_dim**-0.5)
        return (time.perf_counter() - began) / (times * LAYERS)

    return measure


LESSON = Lesson(
    "m3_kv_types", lambda size: {"quality": partial(quality, size), "attention": partial(attention, size)}, rounds=5
)
