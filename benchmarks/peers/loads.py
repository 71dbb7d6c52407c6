"""The loads: a model, requests of random tokens, and what is measured of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

Requests = tuple[list[list[int]], list[int]]
"""Prompts as token ids, and lengths of the answers."""
AFTER_FIRST = "tok/s after the first"


@dataclass(frozen=True)
class Load:
    """Some requests that arrive together, all greedy and without an end before their length."""

    model: str
    """`tiny`: the embedded checkpoint in float32; `0.6B`: random weights in bfloat16."""
    number: int = 1
    prompts: tuple[int, int] = (32, 32)
    outputs: tuple[int, int] = (64, 64)
    shared: int = 0
    """Number of tokens at the beginning that all prompts have, besides their own."""
    unit: str = "tok/s"
    """`tok/s`: output tokens by the time of all; `tok/s after the first`: of one stream, the tokens after the first by
    the time between the first and the last; `prompt tok/s`: prompt tokens by the time to one token; `s to the first
    token`: of a new process; `MiB`: its peak memory then."""
    variants: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    """By engine: settings of `sides.py` for this load, in place of the defaults; None: the engine is left out."""

    def requests(self, seed: int) -> Requests:
        """Return requests that no other seed repeats: a cache must not know them."""
        random = Random(str(seed))  # of a number it would drop the sign
        shared = [random.randrange(256, 4000) for _ in range(self.shared)]
        prompts = [
            shared + [random.randrange(256, 4000) for _ in range(random.randint(*self.prompts))]
            for _ in range(self.number)
        ]
        return prompts, [random.randint(*self.outputs) for _ in range(self.number)]


INT8_KV = {
    "stepwise": {"kv_cache_dtype": "int8"},
    "llama-cpp": None,
    "openvino": {"kv": "u8"},
    "vllm": None,
    "transformers": None,
}
INT8_WEIGHTS = {
    "stepwise": {"quantization": "int8"},
    "llama-cpp": {"weights": "q8_0"},
    "openvino": {"weights": "int8"},
    "vllm": None,
    "transformers": None,
}
LOADS = {
    "tiny: one stream": Load("tiny", 1, (32, 32), (256, 256)),
    "tiny: 64 ragged": Load("tiny", 64, (16, 256), (16, 128)),
    "tiny: 64 ragged with int8 KV": Load("tiny", 64, (16, 256), (16, 128), variants=INT8_KV),
    "tiny: 64 after 1024 shared tokens": Load("tiny", 64, (32, 32), (64, 64), shared=1024),
    "0.6B: one stream": Load("0.6B", 1, (32, 32), (48, 48)),
    "0.6B: one stream with int8 weights": Load("0.6B", 1, (32, 32), (48, 48), variants=INT8_WEIGHTS),
    "0.6B: 16 ragged": Load("0.6B", 16, (16, 128), (16, 48)),
    "0.6B: 16 ragged with int8 KV": Load("0.6B", 16, (16, 128), (16, 48), variants=INT8_KV),
    "0.6B: after 4096 tokens": Load("0.6B", 1, (4096, 4096), (24, 24), unit=AFTER_FIRST),
    "0.6B: a prompt of 512": Load("0.6B", 1, (512, 512), (1, 1), unit="prompt tok/s"),
    "tiny: start": Load("tiny", 1, (8, 8), (1, 1), unit="s to the first token"),
    "tiny: memory": Load("tiny", 1, (8, 8), (1, 1), unit="MiB"),
}
