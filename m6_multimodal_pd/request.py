"""A request that may hold pictures.

m4's, under a key in which every picture is known by its content. What goes through the model, what is detokenised and
what n-grams are looked for in are the placeholders, as they stand in the vocabulary. SGLang: `Req` with
`multimodal_inputs`, whose `origin_input_ids` hold the pad values themselves and are clamped for the embedding.
"""

from collections.abc import Sequence

from m1_single_request.trace_event import Event
from m4_radix_cache.request import Req as TextReq
from m6_multimodal_pd.events import item_events
from m6_multimodal_pd.multimodal.inputs import MultimodalInputs


class Req(TextReq):
    """m4's request, with its pictures."""

    multimodal_inputs: MultimodalInputs | None

    @property
    def prompt_key_ids(self) -> Sequence[int]:
        """Its prompt as the prefix cache knows it."""
        inputs, token_ids = self.multimodal_inputs, self.origin_input_ids
        return token_ids if inputs is None else inputs.padded(token_ids)

    def arrival_events(self) -> list[Event]:
        """As m4's, and what it brings."""
        inputs = self.multimodal_inputs
        return super().arrival_events() + ([] if inputs is None else item_events(self.rid, inputs))
