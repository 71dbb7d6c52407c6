"""Steps 1 to 3 of an image's way in one call: from a part of a message to the patches of one model.

vLLM and SGLang do the same in their multimodal processors.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from m1_single_request.errors import is_unicode
from m1_single_request.trace_event import some
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.config import MultimodalConfig
from m6_multimodal_pd.multimodal.decode_image import Picture, load_pixels
from m6_multimodal_pd.multimodal.decode_video import Frames, FrameSampling, VideoLoader, VideoOptions
from m6_multimodal_pd.multimodal.fetch import check_bytes, check_url, read_url, scheme_of
from m6_multimodal_pd.multimodal.inputs import Modality
from m6_multimodal_pd.multimodal.media_parts import MEDIA_KINDS, check_part, url_of
from m6_multimodal_pd.multimodal.media_settings import MediaSettings
from m6_multimodal_pd.multimodal.vision_processor import ProcessedItem, VisionProcessor


class MediaLoader:
    """Loads the pixels of media parts, one part at a time, and keeps nothing of them."""

    def __init__(self, config: MultimodalConfig, sampling: FrameSampling) -> None:
        """`sampling`: the model's own, for a video without options."""
        self.config = config
        self._videos = VideoLoader(config, sampling)

    def load(self, part: Mapping[str, Any], what: str | None = None) -> Picture | Frames:
        """Return the pixels of one part; `what` names it in errors, such as "image 2 of message 0".

        Accepted are `{"type": "image", "image": ...}`, `{"type": "image_url", "image_url": URL or {"url": URL}}`, the
        same with `video`, and beside a video `video_fps`, and `fps` or `num_frames`. A path is never taken for a URL.
        An animation that is given as an image is its first frame.

        Raises `InvalidMediaError`, and nothing else, for any value.
        """
        kind = check_part(part)
        modality = MEDIA_KINDS[kind]
        what = what or modality.value
        source = part[kind]
        if kind.endswith("_url"):
            source = read_url(url_of(source, kind, what), self.config, what)
        if modality is Modality.IMAGE:
            return Picture(load_pixels(source, self.config, what))
        return self._videos.load(source, VideoOptions.of(part, what), what)

    def unread(self, part: Mapping[str, Any], what: str) -> dict[str, Any] | Picture | Frames:
        """Check a part without reading it, and return it for another process: a source of text, bytes or paths stays
        unread. Of any other source, an array or a PIL image for example, return the pixels: only this process has them.

        Raises `InvalidMediaError` for wrong keys and options, a URL that is not allowed, and pixels.
        """
        kind = check_part(part)
        source = part[kind]
        if MEDIA_KINDS[kind] is Modality.VIDEO:
            VideoOptions.of(part, what)
        if kind.endswith("_url"):
            source = url_of(source, kind, what)
        if isinstance(source, str) and (kind.endswith("_url") or scheme_of(source) is not None):
            check_url(source, self.config, what)
        elif isinstance(source, bytes | bytearray | memoryview):
            check_bytes(memoryview(source).nbytes, self.config, what)
            source = bytes(source)
        elif isinstance(source, list | tuple) and all(map(_is_path, source)):
            source = [os.path.abspath(each) for each in source]
        elif _is_path(source):
            source = os.path.abspath(source)  # another process may have another working directory
        else:
            return self.load(part, what)
        return {**part, kind: source}


def _is_path(source: object) -> TypeGuard[str | Path]:
    """Return whether this is a path that a message can have."""
    if isinstance(source, str) and (source == "" or scheme_of(source) is not None):
        return False
    return isinstance(source, str | Path) and is_unicode(str(source))


class MediaReader:
    """Makes patches of media parts as one model's processor does, and keeps nothing of them."""

    def __init__(self, *, settings: MediaSettings) -> None:
        self.settings = settings
        self.processor = VisionProcessor(settings.image, settings.video)
        self.loader = MediaLoader(settings.config, settings.video.sampling)
        self.options_key = self.processor.options_key
        """All settings of the processor, as a key: see `VisionProcessor.options_key`."""

    def process(self, part: Mapping[str, Any] | Picture | Frames, what: str) -> ProcessedItem:
        """Return the patches of an image or a video, or of the pixels of one. `what` names it in errors.

        Raises `InvalidMediaError` for any value that is not one.
        """
        media = part if isinstance(part, Picture | Frames) else self.loader.load(part, what)
        num_tokens = self.processor.layout(media, what).num_tokens
        if num_tokens > self.settings.max_item_tokens:  # now, because what follows may take much memory
            height, width = media.pixels.shape[-3:-1]
            raise InvalidMediaError(
                f"{what}: {width} x {height} pixels become {some(num_tokens, 'token')}, and the cache for their "
                f"embeddings has room for {self.settings.max_item_tokens:,}: raise embedding_cache_bytes, or lower "
                f"max_pixels"
            )
        return self.processor.process(media, what)
