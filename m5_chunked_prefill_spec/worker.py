"""Worker that also measures the costs of steps, on its device like all that it runs.

m3's worker has every other method. vLLM: `v1/worker/gpu_worker.py`; SGLang: `managers/tp_worker.py`.
"""

from m3_paged_attention.worker import GPUWorker as StepWorker
from m5_chunked_prefill_spec.cost_table import CostTable


class GPUWorker(StepWorker):
    """m3's worker with one more method, `measure_costs`."""

    def measure_costs(self, most: int) -> CostTable:
        """Measure the costs of steps of up to `most` new tokens; needs the KV memory."""
        with self.on_device:
            table: CostTable = self.model_runner.measure_costs(most)
        return table
