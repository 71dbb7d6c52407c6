"""The measurements of the tiers below the KV memory: `python -m benchmarks m4_tiers`."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.engines import EMBEDDED, Engines, Model, random_model
from benchmarks.lesson import Lesson, Parts, Size
from benchmarks.m3 import QUICK_SHAPE, on_model, shape

MODEL_LEN = 4096


def parts(size: Size) -> Parts:
    """Return everything that is measured, by name, in this order."""
    from benchmarks.m4_tiers import capacity, chat, copies, restart
    from benchmarks.m4_tiers.break_even import HOST, break_even

    quick = size.quick
    lengths = [16, 256] if quick else [16, 32, 64, 128, 256, 512, 1024, 2048]
    pages, pool_bytes = ([1, 16], 2**26) if quick else ([1, 4, 16, 64, 256], copies.POOL_BYTES)
    prompt = 512 if quick else 2048

    def embedded(run: Callable[[Engines], Any]) -> Callable[[], Any]:
        return lambda: on_model(run, max_model_len=MODEL_LEN)

    def random(run: Callable[[Engines], Any]) -> Callable[[], Any]:
        return lambda: with_random_model(lambda model: on_model(run, model, max_model_len=MODEL_LEN), quick)

    def talk(users: int, turns: int, rounds: int) -> Callable[[Engines], Any]:
        return lambda e: chat.chat(e, *((16, 2, 1, 8) if quick else (users, turns, rounds)))

    return {
        "chat_embedded": embedded(talk(64, 8, size.rounds)),
        "chat_0_6b": random(talk(16, 4, 1)),
        "capacity": lambda: capacity.capacity(*((100, [2**15], [2**16]) if quick else ())),
        "copies": lambda: copies.copies(pages, 6 * size.rounds, pool_bytes),
        "restart_embedded": lambda: restart.restart(EMBEDDED, prompt, 1 if quick else size.rounds, MODEL_LEN),
        "restart_0_6b": lambda: with_random_model(
            lambda model: restart.restart(model, prompt, 1 if quick else size.few, MODEL_LEN), quick
        ),
        "break_even_tokens": embedded(lambda e: break_even(e, 1, [1, 2, 4, 8, 16, 32], 4 * size.rounds, [HOST])),
        "break_even_embedded": embedded(lambda e: break_even(e, 16, lengths, 2 * size.rounds)),
        "break_even_0_6b": random(lambda e: break_even(e, 16, lengths[::2], size.few)),
    }


def with_random_model(run: Callable[[Model], Any], quick: bool) -> Any:
    """Measure with random weights in the shape of Qwen3-0.6B, which take prompts of this length."""
    with TemporaryDirectory() as folder:
        longer = {"max_position_embeddings": MODEL_LEN}
        return run(random_model(Path(folder), **longer, **(QUICK_SHAPE if quick else {})))


LESSON = Lesson("m4_tiers", parts, environment=shape)
