"""Model runner: run the model on one step's tokens, and sample. Only this part uses the model and the KV memory.

Two things are new in m3. The forward is our own, over one flat row of tokens, so a step with prefills and decodes is
one forward. And the sampler runs here, next to the logits: the result is a few numbers per request, which can be sent
to another process or wait on the device, without a matrix of logits. vLLM: `v1/worker/gpu_model_runner.py`; SGLang:
`model_executor/model_runner.py`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from m1_single_request.model_loader import LoadedModel
from m1_single_request.sampler import Sampler
from m1_single_request.tracer import Tracer
from m3_paged_attention.attention.host_to_device import to_device
from m3_paged_attention.config import SchedulerConfig
from m3_paged_attention.input_batch import BatchRow, InputBatch
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.model_input import ModelInput, make_model_input
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.profiling import run_largest_step
from m3_paged_attention.row_sampler import RatedPrompt, RowSampler, SamplingRows, rate_prompts
from m3_paged_attention.scheduler_output import SchedulerOutput


class ModelRunner:
    """Runs the scheduler's output: prepare, forward, sample."""

    def __init__(
        self,
        *,
        loaded_model: LoadedModel,
        scheduler_config: SchedulerConfig,
        sampler: Sampler,
        token_text: Callable[[int], str],
        tracer: Tracer,
    ) -> None:
        self.model = loaded_model.model
        self.device = loaded_model.device
        self.max_model_len = loaded_model.max_model_len
        assert scheduler_config.max_num_seqs is not None, "the configuration must be resolved"
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.sampler = RowSampler(sampler=sampler, token_text=token_text, tracer=tracer)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV memory. Raises `ConfigError` if the machine has less."""
        self.block_size = kv_cache_config.spec.block_size
        self.kv = KVStorage(kv_cache_config, device=self.device)
        self.model.use_kv(self.kv)
        self.input_batch = InputBatch(
            max_num_seqs=self.max_num_seqs,
            max_blocks_per_seq=kv_cache_config.spec.blocks_for(self.max_model_len),
            block_size=self.block_size,
        )

    def profile_run(self, num_tokens: int) -> int:
        """Run the largest step once on dummy tokens: `num_tokens` new tokens, and a sampled token for a full batch.

        Returns the bytes of the temporary KV memory of this run.
        """
        return run_largest_step(
            self.model,
            num_tokens,
            longest=self.max_model_len,
            num_rows=self.max_num_seqs,
            sampler=self.sampler.sampler,
            device=self.device,
        )

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return the shape of this model's KV blocks."""
        return self.model.kv_cache_spec(block_size)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Copy blocks, run the new tokens of all requests through the model, and sample the next ones.

        An exception fails only the requests of this step; `torch.AcceleratorError` means that the device is lost.
        """
        rows = self.input_batch.update(scheduler_output)
        if scheduler_output.blocks_to_swap_in:
            self.kv.swap_in(scheduler_output.blocks_to_swap_in)
        if scheduler_output.blocks_to_swap_out:
            self.kv.swap_out(scheduler_output.blocks_to_swap_out)
        if scheduler_output.blocks_to_copy:  # last: a block that was swapped out may be the target of a copy
            self.kv.copy_blocks(scheduler_output.blocks_to_copy)
        if not rows:
            return ModelRunnerOutput([], [], [])
        batch = SamplingRows([row.state.sampling_row for row in rows], self.model.config.vocab_size, self.device)
        model_input, metadata = to_device((self.prepare_inputs(rows), batch.metadata()), self.device)
        hidden = self.forward(model_input)
        last = hidden if model_input.logits_indices is None else hidden[model_input.logits_indices]
        of_prompts, errors = rate_prompts(self._prompts_to_rate(rows, hidden), self.model.compute_logits)
        req_ids = [row.state.req_id for row in rows]
        sampled, start_time = self.sampler.best(req_ids, metadata, self.model, last), time.perf_counter()
        if sampled is None:
            logits = self.model.compute_logits(last)  # [num_seqs, vocab]
            start_time = time.perf_counter()
            sampled = self.sampler(req_ids, batch, logits, metadata)
        errors |= sampled.errors
        seconds = time.perf_counter() - start_time
        return replace(sampled, prompt_logprobs=of_prompts, errors=errors, sample_seconds=seconds)

    def prepare_inputs(self, rows: Sequence[BatchRow]) -> ModelInput:
        """Convert the rows of a step to tensors, on the host."""
        return make_model_input(rows, self.input_batch.block_tables, self.block_size)

    def forward(self, model_input: ModelInput) -> Tensor:
        """Run the model; return the hidden states `[total_tokens, hidden_size]`."""
        return self.model.forward(model_input.input_ids, model_input.positions, self.kv, model_input.attn_metadata)

    def free_request(self, request_id: str) -> None:
        """Remove the state of a request; does nothing for an unknown id."""
        self.input_batch.remove(request_id)

    def held_request_ids(self) -> list[str]:
        """Return the ids of the requests whose state the runner stores."""
        return list(self.input_batch.states)

    def shutdown(self) -> None:
        """Free the KV memory and the model. Afterwards only `free_request` and `held_request_ids` work."""
        for name in ("kv", "model"):
            vars(self).pop(name, None)  # `close` may be called again

    def _prompts_to_rate(self, rows: Sequence[BatchRow], hidden: Tensor) -> Iterator[RatedPrompt]:
        """Yield the prompts in this step that request log-probabilities."""
        end = 0
        for row in rows:
            start, end = end, end + row.num_tokens
            state, num_best = row.state, row.state.params.prompt_logprobs
            if row.is_prompt and num_best is not None:
                yield RatedPrompt(state.req_id, state.prompt_token_ids, num_best, hidden[start:end])
