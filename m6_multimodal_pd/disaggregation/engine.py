"""An engine among others: an engine core, the side that it takes, and its end of the KV's way.

Everything is m6's engine as it stands alone; only the scheduler has an exchange, a prefill engine says one token of
each request, and a decode engine takes prebuilt batches. `tick` is the event loop's body: messages, a step if there is
anything to compute, and what there is to say. SGLang: `event_loop_normal_disagg_prefill` and `..._decode`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from m1_single_request.errors import EngineError
from m1_single_request.tracer import Tracer
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.decode_exchange import DecodeExchange
from m6_multimodal_pd.disaggregation.decode_side import DecodeSide
from m6_multimodal_pd.disaggregation.engine_side import EngineSide
from m6_multimodal_pd.disaggregation.first_token import FirstTokenOnly
from m6_multimodal_pd.disaggregation.jobs import fault_of
from m6_multimodal_pd.disaggregation.members import vocabulary_of
from m6_multimodal_pd.disaggregation.messages import Answer, Call, Heartbeat, Joined, Role, ToEngine, ToRouter
from m6_multimodal_pd.disaggregation.page_store import PageStore
from m6_multimodal_pd.disaggregation.prebuilt import PrebuiltExecutor
from m6_multimodal_pd.disaggregation.prefill_exchange import PrefillExchange
from m6_multimodal_pd.disaggregation.prefill_side import PrefillSide
from m6_multimodal_pd.disaggregation.reporter import Reporter
from m6_multimodal_pd.disaggregation.staging import Segments, StagedSource, StagedTarget


class Engine:
    """One engine of a group, for one role. Belongs to one thread; `send` goes to the router."""

    def __init__(
        self,
        *,
        role: Role,
        config: Any,
        parts: Mapping[str, Any],
        build: Callable[..., Any],
        segments: Segments,
        send: Callable[[ToRouter], None],
        is_traced: bool,
    ) -> None:
        """`build`: m6's `build_engine_core`. `is_traced`: whether the router wants to hear the trace. Raises what
        building an engine raises."""
        self.role, self.config, self.tracer, self.is_traced = role, config, Tracer(), is_traced
        self.reporter = Reporter(send)
        self._last_told: Heartbeat | None = None

        def send_in_order(message: ToRouter) -> None:
            """What led to a message is told before it, and so before whatever comes of it."""
            self.reporter.tell()
            send(message)

        self.send = send_in_order
        if is_traced:
            self.tracer.attach(self.reporter)
        self.core, exchange = built(role, config, parts, build, self.tracer)
        runner = self.core.executor.worker.model_runner
        drafts = [] if runner.draft_runner is None else [runner.draft_runner.kv]
        self.store = PageStore([runner.kv, *drafts])
        settings: dict[str, Any] = {
            "core": self.core,
            "exchange": exchange,
            "page_bytes": self.store.page_bytes,
            "send": self.send,
            "tracer": self.tracer,
            "page_size": config.cache.page_size,
        }
        self.side: EngineSide[Any]
        self.transport: StagedSource | StagedTarget
        if role == "prefill":
            frames = num_frames(config.disaggregation, self.store)
            self.transport = StagedSource(self.store, segments, num_frames=frames, checksums=config.cache.debug)
            self.side = PrefillSide(source=self.transport, **settings)
        else:
            self.transport = StagedTarget(self.store, segments)
            self.side = DecodeSide(target=self.transport, **settings)

    @property
    def joined(self) -> Joined:
        """What the router is told when the engine is ready."""
        model, processor = self.config.model, self.core.input_processor
        return Joined(
            role=self.role,
            page_size=self.config.cache.page_size,
            total_tokens=self.core.scheduler.pools.token_to_kv_pool_allocator.size,
            max_model_len=processor.max_model_len,
            layout=self.store.layout,
            model=f"{model.model} {model.dtype} {model.load_format}"[:4096],
            vocabulary=vocabulary_of(processor.tokenizer),
        )

    def has_work(self) -> bool:
        """Whether a step would do anything: not if all requests are elsewhere."""
        scheduler = self.core.scheduler
        return bool(
            scheduler.waiting_queue
            or scheduler.running_batch.reqs
            or scheduler.last_batch is not None
            or scheduler.chunked_req is not None
            or scheduler.marked
            or getattr(scheduler.exchange, "arrivals", None)
        )

    def tick(self, messages: Iterable[ToEngine] = ()) -> bool:
        """Do what the messages ask for, run a step if there is one to run, and tell. Returns whether a step ran.

        Raises `EngineDeadError`, when all is told, if the device was lost: nothing more will come of this engine.
        """
        for message in messages:
            if isinstance(message, Call):
                self._answer(message)
            else:
                self.side.handle(message)
        has_stepped = self.has_work()
        if has_stepped:
            self.core.step()
        self.side.after_step()
        self.reporter.tell()
        if self.is_traced and (now := self.heartbeat()) != self._last_told:
            self._last_told = now
            self.send(now)
        if self.core.dead is not None:
            raise self.core.dead
        return has_stepped

    def heartbeat(self) -> Heartbeat:
        """How it stands."""
        scheduler = self.core.scheduler
        pools = scheduler.pools
        return Heartbeat(
            num_steps=self.core.iteration,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.requests) - len(scheduler.running),
            free_tokens=pools.token_to_kv_pool_allocator.available_size() + pools.tree_cache.evictable_size(),
        )

    def close(self) -> None:
        """Let go of everything."""
        self.transport.close()
        self.core.close()

    def _answer(self, call: Call) -> None:
        """Do something that is not a request, and say what came of it."""
        value: Any = None
        fault = None
        try:
            if call.verb == "stats":
                value = asdict(self.core.stats())
            elif call.verb == "flush_cache":
                value = self.core.flush_cache()
            elif call.verb == "update_weights":
                self.core.update_weights(call.argument)
            elif call.verb == "start_profile":
                self.core.operations.start_profile(call.argument)
            elif call.verb == "stop_profile":
                value = self.core.operations.stop_profile()
        except EngineError as error:
            fault = fault_of(error)
        self.send(Answer(call.number, msgspec.Raw(msgspec.msgpack.encode(value)), fault))


def num_frames(config: DisaggregationConfig, store: PageStore) -> int:
    """Pages that may be on their way between two engines; never more than there are."""
    return min(max(config.transfer_buffer_bytes // store.page_bytes, 1), store.num_pages)


def built(
    role: Role, config: Any, parts: Mapping[str, Any], build: Callable[..., Any], tracer: Tracer
) -> tuple[Any, PrefillExchange | DecodeExchange]:
    """An engine core for a role, and its exchange."""
    if role == "prefill":
        prefill = PrefillExchange()
        table = dict(parts)
        table["stop_checker"] = lambda **settings: FirstTokenOnly(parts["stop_checker"](**settings))
        return build(config, table, tracer, lambda pools: prefill), prefill
    made: list[DecodeExchange] = []

    def make_exchange(pools: Any) -> DecodeExchange:
        made.append(DecodeExchange(pools, tracer, by_priority=config.scheduler.schedule_policy == "priority"))
        return made[0]

    core = build(config, parts, tracer, make_exchange)
    made[0].scheduler = core.scheduler
    core.executor = PrebuiltExecutor(core.executor, made[0].first_tokens)
    return core, made[0]
