"""Conversations that cannot be seen, each with the error that says why, under narrow limits.

One of each way in which they are refused; all that is wrong with a picture or a clip: `test_media.py`, `test_video.py`,
`test_media_sources.py`, `test_vision_processor.py`.
"""

from typing import Any

import numpy as np

from m6_multimodal_pd import InvalidMediaError, InvalidPromptError, InvalidRequestError
from tests.m6_multimodal_pd.media_files import encoded
from tests.m6_multimodal_pd.seeing import SHOWN, asking, clip, parts, picture

LIMITS = {"max_items": 3, "max_image_pixels": 4096, "max_video_frames": 8, "embedding_cache_bytes": 30 * 768}
PNG = encoded(np.random.default_rng(256).integers(0, 256, (16, 16, 3), dtype=np.uint8))


def image(source: Any) -> list[dict[str, Any]]:
    """A question about one picture."""
    return said({"type": "image", "image": source}, *parts(1))


def video(source: Any) -> list[dict[str, Any]]:
    """A question about one clip."""
    return said({"type": "video", "video": source}, *parts(1))


def said(*content: Any, role: str = "user") -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": role, "content": list(content)}]


def words(text: str, *more: Any) -> list[dict[str, Any]]:
    """A conversation that holds this text."""
    return said(*more, {"type": "text", "text": text})


IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
OF_THE_SYSTEM = [{"role": "system", "content": f"You see {IMAGE_PAD}."}, *asking(1)]
OF_THE_ASSISTANT = [*asking(1), *said(SHOWN["a"], role="assistant"), *asking(2)]
Refused = dict[str, tuple[list[dict[str, Any]], str]]
PROMPTS: Refused = {
    # placeholders
    "a placeholder in a text": (words(IMAGE_PAD), "have 0 images, .* has 1 placeholder for that"),
    "a placeholder too many": (words(IMAGE_PAD, SHOWN["a"]), "have 1 image, .* has 2 placeholders"),
    "a video's in a text": (words(f"<|vision_start|>{VIDEO_PAD}<|vision_end|>"), "0 videos"),
    "one of another kind": (words(VIDEO_PAD, SHOWN["a"]), "0 videos, .* write none into a text"),
    "one of the system": (OF_THE_SYSTEM, "write none into a text"),
    # parts and roles
    "an unknown type": (said({"type": "audio", "audio": b"x"}), "one of text, image,.*'audio'"),
    "no type": (said({"image": PNG}), "a part of a content has a type"),
    "a type that is an array": (said({"type": np.zeros((9, 9))}), "this one is .*'type': array"),
    "a part that is none": (said("text"), "a part of a content has a type, .* this one is 'text'"),
    "a text's key": (said({"type": "text", "text": "a", "style": 1}), "a text part is"),
    "a text that is none": (said({"type": "text", "text": 5}), "a text part is"),
    "no content": ([{"role": "user"}], "needs a content: a string, or a list of parts"),
    "a content of bytes": ([{"role": "user", "content": b"x"}], "needs a content"),
    "no conversation": ([*asking("a"), "text"], "messages must be a list of"),  # type: ignore[list-item]
    "a picture of the system": (said(SHOWN["a"], role="system"), "'system' cannot show a part"),
    "a picture of the assistant": (OF_THE_ASSISTANT, "'assistant' cannot show a part"),
}
MEDIA: Refused = {
    "too many items": (asking("d", "d", "v", "d"), "4 images and videos .* max_items=3"),
    "a large picture": (image(picture("l", 9, 8)), "64x72 are 4,608 pixels, .* max_image_pixels="),
    "many frames": (video(clip("m", 9, 1, 1)), "more than max_video_frames=8"),
    "a picture for no cache": (image(picture("n", 8, 4)), "32 tokens, .* has room for 30"),
    "a clip for no cache": (video(clip("n", 4, 4, 4)), "32 x 32 pixels become 32 tokens"),
    "one frame": (video(clip("o", 1, 1, 1)), "1 frame is no video, 2 are needed"),
    "a truncated file": (image(PNG[:100]), "image 0 of message 0: it cannot be decoded"),
    "the last of several": (asking("a", "v")[:1] + image(PNG[:60]), "image 0 of message 1"),
    "a URL": (image("http://host/a.png"), "http: URLs are refused; Multimodal"),
    "a URL of a video": (said({"type": "video_url", "video_url": "http://h/v"}), "http: URLs are"),
}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], type[InvalidRequestError], str]] = {
    **{name: (messages, InvalidMediaError, why) for name, (messages, why) in MEDIA.items()},
    **{name: (messages, InvalidPromptError, why) for name, (messages, why) in PROMPTS.items()},
}
