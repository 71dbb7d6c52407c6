"""Make outputs, and merge the continuations of one prompt into one output.

New in m3: a request may have several continuations. Each has its own text, log-probabilities and end; the caller gets
them together, in the order of their numbers. vLLM: `ParentRequest.get_outputs` in `v1/engine/parallel_sampling.py`.
"""

from msgspec.structs import replace

from m1_single_request.output_processor import OutputProcessor as SingleRequestOutputProcessor
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import Request
from m3_paged_attention.request import ParentRequest


class OutputProcessor(SingleRequestOutputProcessor):
    """m1's, with a `make_output` that merges the continuations of a parent."""

    def make_output(self, request: Request) -> RequestOutput:
        """Return the output of `request` as of now; of a parent with one completion for each child."""
        output = super().make_output(request)
        if not isinstance(request, ParentRequest):
            return output
        completions = tuple(replace(self._completion(child), index=i) for i, child in enumerate(request.children))
        metrics = replace(output.metrics, num_output_tokens=sum(len(each.token_ids) for each in completions))
        return replace(output, outputs=completions, metrics=metrics)
