"""A batch on its way to the device in which some requests have images.

m5's plain data, with the images of each request: those of a prompt are read in this step, and of a request that decodes
its position delta. A batch without images stays m5's. SGLang: `ModelWorkerBatch.multimodal_inputs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch as TextModelWorkerBatch
from m6_multimodal_pd.multimodal.inputs import MultimodalInputs


class PromptPiece(NamedTuple):
    """A prompt with images, or a piece of one, in a step."""

    row: int
    """Its row in the batch."""
    start: int
    """Index in the prompt of the first token that is computed in this step."""
    end: int
    """Index after the last one."""
    inputs: MultimodalInputs


@dataclass(eq=False, kw_only=True)
class ModelWorkerBatch(TextModelWorkerBatch):
    """One step in which at least one request has images."""

    multimodal_inputs: Sequence[MultimodalInputs | None]
    """The images of each request, by row; None for a request without images."""

    def prompts_with_images(self) -> list[PromptPiece]:
        """Return the pieces of prompts with images that are computed in this step, in the order of the batch."""
        return [
            PromptPiece(row, int(self.seq_lens[row] - self.new_lens[row]), int(self.seq_lens[row]), inputs)
            for row, inputs in enumerate(self.multimodal_inputs[: self.num_prompts])
            if inputs is not None
        ]
