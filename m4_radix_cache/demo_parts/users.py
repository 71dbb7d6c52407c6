"""Part 1 of the demo's tour: many users at the same time, with one system prompt.

Part of `python -m m4_radix_cache.demo`; nothing in the engine depends on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from rich.text import Text

from m1_single_request.events import some
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m4_radix_cache.demo_parts import cache_notes, stories
from m4_radix_cache.demo_parts.measure import ROUNDS, Measured, checked, measure, run_together
from m4_radix_cache.demo_parts.stage import Row, Stage, answer_ids, answers_table, faster, reuse_table, steps_table
from m4_radix_cache.llm_engine import LLMEngine

OTHER_TENANT = "another tenant"
CAPTION = (
    "prompt, reused, computed: tokens. TTFT: the time to the first token, with the cache and without; the median of "
    f"{ROUNDS} rounds, which take turns, begin with an empty cache and have no trace."
)


def show_users(stage: Stage, rivals: Mapping[str, LLMEngine]) -> list[str]:
    """What each reused, how long each waited, why, and the tree. Returns what there is to see in it."""
    engine, notes, settings, console = stage.engine, stage.notes, stage.settings, stage.console
    asks = stories.users(engine, settings.num_users)
    prompts = [ask.token_ids for ask in asks]
    params = [settings.params] * (len(asks) - 1) + [several(settings.params, settings.num_answers)]
    stage.headline("1. Many users, one system prompt", introduction(engine, prompts))
    outputs = checked(run_together(engine, prompts, params, settings.options))
    with console.status("measuring", refresh_per_second=2):
        measured = measure(rivals, lambda rival: run_together(rival, prompts, params, settings.options))
    rows = rows_of(stage, [ask.title for ask in asks], outputs, measured)
    console.print(reuse_table(rows, list(measured)))
    console.print(Text(CAPTION, style="dim"))
    console.print()
    console.print(answers_table(outputs))
    said = [fact(notes) for fact in (cache_notes.shared, cache_notes.took_turns, cache_notes.computed_twice)]
    most = max(rows, key=lambda row: row.reused)
    if most.reused:
        console.print(f"\n[bold]Why {most.name} skips {some(most.reused, 'token')}: its way through the trace")
        console.print(steps_table(cache_notes.why(notes, most.name)))
    said += [faster("In part 1", measured), same_answers(measured, params), a_stranger(stage, prompts[0])]
    console.print("\n[bold]What the cache holds in the end")
    stage.show_cache()
    return [fact for fact in said if fact is not None]


def several(params: SamplingParams, num_answers: int) -> SamplingParams:
    """Parameters for so many answers: drawn ones, because greedy ones would all be the same."""
    if num_answers == 1 or not params.is_greedy:
        return replace(params, n=num_answers)
    return replace(params, n=num_answers, temperature=1.0, top_p=0.95, seed=6)


def introduction(engine: LLMEngine, prompts: Sequence[list[int]]) -> str:
    """Who asks what, and of which engine."""
    lengths, config = [len(prompt) for prompt in prompts], engine.config
    differs = [i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1]
    common = differs[0] if differs else min(lengths)
    same = f" The first {common:,} are the same for all: the system prompt, and how the questions begin."
    is_shared = not engine.engine_core.scheduler.tree_cache.disable
    return (
        f"{some(len(prompts), 'user')}, all at the same time. Tokens of the prompts: {listed_lengths(lengths)}."
        f"{same if len(prompts) > 1 and common else ''} The KV memory has "
        f"{some(engine.engine_core.stats().max_total_tokens, 'slot')}, one for each token, in pages of "
        f"{config.cache.page_size}; {'only whole pages are shared' if is_shared else 'nothing is shared'}. Cache: "
        f"{config.cache.prefix_cache}, eviction: {config.cache.eviction_policy}, order: "
        f"{config.scheduler.schedule_policy}. {some(torch.get_num_threads(), 'CPU thread')}."
    )


def listed_lengths(lengths: Sequence[int]) -> str:
    """The smallest and the largest."""
    return f"{min(lengths):,} to {max(lengths):,}" if len(set(lengths)) > 1 else f"{lengths[0]:,}"


def rows_of(
    stage: Stage, titles: Sequence[str], outputs: Sequence[RequestOutput], measured: Mapping[str, Measured]
) -> list[Row]:
    """A row for each answer. The wait is that of the whole request, so it stands with its first one."""
    admits, rows = stage.notes.first_admits(), []
    for index, (title, output) in enumerate(zip(titles, outputs, strict=True)):
        waits = {name: each.seconds_to_first_token[index] for name, each in measured.items()}
        for number, rid in enumerate(answer_ids(output)):
            _, admit = admits[rid]
            rows.append(Row(rid, title, admit.prefix, admit.extend, {} if number else waits))
    return rows


def same_answers(measured: Mapping[str, Measured], params: Sequence[SamplingParams]) -> str | None:
    """Whether the cache changed an answer; nothing where they are drawn without a seed."""
    if len(measured) < 2 or not all(own.is_greedy or own.seed is not None for own in params):
        return None
    pairs = list(zip(*(each.token_ids for each in measured.values()), strict=True))
    differing = sum(len(set(pair)) > 1 for pair in pairs)
    if differing:
        return f"{differing} of {some(len(pairs), 'answer')} differ without the cache: other sums round differently."
    return f"With and without the cache {some(len(pairs), 'answer')} of {len(pairs)} are the same, token for token."


def a_stranger(stage: Stage, prompt: list[int]) -> str | None:
    """The first user's prompt once more, in another namespace; nothing if the cache keeps nothing anyway."""
    if stage.engine.engine_core.scheduler.tree_cache.disable:
        return None
    options = {**stage.settings.options, "cache_salt": OTHER_TENANT}
    (output,) = checked(run_together(stage.engine, [prompt], [stage.settings.params], options))
    _, admit = stage.notes.first_admits()[output.request_id]
    return (
        f"{output.request_id} came later, with the first user's prompt, but with cache_salt={OTHER_TENANT!r}: "
        f"{admit.prefix:,} of its {admit.prefix + admit.extend:,} tokens were found. Tenants with different salts "
        f"share nothing, so nobody can tell from a fast answer what others have asked."
    )
