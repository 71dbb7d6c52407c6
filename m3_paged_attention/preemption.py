"""Preemption: take the blocks of a running request if the free blocks do not suffice for the next step.

New in m3: m2's slots were as long as a request may become, so every admitted request ran to its end. Blocks are
allocated as they are needed, so they can run out under running requests. The choice of the request is one class, so
that another can replace it (`parts={"preemption": ...}`); `preempt` chooses between swap and recompute. vLLM preempts
the last running request; SGLang's `retract_decode` has this policy.
"""

from collections.abc import Sequence
from typing import Any

from m1_single_request.errors import PartError
from m1_single_request.tracer import Tracer
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.request import Request
from m3_paged_attention.scheduler_events import Preempted


class FewestOutputsFirst:
    """The default policy: fewest output tokens, then the longest prompt (it frees most blocks), then the newest."""

    def choose_victim(self, running: Sequence[Any]) -> Any:
        """Return the request to preempt. `running`: the running requests, at least one."""
        return min(running, key=lambda r: (r.sequence.get_output_len(), -r.sequence.get_prompt_len(), -r.number))


def victim_of(policy: FewestOutputsFirst, running: Sequence[Any]) -> Any:
    """Return the policy's choice. Raises `PartError` if it is none of the running requests."""
    victim = policy.choose_victim(tuple(running))
    if not any(victim is request for request in running):
        part, chosen = type(policy).__name__, getattr(victim, "request_id", victim)
        raise PartError(
            f"the part 'preemption' ({part}) chose {chosen!r}, which is none of the {len(running)} running requests"
        )
    return victim


def preempt(request: Request, kv_manager: KVCacheManager, *, swap: bool, needed: int, tracer: Tracer) -> None:
    """Free the blocks of a running request. Its KV moves to the host if `swap` is True and the host has room; else the
    KV is discarded and computed again later.

    `needed`: number of blocks for the next tokens of all running requests.
    """
    request_id, sequence = request.request_id, request.sequence
    num_blocks, available = len(kv_manager.block_ids(request_id)), kv_manager.num_free
    num_tokens = sequence.num_computed_tokens
    mode = "recompute"
    if swap and kv_manager.swap_out(request_id):
        mode = "swap"
    else:
        kv_manager.release(request_id)
        sequence.num_computed_tokens = 0
    tracer.emit(
        Preempted,
        rid=request_id,
        mode=mode,
        num_blocks=num_blocks,
        num_freed=kv_manager.num_free - available,
        needed=needed,
        available=available,
        num_tokens=num_tokens,
        num_output_tokens=sequence.get_output_len(),
    )
