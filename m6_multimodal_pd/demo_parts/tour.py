"""The demo's tour: a mixed batch, positions, a second turn; then what there is to see in it.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.events import size, some
from m1_single_request.outputs import RequestOutput
from m1_single_request.trace_readers import readers_of
from m3_paged_attention.demo_parts.tour import bullets
from m4_radix_cache.demo_parts.tour import CAVEAT, kept_open
from m6_multimodal_pd.demo_parts.batch import facts, guesses, same_alone, show_batch
from m6_multimodal_pd.demo_parts.notes import Notes
from m6_multimodal_pd.demo_parts.positions import Prompt, show_positions
from m6_multimodal_pd.demo_parts.second_turn import show_second_turn
from m6_multimodal_pd.demo_parts.stage import Ask, Settings, moving, scenes, sees, texts
from m6_multimodal_pd.demo_parts.two_engines import configs_of, show_two_engines
from m6_multimodal_pd.llm_engine import LLMEngine

WITHOUT_GROUP = (
    "With --pd the same requests go through a process that computes prompts and one that answers, too. Each of them "
    "loads the model once more, so that with a --model of your own it is left to you."
)


def tour(settings: Settings, console: Console) -> None:
    """All parts; of a model that reads only, those that need no pictures. Engines of this process load it once."""
    parts = {"model_loader": cache(LLMEngine.parts["model_loader"])}
    with ExitStack() as stack:
        readers = [stack.enter_context(kept_open(reader)) for reader in readers_of(settings.trace)]
        notes = Notes()
        trace = TraceConfig(readers=(*readers, notes))
        configs = configs_of(settings)
        engine = stack.enter_context(LLMEngine(trace_config=trace, parts=parts, **configs))
        configs["cache_config"] = replace(settings.cache, prefix_cache="chunk", eviction_policy="lru", debug=False)
        alone = stack.enter_context(LLMEngine(parts=parts, **configs))
        pictures = [*scenes(), moving()] if sees(engine) else []
        if not pictures:
            console.print(Text(blind(engine), style="yellow"))
            console.print()
        asks = [*pictures, *texts(settings.num_texts)]
        outputs = show_batch(engine, settings, asks, console)
        said: list[str | None] = [*facts(notes, asks), *guesses(settings, engine.stats(), asks, outputs)]
        said.append(same_alone(alone, settings, asks, outputs))
        console.print()
        if pictures:
            tokenizer = engine.engine_core.input_processor.tokenizer
            still, clip = (prompt_of(asks[i], outputs[i], notes) for i in (0, len(pictures) - 1))
            said += show_positions(still, clip, lambda token_id: str(tokenizer.decode([token_id])), console)
            console.print()
            said += show_second_turn(engine, settings, pictures[1], outputs[1], console)
            console.print()
        number = 4 if pictures else 2
        group = settings.disaggregation
        if group is not None:
            said += show_two_engines(settings, group, asks, number, console, parts=parts)
            number += 1
            console.print()
        console.rule(f"[bold]{number}. What there is to see")
        if pictures:
            console.print(totals(engine.stats()))
            console.print()
        said.append(WITHOUT_GROUP if group is None else None)
        console.print(bullets([*filter(None, said), CAVEAT.partition(" The tokens")[0]]))


def prompt_of(ask: Ask, output: RequestOutput, notes: Notes) -> Prompt:
    """Return the prompt of a question about a picture, with the events about it."""
    rid = output.request_id
    return Prompt(ask.question, output.prompt_token_ids, notes.items[rid], notes.positions[rid])


def blind(engine: LLMEngine) -> str:
    """Why there are no pictures."""
    return (
        f"{engine.config.model.model} has no vision tower: it takes texts only. So this is the part of the tour that "
        f"needs no pictures; leave --model away, or name a Qwen3-VL, to see the rest."
    )


def totals(stats: Any) -> Table:
    """What the engine counted in all parts."""
    table = Table.grid(padding=(0, 2, 0, 0))
    kept = size(stats.embedding_cache_bytes)
    lines = {
        "pictures and clips encoded": f"{stats.num_encoded_items:,}, in {some(stats.num_encoder_runs, 'run')} of the "
        "tower",
        "embeddings made": f"{stats.num_encoded_tokens:,}, of which the embedding cache holds {kept}",
        "encoder hits": f"{stats.num_encoder_hits:,}: embeddings that were found instead of made",
        "prompt tokens skipped": f"{stats.num_cached_tokens:,} of "
        f"{stats.num_prompt_tokens + stats.num_cached_tokens:,}, found in the prefix cache",
        "time in the tower": f"{stats.encoder_seconds * 1e3:.1f} ms",
    }
    for name, value in lines.items():
        table.add_row(name, value)
    return table
