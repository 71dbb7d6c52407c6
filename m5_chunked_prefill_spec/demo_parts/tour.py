"""The demo's tour: a long prompt among streams, guesses on three kinds of text; then what there is to see in it.

Part of `python -m m5_chunked_prefill_spec.demo`; nothing in the engine depends on it.
"""

from contextlib import ExitStack
from functools import cache
from typing import Any

from rich.console import Console

from m1_single_request.config import TraceConfig
from m1_single_request.trace_readers import readers_of
from m3_paged_attention.demo_parts.tour import bullets
from m4_radix_cache.demo_parts.tour import CAVEAT, kept_open
from m5_chunked_prefill_spec.demo_parts.guesses import show_guesses
from m5_chunked_prefill_spec.demo_parts.notes import Notes
from m5_chunked_prefill_spec.demo_parts.stage import Settings
from m5_chunked_prefill_spec.demo_parts.streams import show_streams
from m5_chunked_prefill_spec.llm_engine import LLMEngine


def tour(settings: Settings, console: Console) -> None:
    """All parts. Every model is loaded once; each engine has a memory of its own."""
    load = cache(LLMEngine.parts["model_loader"])
    parts: Any = {"model_loader": load}
    with ExitStack() as stack:
        readers = [stack.enter_context(kept_open(reader)) for reader in readers_of(settings.trace)]
        notes = Notes()
        engine = stack.enter_context(
            LLMEngine(
                model_config=settings.model,
                scheduler_config=settings.scheduler,
                cache_config=settings.cache,
                trace_config=TraceConfig(readers=(*readers, notes)),
                parts=parts,
            )
        )
        said = show_streams(settings, engine, notes, parts, console)
        console.print()
        said += show_guesses(settings, parts, readers, console)
    console.print()
    console.rule("[bold]3. What there is to see")
    console.print(bullets([*said, CAVEAT.partition(" The tokens")[0]]))
