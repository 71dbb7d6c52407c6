"""The measurements of lesson 4: `python -m benchmarks m4`."""

from benchmarks.lesson import Lesson, Parts, Size
from benchmarks.m3 import on_model, on_random_model, shape

KV_BYTES = 9 * 2**28  # the 0.6B shape: 21,000 tokens, a little more than the requests need without sharing
LONG_MODEL_LEN = 4096
CAPACITY = 2**17  # of the comparison of designs, tokens
URGENT_KV_TOKENS = 2**15  # 16 requests of 2,000 tokens each


def parts(size: Size) -> Parts:
    """Return everything that is measured, by name, in this order."""
    from benchmarks import scheduling
    from benchmarks.m4 import caches, eviction, measures, urgent

    quick, requests = size.quick, 100 if size.quick else None
    work = measures.shared_prefix(4 if quick else 32, 64 if quick else 512)
    lengths = [64, 128, 256] if quick else [128, 256, 512, 1024, 2048]
    counts = [1, 4] if quick else [1, 2, 4, 8, 16, 32]
    return {
        "reuse_0_6b": lambda: on_random_model(
            lambda e: measures.reuse(e, work, rounds=min(size.rounds, 2)), quick, kv_bytes=KV_BYTES
        ),
        "reuse_embedded": lambda: on_model(lambda e: measures.reuse(e, work, rounds=size.rounds)),
        "control_plane": lambda: caches.control_plane(200 if quick else 2000, rounds=3 * size.rounds),
        "scheduling": lambda: scheduling.milestones("m3", "m4", num_steps=50 if quick else 400),
        "eviction": lambda: eviction.eviction(requests),
        "designs": lambda: eviction.designs(CAPACITY, size.few, requests),
        "decode_gaps": lambda: on_model(
            lambda e: measures.gaps(e, 120 if quick else 300, lengths, counts, size.few), max_model_len=LONG_MODEL_LEN
        ),
        "urgent": lambda: on_model(
            lambda e: urgent.urgent(e, 60 if quick else None, URGENT_KV_TOKENS),
            max_model_len=LONG_MODEL_LEN,
        ),
    }


LESSON = Lesson("m4_radix_cache", parts, environment=shape)
