"""From a part of a message to patches, in one call: what intake knows of pictures.

`media.py` takes the part and its limits, `vision_processor.py` what the model wants to see. vLLM and SGLang do both in
their multimodal processors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m1_single_request.trace_event import some
from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.media import MediaLoader
from m6_multimodal_pd.multimodal.processor_settings import VisionShape
from m6_multimodal_pd.multimodal.vision_processor import ProcessedItem, VisionProcessor


class MediaReader:
    """Reads images and videos as one model sees them. It keeps nothing of them."""

    def __init__(
        self, *, name: str | Path, config: MultimodalConfig, vision: VisionShape, max_item_tokens: int
    ) -> None:
        """`name`: the model's directory or hub id; `vision`: its `vision_config`; `max_item_tokens`: the largest item
        whose embeddings fit into their cache.

        Raises `ModelLoadError` for a directory without a processor that fits, `ConfigError` for limits that contradict
        each other.
        """
        self.processor = VisionProcessor.from_directory(name, config, vision)
        self.loader = MediaLoader(config, self.processor.sampling)
        self.max_item_tokens = max_item_tokens
        self.options_key = self.processor.options_key
        """All settings that change what is made of the same pixels."""
        self.merge_size: int = vision.spatial_merge_size
        """The side of the square of patches that becomes one token."""

    def process(self, part: Mapping[str, Any], what: str) -> ProcessedItem:
        """The patches of an image or a video, and how they lie. `what` names it in errors.

        Raises `InvalidMediaError`, whatever is handed in.
        """
        media = self.loader.load(part, what)
        num_tokens = self.processor.layout(media, what).num_tokens
        if num_tokens > self.max_item_tokens:  # now, because what follows may take much memory
            height, width = media.pixels.shape[-3:-1]
            raise InvalidMediaError(
                f"{what}: {width} x {height} pixels become {some(num_tokens, 'token')}, and the cache for their "
                f"embeddings has room for {self.max_item_tokens:,}: raise embedding_cache_bytes, or lower max_pixels"
            )
        return self.processor.process(media, what)
