"""Contract of the Triton kernel that stores new keys and values in their slots: m3's, interpreted without a GPU."""

import os
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"  # before triton is imported

import triton

from m3_paged_attention import CacheConfig, LLMEngine, ModelConfig, SamplingParams
from m3_paged_attention.attention.triton_backend import TritonBackend
from tests.contracts.part import Part, same, substituted

PART = Part(
    name="store_kv",
    target="m3_paged_attention.attention.triton_store:store_kv_kernel",
    lesson="docs/m3_model.md#the-triton-backend-read-in-place-on-a-gpu",
    starter="my_store_kv_kernel",
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SLOTS = 8
GUARD = 4096
"""Numbers around each tensor, so that a kernel that goes wrong by a little harms nothing."""


def launch(kernel: Any, new: Sequence[Tensor], caches: Sequence[Tensor], slots: Sequence[int]) -> None:
    """Run one program for each token of `new`, keys and values `[tokens, width]`, which may be views."""
    num_tokens, width = new[0].shape
    strides = [each.stride(0) for each in new]
    pad = triton.next_power_of_2(width)
    try:
        mapping = torch.tensor(slots, device=DEVICE)
        kernel[(num_tokens,)](*new, *caches, mapping, *strides, WIDTH=width, WIDTH_PAD=pad)
    except Exception as error:
        if "raise NotImplementedError" in str(error):  # so says the compiler; the interpreter raises it
            raise NotImplementedError from error
        raise (error.__cause__ or error) from None


def guarded(num_rows: int, stride: int, fill: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor `[num_rows, stride]` in the middle of memory that has the same number."""
    size = num_rows * stride
    memory = torch.full((2 * GUARD + size,), fill, dtype=dtype, device=DEVICE)
    return memory[GUARD : GUARD + size].view(num_rows, stride)


def is_kept(cache: Tensor) -> bool:
    """Whether the memory around a cache is as it was."""
    memory = torch.as_strided(cache, (2 * GUARD + cache.numel(),), (1,), 0)
    return not (memory[:GUARD].any() or memory[-GUARD:].any())


def check(
    kernel: Any,
    slots: Sequence[int],
    *,
    hint: str = "",
    width: int = 4,
    strides: tuple[int, int] | None = None,
    types: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    names: Sequence[str] = ("key", "value"),
    ignored: Sequence[int] = (),
) -> None:
    """Compare every slot of the caches, except those that are `ignored`.

    The keys of token t are 10t + 1, 10t + 2, ...; its values are negative. `strides` of both, if they are views;
    `types`: of the new ones and of the caches, which are zero before.
    """
    strides = strides or (width, width)
    new = [guarded(len(slots), stride, 99, types[0])[:, stride - width :] for stride in strides]
    numbers = 10 * torch.arange(len(slots), device=DEVICE)[:, None] + torch.arange(1, width + 1, device=DEVICE)
    for rows, sign in zip(new, (1, -1), strict=True):
        rows.copy_(sign * numbers)
    caches = [guarded(NUM_SLOTS, width, 0, types[1]) for _ in new]
    launch(kernel, new, caches, slots)
    on = f"slot_mapping {list(slots)}, WIDTH {width}, WIDTH_PAD {triton.next_power_of_2(width)}, "
    on += f"key_stride {strides[0]}, value_stride {strides[1]}, {str(types[1]).removeprefix('torch.')} caches"
    for name, rows, cache in zip(("key", "value"), new, caches, strict=True):
        expected = torch.zeros(NUM_SLOTS, width, device=DEVICE)
        expected[torch.tensor(slots, device=DEVICE)] = rows.float()
        text = f"{on}; {name}s {rows.int().tolist()}"
        for slot in sorted(set(range(NUM_SLOTS)) - set(ignored)) if name in names else ():
            same(cache[slot].tolist(), expected[slot].tolist(), on=f"{text}; slot {slot} of {name}_cache", hint=hint)
        same(is_kept(cache), True, on=f"{text}; is the memory around {name}_cache as before", hint=hint)


def test_a_key_goes_to_its_slot(part: Any) -> None:
    """The key of the only token is in its slot of the key cache, and nothing else is written there."""
    hint = "Slot s begins at element s * WIDTH of the cache. Its number is in `slot_mapping_ptr`, which is a pointer."
    for slot in (0, 3):
        check(part, [slot], names=["key"], hint=hint)


def test_a_value_goes_to_its_slot(part: Any) -> None:
    """The value of the only token is in the same slot of the value cache."""
    check(part, [3], names=["value"], hint="Keys and values have a cache each, and the same slot.")


def test_each_program_stores_one_token(part: Any) -> None:
    """Each token goes to its own slot: the slots may be anywhere, in any order."""
    hint = "Program t stores token t: its slot is number t of the slot mapping, and its key begins at t * key_stride."
    check(part, [5, 2, 7], hint=hint)
    check(part, [1, 0], hint=hint)


def test_a_slot_may_have_any_width(part: Any) -> None:
    """A width that is no power of two: the slot after it keeps what it has."""
    hint = "`tl.arange` has WIDTH_PAD elements, a power of two. Those from WIDTH on are of the next slot: mask them."
    check(part, [3, 2], width=3, hint=hint)
    check(part, [6, 5, 4], width=5, hint=hint)


def test_tokens_may_be_apart(part: Any) -> None:
    """Keys and values may be views of larger rows: a token begins `key_stride` elements behind the one before."""
    hint = "In memory, queries, keys and values of a token are side by side. The stride is from one token to the next."
    check(part, [5, 2, 7], strides=(12, 12), hint=hint)
    check(part, [4, 1], width=3, strides=(7, 7), hint=hint)


def test_both_have_a_stride(part: Any) -> None:
    """The stride of the values may differ from that of the keys."""
    check(part, [5, 2, 7], strides=(4, 9), hint="The values are `value_stride` elements apart, not `key_stride`.")
    check(part, [5, 2, 7], strides=(9, 4), hint="The keys are `key_stride` elements apart, not `value_stride`.")


def test_padding_is_harmless(part: Any) -> None:
    """Several tokens may have slot 0, which nobody reads; the others are stored as without them."""
    hint = "Slot 0 is in block 0, which belongs to nobody. A program that does nothing for it would do, too."
    check(part, [0, 6, 0, 1, 0], ignored=[0], hint=hint)


def test_the_cache_may_have_another_type(part: Any) -> None:
    """Numbers are stored in the type of the cache: float32, float16 or bfloat16."""
    hint = "The type of a cache's elements is `key_cache_ptr.dtype.element_ty`."
    for types in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)):
        check(part, [5, 2], types=types, width=3, hint=hint)


def test_earlier_tokens_stay(part: Any) -> None:
    """Call after call, with widths, strides and slots of all kinds, every slot has the last token that went there."""
    rng, hint = Random(7), "A slot that no token of this call goes to stays as it is."
    for width in (1, 6, 8, 24):
        caches = [guarded(NUM_SLOTS, width, 0) for _ in "kv"]
        expected, done = [cache.clone() for cache in caches], []
        for _ in range(4):
            slots = rng.sample(range(NUM_SLOTS), rng.randint(1, 3))
            rows = guarded(len(slots), 2 * width + rng.randrange(4), 99).normal_()
            new = [rows[:, -2 * width : -width], rows[:, -width:]]
            launch(part, new, caches, slots)
            done.append(f"slots {slots}, strides {rows.shape[1]}")
            for name, cache, wanted, row in zip(("key", "value"), caches, expected, new, strict=True):
                wanted[torch.tensor(slots, device=DEVICE)] = row
                wrong = (cache != wanted).any(1).nonzero().flatten().tolist()
                on = f"WIDTH {width}; {'; '.join(done)}; slots of {name}_cache that are wrong"
                same(wrong, [], on=on, hint=hint)


def test_an_engine_reads_what_is_stored(part: Any) -> None:
    """An engine that stores KV with this kernel, and computes all else in torch, gives the same tokens."""
    check(part, [5, 2, 7], width=3, strides=(7, 9), hint="First the behaviours before this one.")
    torch_store = "m3_paged_attention.attention.torch_backend:TorchBackend.store_kv"
    config = ModelConfig(device=DEVICE, dtype="float32", attention_backend="torch")
    prompts, params = [[5, 9, 40, 7, 3], [40, 41]], SamplingParams(max_tokens=2)
    with LLMEngine(model_config=config, cache_config=CacheConfig(num_blocks=32)) as engine:
        expected = tokens_of(engine.generate_batch(prompts, params))
        with substituted(torch_store, TritonBackend.store_kv):
            got = tokens_of(engine.generate_batch(prompts, params))
    same(got, expected, on=f"{prompts}, 2 tokens each", hint="Attention reads these slots.")


def tokens_of(outputs: Any) -> list[Any]:
    """The answers, or the first error."""
    for output in outputs.values():
        if output.error is not None:
            raise output.error
    return [output.token_ids for output in outputs.values()]
