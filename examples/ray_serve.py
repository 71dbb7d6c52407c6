"""Replicas of `AsyncLLM` on Ray Serve, with and without prefix-aware routing: `python examples/ray_serve.py`.

A conversation sends all of its turns again. The replica that answered the last turn has their KV in its cache; another
one computes it again. The routing is Ray Serve's: `PrefixRouter` is a `RequestRouter`, its class for a policy; its own
default is the less busy one of two random replicas. Engines run `in_process`: two of them start in 6 s on two cores, as
processes of their own in 8 to 10 s. Needs `pip install "stepwise-llm[serve,foreign]"`. SGLang: `cache_aware` of its
router; vLLM: that of production-stack. Ray's `PrefixCacheAffinityRouter` cannot be imported without one of the two.
"""

import asyncio
import os
from collections import Counter
from itertools import accumulate
from operator import attrgetter
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # send no statistics

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from m7_serving import AsyncLLM, DisaggregationConfig, EngineStats, SamplingParams

Messages = list[dict[str, str]]
BLOCK, MOST_BLOCKS = 16, 1_000_000  # characters of a block; blocks that the router remembers
TOPICS = ("a KV cache", "paged attention", "continuous batching", "a radix tree", "chunked prefill", "a block table")
ASKED = ("What is {}?", "Why does an engine need {}?", "What does {} cost?", "Where is {} used?", "Explain {} again.")


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that received the longest known beginning of its conversation."""

    def initialize_state(self) -> None:
        """Begin without any prefix; called by Serve."""
        self._owners: dict[int, ReplicaID] = {}  # hash of a beginning -> replica that received it last; oldest first
        self._num_chosen: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, the best one first. Serve takes the first one that is not full."""
        known = prefix_hashes(pending_request.args[0]) if pending_request else []
        owner = next((self._owners[each] for each in reversed(known) if each in self._owners), None)
        ranked = sorted(candidate_replicas, key=lambda it: (it.replica_id != owner, self._num_chosen[it.replica_id]))
        self._num_chosen.update(each.replica_id for each in ranked[:1])
        return [[each] for each in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note the replica for all beginnings of the conversation; called by Serve."""
        for each in prefix_hashes(pending_request.args[0]):
            self._owners.pop(each, None)
            self._owners[each] = replica_id
        while len(self._owners) > MOST_BLOCKS:
            del self._owners[next(iter(self._owners))]


def prefix_hashes(messages: Messages) -> list[int]:
    """Return a hash of each beginning of a conversation, in whole blocks."""
    text = "".join(f"{message['role']}\n{message['content']}\n" for message in messages)
    blocks = (text[start : start + BLOCK] for start in range(0, len(text) - BLOCK + 1, BLOCK))
    return list(accumulate(blocks, lambda before, block: hash((before, block)), initial=0))[1:]


@serve.deployment(num_replicas=2, max_ongoing_requests=32, ray_actor_options={"num_cpus": 1})
class Replica:
    """An engine with the included model."""

    async def __init__(self) -> None:
        self.llm = await AsyncLLM.start(disaggregation_config=DisaggregationConfig(both=1, transport="in_process"))

    async def answer(self, messages: Messages) -> str:
        """Return the answer to a conversation."""
        *_, last = [output async for output in self.llm.generate(messages, SamplingParams(max_tokens=48))]
        return last.outputs[0].text

    async def stats(self) -> EngineStats:
        """Return the totals of the engine."""
        return await self.llm.stats()

    async def __del__(self) -> None:  # Serve awaits it
        await self.llm.close()


async def talk(handle: DeploymentHandle) -> None:
    """Hold a conversation about each topic, all at the same time; a question is sent with everything before it."""

    async def ask(topic: str) -> None:
        messages: Messages = []
        for question in ASKED:
            messages.append({"role": "user", "content": question.format(topic)})
            messages.append({"role": "assistant", "content": await handle.answer.remote(messages)})

    await asyncio.gather(*map(ask, TOPICS))


def main() -> None:
    """Print the hit rate of all replicas, and the requests of each, for both policies."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    try:
        for name, options in (("power-of-two", {}), ("prefix-aware", {"request_router_class": PrefixRouter})):
            app = Replica.options(request_router_config=RequestRouterConfig(**options)).bind()
            handle = serve.run(app, name=name, route_prefix=None)
            asyncio.run(talk(handle))
            stats: list[EngineStats] = handle.broadcast("stats").results()
            serve.delete(name)
            cached, computed = (sum(map(attrgetter(f"num_{key}_tokens"), stats)) for key in ("cached", "prompt"))
            counts = [sum(each.num_finished.values()) for each in stats]
            print(f"{name}: hit rate {cached / (cached + computed):.2f}, requests of the replicas {counts}")
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
