"""The demo's tour: many users of one system prompt, a conversation, little memory; then what there is to see in it.

Part of `python -m m4_radix_cache.demo`; nothing in the engine depends on it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from rich.console import Console

from m1_single_request.config import TraceConfig
from m1_single_request.trace_readers import readers_of
from m1_single_request.tracer import TraceReader, TraceRecord
from m3_paged_attention.demo_parts.tour import bullets
from m4_radix_cache.config import CacheConfig, SchedulerConfig
from m4_radix_cache.demo_parts import cache_notes, stories
from m4_radix_cache.demo_parts.cache_notes import CacheNotes
from m4_radix_cache.demo_parts.conversation import show_chat
from m4_radix_cache.demo_parts.little_memory import show_little_memory
from m4_radix_cache.demo_parts.measure import rivals
from m4_radix_cache.demo_parts.stage import Settings, Stage
from m4_radix_cache.demo_parts.users import show_users
from m4_radix_cache.llm_engine import LLMEngine
from m4_radix_cache.tree_view import TreeView

CAVEAT = (
    "The times are those of a very small model on this machine at this moment, and any other program changes them. The "
    "tokens are not: what is found in the cache need not be computed, however large the model is."
)


def tour(settings: Settings, console: Console) -> None:
    """All parts. The model is loaded once; each engine has a memory and a cache of its own."""
    configs: dict[str, Any] = {
        "model_config": settings.model,
        "parts": {"model_loader": cache(LLMEngine.parts["model_loader"])},
    }
    with ExitStack() as stack:
        readers = [stack.enter_context(kept_open(reader)) for reader in readers_of(settings.trace)]

        def traced(scheduler: SchedulerConfig, memory: CacheConfig) -> Stage:
            notes, view = CacheNotes(), TreeView()
            trace = TraceConfig(readers=(*readers, notes, view))
            engine = LLMEngine(scheduler_config=scheduler, cache_config=memory, trace_config=trace, **configs)
            stack.callback(engine.close)
            return Stage(engine, notes, view, settings, console)

        scarce = traced(settings.little_scheduler, settings.little_cache)
        stories.check(scarce.engine, stories.strangers(scarce.engine), settings.params)  # what cannot run fails first
        roomy = traced(settings.scheduler, settings.cache)
        pair = stack.enter_context(rivals({"scheduler_config": settings.scheduler, **configs}, settings.cache))
        said = [*show_users(roomy, pair), *show_chat(roomy, pair), *show_little_memory(scarce)]
        said += [fact for fact in [cache_notes.audits(roomy.notes, scarce.notes)] if fact is not None]
    console.print()
    console.rule("[bold]4. What there is to see")
    console.print(bullets([*said, CAVEAT]))


@contextmanager
def kept_open(reader: TraceReader) -> Iterator[TraceReader]:
    """The same reader for several engines: no engine closes it, the end of the context does."""

    class Shared:
        def read(self, record: TraceRecord) -> None:
            reader.read(record)

        def close(self) -> None:
            """Others still use it."""

    try:
        yield Shared()
    finally:
        reader.close()
