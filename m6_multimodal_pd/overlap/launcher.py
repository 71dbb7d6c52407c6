"""Starts a step without waiting for it, and reads its tokens when it has ended.

m5's runner does both in one call: `prepare`, `forward`, `sample`. Here `launch` is all three where the device chooses
the tokens (`Choice`), so a second step can be queued behind it; `arrive` waits for the first and reads them. Otherwise
`launch` is the first two, and `arrive` also samples; then it must be called before the next launch, for the reason
`ForwardOutput.why_host`. The device is CUDA, whose kernels are only queued by the host; or a thread of the
native backend, if the layers of a step are one call (`NativeStep`). On a CPU a step with images or many tokens has
ended when `launch` returns. mini-sglang: `ForwardInput`, `ForwardOutput`; SGLang: `TpModelWorkerClient`.
"""

import ctypes
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1_single_request.sampler import Sampler
from m1_single_request.sampling_metadata import SamplingMetadata
from m3_paged_attention.attention.host_to_device import to_device
from m3_paged_attention.attention.native_step import NativeStep
from m3_paged_attention.executor import checked
from m3_paged_attention.expert_recorder import ExpertRecorder
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.mem_cache.native_thread import NativeThread
from m5_chunked_prefill_spec.forward_batch import ForwardBatch
from m5_chunked_prefill_spec.model_runner import ModelRunner
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m5_chunked_prefill_spec.speculative.rejection_sampler import RejectionSampler
from m5_chunked_prefill_spec.speculative.spec_info import Drafts
from m6_multimodal_pd.overlap.choice import Choice
from m6_multimodal_pd.overlap.future_map import FutureMap
from m6_multimodal_pd.overlap.whole_step import OWN_PART, WholeStep, takes, why_host

PROMPTS = "its prompts join the prefix cache first"
"""A page of theirs may be freed then, because the cache has the same."""


@dataclass(eq=False)
class ForwardOutput:
    """A step that was launched, and later its result or error."""

    batch: ModelWorkerBatch
    num_futures: int = 0
    """Input tokens that were placeholders when the batch was scheduled."""
    waited_for: str | None = None
    """Reason why the step before arrived before this launch; None: it arrives after it, or there is none."""
    drafts: Drafts | None = None
    forward_batch: ForwardBatch | None = None
    rows: Tensor | None = None
    """int64 `[batch_size]`: rows of the requests in `FutureMap`, on the device."""
    call: int | None = None
    """Number of its call on the thread; None: it runs elsewhere."""
    hidden: Tensor | None = None
    """`[total_tokens, hidden_size]`; not to be read before the forward has ended."""
    choice: Choice | None = None
    """The tokens, which the device chooses; None: the host samples."""
    why_host: str | None = None
    """Reason why the host samples, or needs the tokens before the next launch."""
    is_async: bool = False
    """Whether it may run while the host goes on."""
    output: ModelRunnerOutput | None = None
    error: Exception | None = None
    has_arrived: bool = False
    """Whether the host has its result."""
    times: tuple[Any, Any] | None = None
    """When it began and ended, by `Launcher._clock`; None on the thread, which measures itself."""
    device_seconds: float = 0.0
    waited_seconds: float = 0.0

    @property
    def must_arrive(self) -> bool:
        """Whether it must arrive before the next launch."""
        return self.why_host is not None or self.error is not None


