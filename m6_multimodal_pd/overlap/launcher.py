"""Starts the forward of a step without waiting for it, and samples when it has ended.

m5's runner does both in one call: `prepare`, `forward`, `sample`. Here `launch` is the first two, and `sample` the
third, which waits for the forward. Between the two calls the device computes: CUDA, whose kernels are only queued by
`forward`; or a thread of the native backend, if the layers of the step are one call (`NativeStep`). Otherwise, on a CPU
for a step with images or many tokens, the forward has ended when `launch` returns. mini-sglang: `ForwardInput`,
`ForwardOutput`; SGLang: `TpModelWorkerClient`.
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

from m3_paged_attention.attention.native_step import NativeStep
from m3_paged_attention.executor import checked
from m3_paged_attention.outputs import ModelRunnerOutput
from m5_chunked_prefill_spec.forward_batch import ForwardBatch
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m5_chunked_prefill_spec.speculative.spec_info import Drafts
from m6_multimodal_pd.forward_batch import ForwardBatch as VisionBatch
from m6_multimodal_pd.overlap.future_map import FutureMap
from m6_multimodal_pd.overlap.native_thread import NativeThread


@dataclass(eq=False)
class ForwardOutput:
    """A forward that was launched, and later its result or error."""

    batch: ModelWorkerBatch
    num_futures: int = 0
    """Input tokens that were placeholders when the batch was scheduled."""
    drafts: Drafts | None = None
    forward_batch: ForwardBatch | None = None
    step: NativeStep | None = None
    """What the thread runs, which reads its memory."""
    hidden: Tensor | None = None
    """`[total_tokens, hidden_size]`; not to be read before the forward has ended."""
    is_async: bool = False
    """Whether it may run while the host goes on."""
    output: ModelRunnerOutput | None = None
    error: Exception | None = None
    times: tuple[Any, Any] | None = None
    """When it began and ended, by `Launcher._clock`; None on the thread, which measures itself."""
    device_seconds: float = 0.0
    waited_seconds: float = 0.0


class Launcher:
    """Runs one forward at a time. Its owner must `close` it."""

    def __init__(self, worker: Any, num_rows: int) -> None:
        """`worker`: of the executor. `num_rows`: of the pool of rows."""
        self.worker, self.runner = worker, worker.model_runner
        self.future_map = FutureMap(num_rows)
        self.is_cuda = self.runner.device.type == "cuda"
        self.thread = NativeThread() if isinstance(self.runner.model.step, NativeStep) else None

    def obstacle(self) -> str | None:
        """Return why a forward has ended when `launch` returns, or None."""
        if self.is_cuda or self.thread is not None:
            return None
        model = self.runner.model
        return model.eager_reason or f"the {model.backend.name} backend has no thread that runs all layers"

    def launch(self, batch: ModelWorkerBatch) -> ForwardOutput:
        """Start the forward of a batch, whose placeholders have their tokens now. Its error is raised by `result`."""
        num_futures = int((batch.input_ids < 0).sum())
        launched = ForwardOutput(replace(batch, input_ids=self.future_map.resolve(batch.input_ids)), num_futures)
        self._run(self._start, launched)
        return launched

    def prebuilt(self, batch: ModelWorkerBatch, output: ModelRunnerOutput) -> ForwardOutput:
        """Return a forward that another engine has computed."""
        launched = ForwardOutput(batch, output=checked(output, expected_of(batch)))
        self._keep(launched)
        return launched

    def sample(self, launched: ForwardOutput) -> None:
        """Wait for a forward, and sample its tokens; the next launch needs them."""
        if launched.output is None and launched.error is None:
            self._run(self._sample, launched)
        launched.forward_batch = launched.step = launched.hidden = None

    def _run(self, part: Callable[[ForwardOutput], None], launched: ForwardOutput) -> None:
        """Run a part of a step; its error is that of the step."""
        try:
            self.worker.run(part, launched)
        except Exception as error:
            if self.thread is not None:
                self.thread.wait()  # it may still read what is dropped now
            traceback.clear_frames(error.__traceback__)  # they hold tensors of the forward
            launched.output, launched.error = None, error

    def result(self, launched: ForwardOutput) -> ModelRunnerOutput:
        """Return the output of a sampled step, or raise its error."""
        if launched.error is not None:
            raise launched.error
        assert launched.output is not None, "it is not sampled yet"
        return launched.output

    def wait(self) -> None:
        """Return when no forward runs."""
        if self.is_cuda:
            torch.cuda.synchronize(self.runner.device)
        elif self.thread is not None:
            self.thread.wait()

    def close(self) -> None:
        """Wait, and end the thread."""
        if self.thread is not None:
            self.thread.close()

    def _prepare(self, launched: ForwardOutput) -> ForwardBatch:
        """Run the draft model, if there is one, and copy the step to the device."""
        launched.batch, launched.drafts = self.runner.drafted(launched.batch)
        launched.forward_batch = batch = self.runner.prepare(launched.batch)
        return batch

    def _start(self, launched: ForwardOutput) -> None:
        runner, batch = self.runner, self._prepare(launched)
        step = runner.model.step
        is_text = not isinstance(batch, VisionBatch) or batch.visual is None
        is_one_call = isinstance(step, NativeStep) and is_text and step.takes(batch.attn_metadata, runner.kv)
        if self.thread is not None and is_one_call:
            launched.is_async, launched.step = True, step
            launched.hidden = step.fill(batch.input_ids, batch.positions, batch.attn_metadata)
            self.thread.launch(ctypes.cast(step.run_layers, ctypes.c_void_p).value or 0, step.address)
            return
        began = self._clock()
        launched.hidden = runner.forward(batch)
        launched.is_async, launched.times = self.is_cuda, (began, self._clock())

    def _sample(self, launched: ForwardOutput) -> None:
        began = time.perf_counter()
        if launched.times is None:
            assert self.thread is not None
            launched.device_seconds = self.thread.wait()
        elif self.is_cuda:
            start, end = launched.times
            end.synchronize()
            launched.device_seconds = start.elapsed_time(end) / 1e3
        else:
            launched.device_seconds = launched.times[1] - launched.times[0]
        launched.waited_seconds = time.perf_counter() - began if launched.is_async else launched.device_seconds
        batch = launched.batch
        output = self.runner.sample(batch, launched.forward_batch, launched.hidden, launched.drafts)
        launched.output = checked(output, expected_of(batch))
        self._keep(launched)

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
