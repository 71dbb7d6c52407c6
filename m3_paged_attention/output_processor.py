"""Makes outputs, and merges the continuations of one prompt into one.

New in m3: a request may have several continuations. Each has its own text, log-probabilities and end; the caller gets
them together, in the order of their numbers. vLLM: `ParentRequest.get_outputs` in `v1/engine/parallel_sampling.py`.
"""

from m1_single_request.output_processor import OutputProcessor as SingleRequestOutputProcessor
from m1_single_request.outputs import CompletionOutput
from m1_single_request.request import Request
from m3_paged_attention.request import ParentRequest


class OutputProcessor(SingleRequestOutputProcessor):
    """m1's, with one entry of `completions` for each continuation of a request."""

    def completions(self, request: Request) -> tuple[CompletionOutput, ...]:
        """One for each child of a parent, one for any other request."""
        if isinstance(request, ParentRequest):
            return tuple(self.completion(child, index=index) for index, child in enumerate(request.children))
        return super().completions(request)
