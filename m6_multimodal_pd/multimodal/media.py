"""What a user hands in as a picture or a video becomes pixels here, and nothing that is not one gets past.

m1 to m5 know text only. From here on a message's content may be a list of parts, and this file takes the parts that are
not text, in the forms that the chat templates and OpenAI's interface have. Every key must be known: a misspelt option
is an error, never silence. Where bytes come from is `sources.py`, how one picture is decoded `pictures.py`, how frames
are sampled `video.py`; all of them check `MultimodalConfig`'s limits before they decode. vLLM: `multimodal/media` and
`entrypoints/chat_utils.py`; SGLang: `load_mm_data` of the `BaseMultimodalProcessor`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from m1_single_request.errors import shown
from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.inputs import Modality
from m6_multimodal_pd.multimodal.pictures import Pixels, load_pixels
from m6_multimodal_pd.multimodal.sources import read_url
from m6_multimodal_pd.multimodal.video import OPTIONS, Frames, FrameSampling, VideoLoader, VideoOptions

MEDIA_KINDS = {
    "image": Modality.IMAGE,
    "image_url": Modality.IMAGE,
    "video": Modality.VIDEO,
    "video_url": Modality.VIDEO,
}
"""The types of parts that are media. The media stands under a key of the same name."""
MEDIA_OPTIONS: dict[Modality, tuple[str, ...]] = {Modality.IMAGE: (), Modality.VIDEO: OPTIONS}
"""Keys that may stand beside it."""


@dataclass(frozen=True)
class Picture:
    """One still image."""

    pixels: Pixels
    """uint8, [height, width, 3], RGB."""


class MediaLoader:
    """Makes typed media of the parts of chat messages, one at a time. It keeps nothing of them."""

    def __init__(self, config: MultimodalConfig, sampling: FrameSampling) -> None:
        """`sampling`: how the model's processor samples a video of which a request says nothing."""
        self.config = config
        self._videos = VideoLoader(config, sampling)

    def load(self, part: Mapping[str, Any], what: str | None = None) -> Picture | Frames:
        """The media of one part; `what` names it in errors, such as "image 2 of message 0".

        Taken are `{"type": "image", "image": ...}`, `{"type": "image_url", "image_url": URL or {"url": URL}}`, the same
        with `video`, and beside a video `video_fps`, and `fps` or `num_frames`. A bare path is never taken as a URL.
        Of an animation that is given as an image, the first frame counts.

        Raises `InvalidMediaError`, and nothing else, whatever is handed in.
        """
        kind = check_part(part)
        modality = MEDIA_KINDS[kind]
        what = what or modality.value
        source = part[kind]
        if kind.endswith("_url"):
            source = read_url(_url_of(source, kind, what), self.config, what)
        if modality is Modality.IMAGE:
            return Picture(load_pixels(source, self.config, what))
        return self._videos.load(source, VideoOptions.of(part, what), what)


def check_part(part: object) -> str:
    """The type of a part that is media. Raises `InvalidMediaError` unless it has exactly the keys of its type."""
    if not isinstance(part, Mapping):
        raise InvalidMediaError(f"{shown(part)} is no part of a message; give a dict such as {{'type': 'image', ...}}")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in MEDIA_KINDS:
        raise InvalidMediaError(f"type={shown(kind)} of a part is not known; known are {', '.join(MEDIA_KINDS)}")
    known = ("type", kind, *MEDIA_OPTIONS[MEDIA_KINDS[kind]])
    for key in part:
        if key not in known:
            raise InvalidMediaError(f"{shown(key)} in a part of type {kind} is not known; known are {', '.join(known)}")
    if part.get(kind) is None:
        raise InvalidMediaError(f"a part of type {kind} lacks its {kind!r}")
    return kind


def _url_of(value: object, kind: str, what: str) -> str:
    if isinstance(value, Mapping):
        if set(value) != {"url"}:
            raise InvalidMediaError(f"{what}: {kind} has the keys {shown(list(value))}; known is only 'url'")
        value = value["url"]
    if not isinstance(value, str):
        raise InvalidMediaError(f"{what}: {kind}={shown(value)} must be a URL or {{'url': URL}}")
    return value
