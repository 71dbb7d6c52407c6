"""What happens when memory runs out under the running requests, and nothing is left to evict.

m3 took blocks away and kept, dropped or swapped what was in them. Here a request that must go gives up only what is its
own: what the cache shares of it stays until somebody needs the room, so it often comes back for little. Who goes is
m3's rule. SGLang: `ScheduleBatch.retract_decode`.
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
    preemption: FewestOutputsFirst,
    ratio: NewTokenRatio,
    tracer: Tracer,
    *,
    prefilling: Sequence[Req] = (),
) -> list[Req]:
    """Take requests out of a batch until the others' next tokens have room, or one is left; return the requests taken
    out.

    `prefilling`: other requests that hold memory and may be taken out as well (from m5 on).
    """
    retracted: list[Req] = []
    states, others = [], list(prefilling)
    while len(batch.reqs) + len(others) > 1 and not batch.check_decode_mem():
        victim = victim_of(preemption, [*batch.reqs, *others])
        states.append((victim, victim.kv_committed_len, *batch.room()))
        batch.retract_decode(victim)
        others = [req for req in others if req is not victim]
        retracted.append(victim)
    ratio.after_retraction(batch.reqs)
    for state in states:
        tracer.emit(Retract.of, *state, ratio.value)
    return retracted


def outgrown(req: Req, pools: Pools) -> KVCapacityError:
    """The error of a request that has no room even alone."""
    size = pools.token_to_kv_pool_allocator.size
    return KVCapacityError(
        f"request {shown(req.rid)} has grown to {req.seqlen} tokens, and the KV memory has room for {size}, in pages "
        f"of {pools.token_to_kv_pool_allocator.page_size}: give it more, or ask for fewer tokens"
    )
