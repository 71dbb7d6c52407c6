"""Retraction: a running request goes back to the waiting queue when memory runs out and nothing is left to evict.

m3 preempted a request by discarding or swapping its blocks. A retracted request frees only the pages that it owns:
those of its output since its last prefill, with the end of the prompt that fills no page. The whole pages up to there
are in the cache and stay until they are evicted, so that often few tokens besides the output are computed again. m3's
`preemption` chooses the request. SGLang: `ScheduleBatch.retract_decode`.
"""

from collections.abc import Sequence

from m1_single_request.errors import shown
from m1_single_request.tracer import Tracer
from m3_paged_attention.errors import KVCapacityError
from m3_paged_attention.preemption import FewestOutputsFirst, victim_of
from m4_radix_cache.events import Retract
from m4_radix_cache.new_token_ratio import NewTokenRatio
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import Pools, ScheduleBatch


def retract(
    batch: ScheduleBatch,
    candidates: Sequence[Req],
    preemption: FewestOutputsFirst,
    ratio: NewTokenRatio,
    tracer: Tracer,
) -> list[Req]:
    """Retract some of `candidates` until the next tokens of the batch have room, or one candidate is left. Return the
    retracted requests."""
    retracted: list[Req] = []
    states, candidates = [], list(candidates)
    while len(candidates) > 1 and not batch.check_decode_mem():
        victim = victim_of(preemption, candidates)
        states.append((victim, victim.kv_committed_len, *batch.room()))
        batch.retract_decode(victim)
        candidates = [req for req in candidates if req is not victim]
        retracted.append(victim)
    ratio.after_retraction(batch.reqs)
    for state in states:
        tracer.emit(Retract.of, *state, ratio.value)
    return retracted


def outgrown(req: Req, pools: Pools) -> KVCapacityError:
    """Return the error of a request that does not fit although it is alone."""
    size = pools.token_to_kv_pool_allocator.size
    return KVCapacityError(
        f"request {shown(req.rid)} has grown to {req.seqlen} tokens, and the KV memory has room for {size}, in pages "
        f"of {pools.token_to_kv_pool_allocator.page_size}: give it more, or ask for fewer tokens"
    )
