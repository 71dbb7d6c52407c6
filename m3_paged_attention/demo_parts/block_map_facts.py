"""Facts of a block map: the frames to look at, and sentences with the numbers of that run.

Pure functions of the frames, like m2's `timeline_facts.py`. A fact that does not apply is omitted.
"""

from collections.abc import Callable

from m1_single_request.events import size, some
from m1_single_request.output_events import Finish
from m2_continuous_batching.timeline_facts import agree, listed
from m3_paged_attention.block_map import BlockMap, Frame
from m3_paged_attention.kv_events import BlockCopied, BlocksForked
from m3_paged_attention.scheduler_events import Admit, Preempted


def highlights(block_map: BlockMap) -> list[tuple[str, Frame]]:
    """Return the first frame of each kind of change of blocks, with a title, in the order of the steps."""
    frames = block_map.frames
    if not frames:
        return []
    found: dict[int, list[str]] = {}
    for title, shows in SIGHTS:
        at = next((i for i, frame in enumerate(frames) if shows(frame)), None)
        if at is not None:
            found.setdefault(at, []).append(title)
    fullest = max(range(len(frames)), key=lambda i: (len(frames[i].tables), -i))
    found.setdefault(fullest, []).append("most requests in flight")
    return [("; ".join(found[at]), frames[at]) for at in sorted(found)]


def is_resumed(admit: Admit) -> bool:
    """Return whether the request was in the batch before."""
    return admit.how == "swap_in" or admit.num_output_tokens > 0


SIGHTS: tuple[tuple[str, Callable[[Frame], bool]], ...] = (
    ("a prompt is stored once for several answers (fork)", lambda frame: bool(frame.of(BlocksForked))),
    ("their ways part (copy on write)", lambda frame: bool(frame.of(BlockCopied))),
    ("the memory is full (preemption)", lambda frame: bool(frame.of(Preempted))),
    ("who had to go comes back", lambda frame: any(map(is_resumed, frame.of(Admit)))),
)


def facts(block_map: BlockMap) -> list[str]:
    """Return the sentences about a run, in the order of the events."""
    return [said for fact in FACTS if (said := fact(block_map)) is not None]


def in_flight(block_map: BlockMap) -> str | None:
    """Describe the maximum number of running requests, and the memory that m2 would need for them."""
    frame = max(block_map.frames, key=lambda frame: len(frame.tables), default=None)
    if frame is None or not frame.tables:
        return None
    said = (
        f"Step {frame.step} has the most requests in flight, {len(frame.tables)}, in {frame.num_used} of "
        f"{some(frame.num_blocks, 'block')}."
    )
    sized, longest = block_map.sized, longest_request(block_map)
    if sized is None or not longest:
        return said
    slots = size(len(frame.tables) * sized.max_model_len * sized.bytes_per_token)
    return (
        f"{said} As many slots of m2 would take {slots}; all blocks together take {size(sized.num_bytes)}. Slots cut "
        f"down to the longest request of this run, {some(longest, 'token')}, would be "
        f"{num_slots(sized.num_bytes, longest * sized.bytes_per_token)}: but nobody knows that length before the end."
    )


def shared_prompt(block_map: BlockMap) -> str | None:
    """Describe the blocks that the forks saved and the copies used."""
    forks = [event for _, event in block_map.of(BlocksForked)]
    if not forks:
        return None
    copies = [event for _, event in block_map.of(BlockCopied)]
    tokens, blocks = sum(fork.num_tokens for fork in forks), sum(len(fork.block_ids) for fork in forks)
    children = [fork.owner for fork in forks]
    said = (
        f"{listed(children)} {agree(children, 'starts', 'start')} on blocks of {listed(_parents(forks))}: "
        f"{some(tokens, 'prompt token')} {'is' if tokens == 1 else 'are'} not computed again, and "
        f"{some(blocks, 'block')} not filled again."
    )
    if not copies:
        return f"{said} Nobody wrote into a shared block, so none was copied."
    return (
        f"{said} {some(len(copies), 'block')} {'was' if len(copies) == 1 else 'were'} copied, because somebody was "
        f"about to write into {'it' if len(copies) == 1 else 'them'}; whoever holds a block last keeps the original."
    )


def preempted(block_map: BlockMap) -> str | None:
    """Describe the preempted requests: their number, the time until they resumed, and the cost."""
    losses = list(block_map.of(Preempted))
    if not losses:
        return None
    frame, loss = losses[0]
    back = next(((f, event) for f, event in block_map.of(Admit) if event.rid == loss.rid and f.step > frame.step), None)
    said = (
        f"Step {frame.step} takes {some(loss.num_freed, 'block')} from {loss.rid}: it has said least, and "
        f"{some(loss.needed, 'block')} {'is' if loss.needed == 1 else 'are'} needed where {loss.available} "
        f"{'is' if loss.available == 1 else 'are'} free."
    )
    if back is not None:
        how = f"the KV of {some(back[1].extend, 'token')} is computed again" if back[1].how == "prefill" else ""
        how = how or f"the KV of {some(back[1].prefix, 'token')} is read back from host memory"
        said += f" {some(back[0].step - frame.step, 'step')} later it is back, and {how}; what it had said is not lost."
    if len(losses) > 1:
        said += f" In all there were {len(losses)} preemptions."
    return said


def waste(block_map: BlockMap) -> str | None:
    """Describe the share of slots that were reserved but empty."""
    usage = [frame.usage for frame in block_map.frames if frame.usage is not None and frame.usage.num_used]
    if not usage:
        return None
    held = sum(u.tokens_held for u in usage)
    slots = sum(u.num_used * u.block_size for u in usage)
    return (
        f"Reserved for nothing: {1 - held / slots:.0%} of the places in used blocks, over all steps. They are the ends "
        f"of last blocks, at most {usage[0].block_size - 1} of {some(usage[0].block_size, 'token')} for each request; "
        f"smaller blocks waste less and need longer block tables."
    )


FACTS: tuple[Callable[[BlockMap], str | None], ...] = (shared_prompt, in_flight, preempted, waste)


def longest_request(block_map: BlockMap) -> int:
    """Return the tokens, prompt and output, of the longest request that has ended."""
    ended = [block_map.prompt_lens.get(event.rid, 0) + event.out_len for _, event in block_map.of(Finish)]
    return max(ended, default=0)


def num_slots(num_bytes: int, slot_bytes: int) -> str:
    """Return the number of m2's slots of a size in so many bytes, as text."""
    count = num_bytes / slot_bytes
    return f"{count:.2f}" if count < 1 else f"{int(count):,}"


def _parents(forks: list[BlocksForked]) -> list[str]:
    return list(dict.fromkeys(fork.parent for fork in forks))
