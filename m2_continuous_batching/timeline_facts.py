"""Facts about a run: sentences with its numbers, computed from its timeline. A fact that does not apply is omitted."""

from collections.abc import Callable

from m1_single_request.events import size, some
from m1_single_request.output_events import Finish
from m2_continuous_batching.events import Admit, Batch, Forward, KVUsage, LeftOut, NotAdmitted
from m2_continuous_batching.timeline import Timeline


def facts(timeline: Timeline) -> list[str]:
    """Return the sentences of all facts that apply, in the order of `FACTS`."""
    return [sentence for fact in FACTS if (sentence := fact(timeline)) is not None]


def prefilled_together(timeline: Timeline) -> str | None:
    """Describe the first step that prefills several prompts."""
    for step, batch in timeline.of(Batch):
        if len(batch.joined) < 2:
            continue
        lens = [str(extend) for rid, extend in zip(batch.rids, batch.extend_lens, strict=True) if rid in batch.joined]
        text = f"Step {step} prefills {listed(batch.joined)}: {' + '.join(lens)} prompt tokens"
        forward = next((f for at, f in timeline.of(Forward) if at == step and f.mode == "prefill"), None)
        if forward is None:
            return f"{text}, each prompt in a pass of its own through the model."
        places = forward.num_rows * forward.width
        waste = f": {forward.padded_tokens} of its {places} places are padding" if forward.padded_tokens else ""
        return (
            f"{text} in one pass through the model. Its tensor has {forward.num_rows} rows of {forward.width}, as long "
            f"as the longest prompt{waste}."
        )
    return None


def joined_midway(timeline: Timeline) -> str | None:
    """Describe the first step in which a request joined while others ran."""
    for step, batch in timeline.of(Batch):
        others = [rid for rid in batch.rids if rid not in batch.joined]
        if batch.joined and others:
            midway = agree(others, "is in the middle of its answer", "are in the middle of their answers")
            joins = agree(batch.joined, "joins", "join")
            return f"Step {step}: {listed(batch.joined)} {joins} the batch while {listed(others)} {midway}."
    return None


REASONS = {
    "max_num_seqs": "as many run as max_num_seqs = {} allows",
    "max_num_batched_tokens": "its prompt is longer than the rest of the step's token budget, {}",
    "kv_memory": "there is no KV memory for it",
}
"""Text for each limit of `NotAdmitted`; the braces are for its `available`."""


def longest_wait(timeline: Timeline) -> str | None:
    """Describe the request that waited longest, and the limits that it waited for."""
    waits = {rid: lane.states.count("queued") for rid, lane in timeline.lanes.items()}
    rid = max(waits, key=waits.__getitem__, default=None)
    if rid is None or waits[rid] == 0:
        return None
    refusals = [event for _, event in timeline.of(NotAdmitted) if event.rid == rid]
    parts = [f"{waits[rid] - len(refusals)} behind others in the queue"] if waits[rid] > len(refusals) else []
    for limit, why in REASONS.items():
        if met := [event for event in refusals if event.limit == limit]:
            parts.append(f"{len(met)} as the first in line, because {why.format(met[-1].available)}")
    text = f"{rid} waits longest, {some(waits[rid], 'step')}: {', '.join(parts)}."
    joined = next((step for step, event in timeline.of(Admit) if event.rid == rid), None)
    if joined is None:
        return text
    freed = [event.rid for step, event in timeline.of(Finish) if step == joined - 1 and event.rid != rid]
    return f"{text} It joins in step {joined}{f', right after the end of {listed(freed)}' if freed else ''}."


def left_out(timeline: Timeline) -> str | None:
    """Describe the first step whose budget left out a running request."""
    for step, event in timeline.of(LeftOut):
        batch = next((batch for at, batch in timeline.of(Batch) if at == step), None)
        if batch is None or not batch.joined:
            continue
        lens = dict(zip(batch.rids, batch.extend_lens, strict=True))
        taken = sum(lens[rid] for rid in batch.joined)
        return (
            f"Step {step} has no token for {listed(event.rids)}: the {agree(batch.joined, 'prompt', 'prompts')} of "
            f"{listed(batch.joined)} {agree(batch.joined, 'takes', 'take')} {taken} of the {batch.budget} that "
            f"max_num_batched_tokens allows. In step {step + 1} they run before any request is admitted."
        )
    return None


def padding(timeline: Timeline) -> str | None:
    """Describe the padding of the whole run."""
    usage = [event for _, event in timeline.of(KVUsage)]
    useful, padded = sum(u.useful_tokens for u in usage), sum(u.padded_tokens for u in usage)
    if not usage:
        return None
    if not padded:
        return f"Padding: none. All {useful:,} places in the tensors of these {some(len(usage), 'step')} hold a token."
    return (
        f"Padding: {padded:,} of {useful + padded:,} places in the tensors of these {some(len(usage), 'step')} hold no "
        f"token ({padded / (useful + padded):.0%}): ends of shorter prompts, and slots that are free or left out while "
        f"a higher one runs."
    )


def kv_memory(timeline: Timeline) -> str | None:
    """Describe the largest use of the KV memory."""
    usage = max(timeline.of(KVUsage), key=lambda pair: pair[1].kv_bytes_used, default=None)
    if usage is None:
        return None
    step, most = usage
    most_used = f"KV memory: never more than {size(most.kv_bytes_used)} held keys and values (step {step})"
    if most.kv_bytes_used == most.kv_bytes_reserved:
        return f"{most_used}. No reserved memory is empty: each request's cache grows with it."
    return (
        f"{most_used}, of {size(most.kv_bytes_reserved)} reserved ({most.kv_bytes_used / most.kv_bytes_reserved:.1%}): "
        f"every slot is as long as the longest request may become. m3 removes this waste."
    )


def shared_steps(timeline: Timeline) -> str | None:
    """Describe the number of steps that sharing them has saved."""
    num_tokens, num_steps = sum(event.out_len for _, event in timeline.of(Finish)), len(timeline.steps)
    if not num_tokens:
        return None
    return (
        f"{some(num_steps, 'step')} made the {some(num_tokens, 'output token')} of "
        f"{some(len(timeline.lanes), 'request')}: {num_tokens / num_steps:.1f} a step. One request after the other "
        f"would take {some(num_tokens, 'step')}."
    )


FACTS: tuple[Callable[[Timeline], str | None], ...] = (
    prefilled_together, joined_midway, longest_wait, left_out, padding, kv_memory, shared_steps,
)  # fmt: skip


def listed(names: list[str] | tuple[str, ...]) -> str:
    """Return the names as `a`, `a and b` or `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def agree(names: list[str] | tuple[str, ...], one: str, many: str) -> str:
    """Return `one` for one name and `many` for several."""
    return one if len(names) == 1 else many
