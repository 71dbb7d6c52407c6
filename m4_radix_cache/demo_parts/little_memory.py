"""Part 3 of the demo's tour: users with nothing in common, in a memory that is too small for them.

Part of `python -m m4_radix_cache.demo`; nothing in the engine depends on it.
"""

from collections.abc import Mapping
from dataclasses import replace

from rich.text import Text

from m1_single_request.events import Event, some
from m1_single_request.outputs import RequestOutput
from m4_radix_cache.demo_parts import cache_notes, stories
from m4_radix_cache.demo_parts.measure import checked, run_together
from m4_radix_cache.demo_parts.stage import Stage, steps_table
from m4_radix_cache.demo_parts.stories import Ask
from m4_radix_cache.events import Admit, Retract
from m4_radix_cache.mem_cache.events import Evicted

LITTLE = 416  # tokens: a little less than the users fill at their widest, so that somebody has to go
CONSERVATIVENESS = 0.1  # lets in who may not find room in the end
MOST_TOKENS = 48  # no answer is longer
EVERY = 3  # steps between two arrivals
MOST_TOLD = 8  # events that are told one by one


def show_little_memory(stage: Stage) -> list[str]:
    """What had to go and who, then two who ask again. Returns what there is to see in it."""
    engine, notes, console = stage.engine, stage.notes, stage.console
    asks = stories.strangers(engine)
    lengths = [len(ask.token_ids) for ask in asks]
    console.print()
    stage.headline(
        "3. Little memory",
        f"{len(asks)} users, each with a list of codes of its own, come {EVERY} steps after each other, with prompts "
        f"of {min(lengths)} to {max(lengths)} tokens and answers of at most {most_tokens(stage)}. The KV memory has "
        f"{some(engine.engine_core.stats().max_total_tokens, 'slot')}; all of them together may need "
        f"{sum(lengths) + len(asks) * most_tokens(stage):,}. For answers to come, admission keeps "
        f"{engine.config.scheduler.schedule_conservativeness:g} times as much room as usual.",
    )
    texts: dict[int, str] = {}
    outputs = run_staggered(stage, asks, texts)
    told = events(stage, texts)
    console.print(steps_table(told[:MOST_TOLD]))
    if len(told) > MOST_TOLD:
        console.print(Text(f"... and {len(told) - MOST_TOLD} more like these", style="dim"))
    if not told:
        console.print("Nothing was evicted, and no request was retracted.")
    console.print("\n[bold]What the cache holds now")
    stage.show_cache()
    said = [cache_notes.evictions(notes), cache_notes.retractions(notes)]
    console.print()
    for ask, output in ((asks[0], outputs[0]), (asks[-1], outputs[-1])):
        console.print(Text(ask_again(stage, ask, output)))
    return [fact for fact in said if fact is not None]


def most_tokens(stage: Stage) -> int:
    """Tokens of the longest answer."""
    return min(stage.settings.params.max_tokens, MOST_TOKENS)


def run_staggered(stage: Stage, asks: list[Ask], texts: dict[int, str]) -> list[RequestOutput]:
    """One after the other comes while those before it run; their last outputs. Notes in `texts` what the nodes hold."""
    engine, params = stage.engine, replace(stage.settings.params, max_tokens=most_tokens(stage))
    outputs: dict[str, RequestOutput] = {}
    request_ids: list[str] = []
    num_steps = 0
    while len(request_ids) < len(asks) or engine.has_unfinished_requests():
        if len(request_ids) < len(asks) and num_steps % EVERY == 0:
            ask = asks[len(request_ids)]
            request_ids.append(engine.add_request(ask.token_ids, params, **stage.settings.options))
        outputs |= engine.step()
        texts |= stage.view.texts(stage.tokenizer)
        num_steps += 1
    return checked([outputs[request_id] for request_id in request_ids])


def events(stage: Stage, texts: Mapping[int, str]) -> list[tuple[int, str]]:
    """Who and what had to go, and who came back, in sentences with their steps."""

    def sentence(event: Event) -> str | None:
        if isinstance(event, Evicted):
            return cache_notes.evicted_texts(event, texts)
        is_return = isinstance(event, Admit) and event.num_output_tokens > 0
        return event.explain() if is_return or isinstance(event, Retract) else None

    return [(step, said) for step, event in stage.notes.heard if (said := sentence(event)) is not None]


def ask_again(stage: Stage, ask: Ask, earlier: RequestOutput) -> str:
    """The same prompt once more, alone: whether it is still in the cache."""
    options = stage.settings.options
    short = replace(stage.settings.params, max_tokens=1)
    (output,) = checked(run_together(stage.engine, [ask.token_ids], [short], options))
    _, admit = stage.notes.first_admits()[output.request_id]
    found = f"{admit.prefix:,} are still cached" if admit.prefix else "none is cached"
    return (
        f"The user of {earlier.request_id} asks once more: of {some(len(ask.token_ids), 'token')} {found}, "
        f"{admit.extend:,} must be computed."
    )