class Launcher:
    """Runs steps one after the other; two of them may have been launched. Its owner must `close` it."""

    runner_class: type[ModelRunner] = ModelRunner
    """The class whose `sample` the device may replace."""

    def __init__(self, worker: Any, num_rows: int) -> None:
        """`worker`: of the executor. `num_rows`: of the pool of rows."""
        self.worker, self.runner = worker, worker.model_runner
        self.future_map = FutureMap(num_rows, self.runner.device)
        self.is_cuda = self.runner.device.type == "cuda"
        is_one_call = isinstance(self.runner.kv.step, NativeStep) and self.runner.model.config.experts is None
        self.thread = NativeThread(2) if is_one_call else None
        self.row_sampler = self.runner.rejection_sampler.one_each
        # Trace events read logits. On the stream of the steps they would wait for the one that is queued behind.
        self._reads: Any = None
        if self.is_cuda:
            self._reads = torch.cuda.Stream(self.runner.device)  # type: ignore[no-untyped-call]
        if self.runner.host_pool is not None and self.thread is not None:
            self.runner.host_pool.before_load = self.thread.wait
        self._on_thread: list[WholeStep] = []  # the last two, whose memory it reads and writes, whoever drops them

    def obstacle(self) -> str | None:
        """Return why a forward has ended when `launch` returns, or None."""
        if isinstance(getattr(self.worker, "recorder", None), ExpertRecorder):
            return "the experts of each step are recorded when it has ended"
        if self.is_cuda or self.thread is not None:
            return None
        model = self.runner.model
        if isinstance(self.runner.kv.step, NativeStep):
            return "on a CPU a step with experts is several calls, and torch chooses the experts between them"
        return model.eager_reason or f"the {model.backend.name} backend has no thread that runs all layers"

    def launch(self, batch: ModelWorkerBatch, behind: ForwardOutput | None) -> ForwardOutput:
        """Start a step. Its error is raised by `result`.

        `behind`: the step before, if it has not arrived. It is none that `must_arrive`.
        """
        unread = None if behind is None else behind.batch.req_pool_indices
        input_ids = self.future_map.resolve(batch.input_ids, unread)
        launched = ForwardOutput(
            replace(batch, input_ids=input_ids),
            num_futures=int((batch.input_ids < 0).sum()),
            why_host=self._why_host(batch),
        )
        self._run(self._start, launched)
        return launched

    def prebuilt(self, batch: ModelWorkerBatch, output: ModelRunnerOutput) -> ForwardOutput:
        """Return a step that another engine has computed."""
        launched = ForwardOutput(batch, output=checked(output, expected_of(batch)), why_host=PROMPTS)
        self._keep(launched)
        return launched

    def arrive(self, launched: ForwardOutput) -> None:
        """Wait for a step, and read its tokens, or sample them."""
        if launched.output is None and launched.error is None:
            self._run(self._read, launched)
        launched.has_arrived = True
        launched.forward_batch = launched.rows = launched.hidden = launched.choice = None

    def newest_tokens(self, rows: np.ndarray) -> Tensor:
        """Return the tokens of these rows on the device, as of the last launch.

        On a CPU the thread may be writing them: what it chooses are tokens of plain rows, which nothing counts.
        """
        return self.future_map.on_device[to_device(torch.from_numpy(rows), self.runner.device)]

    def result(self, launched: ForwardOutput) -> ModelRunnerOutput:
        """Return the output of a step that has arrived, or raise its error."""
        if launched.error is not None:
            raise launched.error
        assert launched.output is not None, "it has not arrived"
        return launched.output

    def wait(self) -> None:
        """Return when no step runs."""
        if self.is_cuda:
            torch.cuda.synchronize(self.runner.device)
        elif self.thread is not None:
            self.thread.wait()
            self._on_thread = []

    def close(self) -> None:
        """Wait, and end the thread."""
        if self.thread is not None:
            self.thread.close()
            self._on_thread = []

    def _run(self, part: Callable[[ForwardOutput], None], launched: ForwardOutput) -> None:
        """Run a part of a step, as the worker runs whole steps; its error is that of the step."""
        try:
            with torch.inference_mode(), self.worker.on_device, self.worker.step_threads:
                part(launched)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold tensors of the forward
            launched.output, launched.error = None, error

    def _why_host(self, batch: ModelWorkerBatch) -> str | None:
        """Return why the tokens of a step must be on the host before the next launch, or None."""
        runner, sampler = self.runner, self.row_sampler.sampler
        if batch.num_prompts:
            return PROMPTS
        if runner.draft_runner is not None:
            return "drafts continue its tokens"
        if not (
            type(runner).sample is self.runner_class.sample
            and type(runner.rejection_sampler).__call__ is RejectionSampler.__call__
            and type(sampler).__call__ is Sampler.__call__
        ):
            return OWN_PART
        return None

    def _start(self, launched: ForwardOutput) -> None:
        batch, step = self._prepare(launched), self.runner.kv.step
        if self.thread is not None and isinstance(step, NativeStep) and takes(self.runner, step, batch):
            self.runner.arrived_kv(batch.attn_metadata)
            self._start_on_thread(self.thread, step, launched)
            return
        if self.thread is not None:
            self.thread.wait()
        if not self.is_cuda and launched.why_host is None:
            launched.why_host = "it ran on the host"
        self._compute(launched)

    def _prepare(self, launched: ForwardOutput) -> ForwardBatch:
        """Run the draft model, if there is one, and move the step to the device."""
        launched.batch, launched.drafts = self.runner.drafted(launched.batch)
        step = self.runner.prepare(launched.batch, launched.drafts), torch.from_numpy(launched.batch.req_pool_indices)
        launched.forward_batch, launched.rows = batch, _ = to_device(step, self.runner.device)
        return batch

    def _compute(self, launched: ForwardOutput) -> None:
        """Run the forward of a prepared step, and choose its tokens unless the host does. CUDA only queues that."""
        runner, batch = self.runner, launched.forward_batch
        assert batch is not None
        began = self._clock()
        if (launched.batch.input_ids < 0).any():
            self.future_map.resolve_on_device(batch.input_ids)
        launched.hidden = hidden = runner.forward(batch)
        if launched.why_host is None:
            assert batch.sampling is not None and launched.rows is not None
            launched.choice, tokens = self._choose(hidden, batch.sampling)
            self.future_map.on_device[launched.rows] = tokens
        launched.is_async, launched.times = self.is_cuda, (began, self._clock())

    def _choose(self, hidden: Tensor, sampling: SamplingMetadata) -> tuple[Choice, Tensor]:
        """Choose the tokens of a forward; return them also as inputs, on the device."""
        return Choice.queued(self.row_sampler.sampler, self.runner.model.compute_logits(hidden), sampling)

    def _start_on_thread(self, thread: NativeThread, step: NativeStep, launched: ForwardOutput) -> None:
        """Launch a prepared step on the thread, with the choice of its tokens if they are the best ones."""
        batch, sampler = launched.batch, self.row_sampler.sampler
        if launched.why_host is None:
            launched.why_host = why_host(self.runner.model, sampler, batch.sampling_info)
        rows = batch.req_pool_indices if launched.why_host is None else None
        whole = WholeStep.filled(self.runner, step, launched.forward_batch, self.future_map.on_device, rows)
        self._on_thread = [*self._on_thread[-1:], whole]
        launched.hidden, launched.choice, launched.is_async = whole.hidden, whole.choice, True
        launched.call = thread.launch(whole.function, ctypes.addressof(whole.table))

    def _read(self, launched: ForwardOutput) -> None:
        began = time.perf_counter()
        if launched.times is None:
            assert self.thread is not None
            launched.device_seconds = self.thread.wait(launched.call)
            if launched.choice is not None:
                launched.choice.is_broken = launched.choice.tokens < 0  # by `WholeStep`
        elif self.is_cuda:
            start, end = launched.times
            self._wait_for(end)
            launched.device_seconds = start.elapsed_time(end) / 1e3
        else:
            launched.device_seconds = launched.times[1] - launched.times[0]
        arrived = time.perf_counter()
        launched.waited_seconds = arrived - began if launched.is_async else launched.device_seconds
        batch = launched.batch
        if launched.choice is None:
            output = self.runner.sample(batch, launched.forward_batch, launched.hidden, launched.drafts)
        else:
            with torch.cuda.stream(self._reads):
                rows = launched.choice.read(self.row_sampler, batch.rids, batch.sampling_info)
            output = replace(rows, sample_seconds=time.perf_counter() - arrived)
        launched.output = checked(output, expected_of(batch))
        self._keep(launched)

    def _wait_for(self, event: Any) -> None:
        """Wait for an event of CUDA."""
        event.synchronize()

    def _clock(self) -> Any:
        """Return the time on the device, as a number or as an event of CUDA."""
        if not self.is_cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _keep(self, launched: ForwardOutput) -> None:
        """Store the newest token of each request for the next launch."""
        batch, output = launched.batch, launched.output
        assert output is not None
        rows = batch.req_pool_indices
        if output.req_ids != batch.rids:
            places = {rid: place for place, rid in enumerate(batch.rids)}
            rows = rows[[places[rid] for rid in output.req_ids]]
        self.future_map.store(rows, np.array([token_ids[-1] for token_ids in output.sampled_token_ids], dtype=np.int64))


def expected_of(batch: ModelWorkerBatch) -> dict[str, int]:
    """Return the largest number of tokens of each request."""
    return dict(zip(batch.rids, batch.sample_lens, strict=True))
