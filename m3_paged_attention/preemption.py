"""Who has to go when the KV memory does not suffice for the next step.

New in m3: m2's slots were as long as a request may become, so whoever was admitted got to its end. Blocks are given out
as they are needed, so they can run out under running requests. The rule is one function, so that another can be put in
its place (`parts={"preemption": ...}`). vLLM preempts the last of the running; SGLang's `retract_decode` has this rule.
"""

from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol, TypeVar

from m1_single_request.errors import PartError
from m1_single_request.request import Sequence
from m1_single_request.tracer import Tracer
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.request import Request
from m3_paged_attention.scheduler_events import Preempted


class Runs(Protocol):
    """What there is to know of a running request."""

    number: int
    sequence: Sequence

    @property
    def request_id(self) -> str: ...


RunsT = TypeVar("RunsT", bound=Runs)


class PreemptionPolicy(Protocol):
    """Chooses one of the running requests."""

    def __init__(self) -> None: ...

    def choose_victim(self, running: SequenceOf[Any]) -> Any:
        """The request that loses its blocks. `running` is not empty, and is not changed."""


class FewestOutputsFirst:
    """Whoever loses least: fewest output tokens, then the longest prompt (most blocks come free), then the newest."""

    def choose_victim(self, running: SequenceOf[RunsT]) -> RunsT:
        return min(running, key=_loss)


def _loss(request: Runs) -> tuple[int, int, int]:
    sequence = request.sequence
    return sequence.get_output_len(), -sequence.get_prompt_len(), -request.number


def victim_of(policy: PreemptionPolicy, running: SequenceOf[RunsT]) -> RunsT:
    """Ask the policy. Raises `PartError` if it chooses a request that does not run."""
    victim = policy.choose_victim(tuple(running))
    if not any(victim is request for request in running):
        part, chosen = type(policy).__name__, getattr(victim, "request_id", victim)
        raise PartError(
            f"the part 'preemption' ({part}) chose {chosen!r}, which is none of the {len(running)} running requests"
        )
    return victim


def take_blocks(request: Request, kv_manager: KVCacheManager, *, swap: bool, needed: int, tracer: Tracer) -> None:
    """Take a running request's blocks away: to the host, if `swap` and there is room; else its KV is dropped.

    `needed`: the blocks that are wanted for the next tokens of all.
    """
    request_id, sequence = request.request_id, request.sequence
    num_blocks, available = len(kv_manager.block_ids(request_id)), kv_manager.num_free
    num_tokens = sequence.num_computed_tokens
    is_swapped = swap and kv_manager.swap_out(request_id)
    if not is_swapped:
        kv_manager.release(request_id)
        sequence.num_computed_tokens = 0
    tracer.emit(
        Preempted,
        rid=request_id,
        mode="swap" if is_swapped else "recompute",
        num_blocks=num_blocks,
        num_freed=kv_manager.num_free - available,
        needed=needed,
        available=available,
        num_tokens=num_tokens,
        num_output_tokens=sequence.get_output_len(),
    )
