"""One engine of a group: an engine core, the side of its role, and its end of the KV transport.

Everything is m6's engine as it is alone, but for the scheduler; a prefill engine computes one token of each request,
and a decode engine runs prebuilt batches; one that does both is m6's, without text. `tick` is the body of the event
loop: it handles messages, runs a step if there is anything to compute, and sends the results. SGLang:
`event_loop_normal_disagg_prefill` and `..._decode`.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import msgspec

from m1_single_request.request import Request
from m1_single_request.tracer import Tracer
from m3_paged_attention.output_processor import OutputProcessor
from m3_paged_attention.worker import current_device
from m6_multimodal_pd.disaggregation.config import Role
from m6_multimodal_pd.disaggregation.decode_scheduler import DecodeScheduler
from m6_multimodal_pd.disaggregation.decode_side import DecodeSide
from m6_multimodal_pd.disaggregation.first_token import FirstTokenOnly
from m6_multimodal_pd.disaggregation.members import vocabulary_of
from m6_multimodal_pd.disaggregation.page_store import PageStore
from m6_multimodal_pd.disaggregation.prebuilt import PrebuiltExecutor
from m6_multimodal_pd.disaggregation.prefill_scheduler import PrefillScheduler
from m6_multimodal_pd.disaggregation.prefill_side import PrefillSide
from m6_multimodal_pd.disaggregation.room_side import BothSide, RoomSide
from m6_multimodal_pd.disaggregation.runtime.jobs import fault_of
from m6_multimodal_pd.disaggregation.runtime.messages import Answer, Call, Joined, LengthFitted, ToEngine, ToRouter
from m6_multimodal_pd.disaggregation.runtime.reporter import Reporter
from m6_multimodal_pd.disaggregation.segments import Segments
from m6_multimodal_pd.disaggregation.staging import StagedSource, StagedTarget


class Engine:
    """One engine of a group, for one role. Belongs to one thread; `send` goes to the router."""

    def __init__(
        self,
        *,
        role: Role,
        config: Any,
        parts: Mapping[str, Any],
        prepare: Callable[..., Any],
        segments: Segments,
        send: Callable[[ToRouter], None],
        is_traced: bool,
    ) -> None:
        """Load the model. The engine works after `start`.

        `prepare`: m6's. `is_traced`: whether the router reads a trace. Raises the errors of building an engine.
        """
        self.role, self.config, self.segments, self.send = role, config, segments, send
        self.tracer, self.reporter = Tracer(), Reporter(send) if is_traced else None
        if self.reporter is not None:
            self.send = self.reporter.send
            self.tracer.attach(self.reporter)
        self.core: Any = None
        self.prepared = prepare(config_for(role, config), parts_for(role, parts), self.tracer)

    @property
    def fitted(self) -> LengthFitted:
        """The report to the router when the model is loaded."""
        named = self.config.model.max_model_len is not None
        return LengthFitted(self.role, self.prepared.loaded.max_model_len, named)

    def start(self, max_model_len: int) -> None:
        """Reserve the KV memory and put the parts together, for requests of at most `max_model_len` tokens."""
        core = self.prepared.complete(max_model_len)
        with ExitStack() as undo:
            undo.callback(core.close)
            self._put_together(core)
            undo.pop_all()
        self.core, self.prepared = core, None

    def _put_together(self, core: Any) -> None:
        """Build the transport and the side around an engine core."""
        config = self.config
        runner = core.executor.worker.model_runner
        drafts = [] if runner.draft_runner is None else [runner.draft_runner.kv]
        self.store = store = PageStore([runner.kv, *drafts])
        self.on_device = current_device(store.device)  # not the worker's, which is entered inside of it
        self.side: RoomSide[Any]
        if self.role == "both":
            self.side = BothSide(core=core, send=self.send)
        elif self.role == "prefill":
            in_buffer = max(config.disaggregation.transfer_buffer_bytes // store.page_bytes, 1)
            frames = min(in_buffer, store.num_pages)  # more can never be in transit
            source = StagedSource(store, self.segments, num_frames=frames, checksums=config.cache.debug)
            self.side = PrefillSide(source, core=core, send=self.send)
        else:
            core.executor = PrebuiltExecutor(core.executor, core.scheduler.first_tokens)
            self.side = DecodeSide(StagedTarget(store, self.segments), core=core, send=self.send)

    @property
    def joined(self) -> Joined:
        """The report to the router when the engine is ready."""
        model, processor = self.config.model, self.core.input_processor
        return Joined(
            role=self.role,
            page_size=self.config.cache.page_size,
            total_tokens=self.core.scheduler.pools.token_to_kv_pool_allocator.size,
            max_model_len=processor.max_model_len,
            layout=self.store.layout,
            model=f"{model.model} {model.dtype} {model.load_format} {model.quantization}"[:4096],
            vocabulary=vocabulary_of(processor.tokenizer),
        )

    def has_work(self) -> bool:
        """Return whether a step would do anything: not while all requests wait for another engine."""
        scheduler = self.core.scheduler
        return bool(scheduler.marked) or len(scheduler.requests) > len(self.side.elsewhere)

    def tick(self, messages: Iterable[ToEngine] = ()) -> bool:
        """Handle messages, run a step if there is one to run, and send its results. Returns whether a step ran.

        Raises `EngineDeadError` if the device is lost: the engine cannot be used any more. The results of a step that
        finds it lost are sent before; a copy of KV that does raises at once, behind the events of the step.
        """
        try:
            with self.on_device:  # streams of copies would open another one as well
                for message in messages:
                    if isinstance(message, Call):
                        self._answer(message)
                    else:
                        self.side.handle(message)
                has_stepped = self.has_work()
                if has_stepped:
                    self.core.run_step()
                self.side.after_step()
        finally:
            if self.reporter is not None:
                self.reporter.flush()
        if self.core.dead is not None:
            raise self.core.dead
        return has_stepped

    def close(self) -> None:
        """Release all memory."""
        if self.core is not None:
            with self.on_device:
                self.side.close()
            self.core.close()

    def _answer(self, call: Call) -> None:
        """Execute a call, and send its result or error; an error concerns the call alone."""
        value, fault = None, None
        try:
            value = self._execute(call)
        except Exception as error:
            fault = fault_of(error)
        self.send(Answer(call.number, msgspec.Raw(msgspec.msgpack.encode(value)), fault))

    def _execute(self, call: Call) -> Any:
        match call.verb:
            case "stats":
                return asdict(self.core.stats())
            case "flush_cache":
                return self.core.flush_cache(call.argument or None)
            case "check_weights":
                self.core.weight_loader.check(call.argument)
            case "update_weights":
                if self.core.scheduler.marked:  # requests that the router has aborted before end first
                    self.core.run_step()
                self.core.update_weights(call.argument)
            case "start_profile":
                self.core.profiler.start(call.argument)
            case "stop_profile":
                return self.core.profiler.stop()
        return None


def config_for(role: Role, config: Any) -> Any:
    """Return the configuration of an engine of this role. One that only computes prompts captures no decode steps."""
    return config if role != "prefill" else replace(config, model=replace(config.model, cuda_graphs=False))


class IdsOnly(OutputProcessor):
    """m3's output processor without texts (`visible_text`), which the router makes. Stop strings alone need texts here
    (`StopChecker`)."""

    def visible_text(self, request: Request) -> str:
        """Return an empty text."""
        return ""


def parts_for(role: Role, parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parts of an engine of this role."""
    parts = {**parts, "output_processor": IdsOnly}
    if role == "both":
        return parts
    if role == "decode":
        return {**parts, "scheduler": DecodeScheduler}
    first_token_only = lambda **settings: FirstTokenOnly(parts["stop_checker"](**settings))  # noqa: E731
    return {**parts, "scheduler": PrefillScheduler, "stop_checker": first_token_only}
