"""Conversations that cannot be seen, each with the error that says why, under narrow limits."""

import zlib
from typing import Any

import numpy as np
from PIL import Image

from m6_multimodal_pd import InvalidMediaError, InvalidPromptError, InvalidRequestError
from tests.m6_multimodal_pd.media_files import encoded
from tests.m6_multimodal_pd.seeing import SHOWN, asking, clip, parts, picture

LIMITS = {
    "max_items": 3,
    "max_image_pixels": 4096,
    "max_file_bytes": 4096,
    "max_video_frames": 8,
    "max_video_pixels": 4096,
    "embedding_cache_bytes": 30 * 768,
}


def png(width: int = 16, height: int = 16) -> bytes:
    """A file."""
    noise = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encoded(noise)


def image(source: Any, **more: Any) -> list[dict[str, Any]]:
    """A question about one picture."""
    return said({"type": "image", "image": source, **more}, *parts(1))


def video(source: Any, **more: Any) -> list[dict[str, Any]]:
    """A question about one clip."""
    return said({"type": "video", "video": source, **more}, *parts(1))


def said(*content: Any, role: str = "user") -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": role, "content": list(content)}]


def words(text: str, *more: Any) -> list[dict[str, Any]]:
    """A conversation that holds this text."""
    return said(*more, {"type": "text", "text": text})


def bomb() -> bytes:
    """A header that claims very many pixels."""
    content = bytearray(png())
    content[16:24] = (60_000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], type[InvalidRequestError], str]] = {
    # placeholders
    "a placeholder in a text": (words(IMAGE_PAD), InvalidPromptError, "have 0 images, .* has 1 placeholder for that"),
    "a placeholder too many": (
        words(IMAGE_PAD, SHOWN["a"]),
        InvalidPromptError,
        "have 1 image, .* has 2 placeholders",
    ),
    "a video's in a text": (words(f"<|vision_start|>{VIDEO_PAD}<|vision_end|>"), InvalidPromptError, "0 videos"),
    "one of another kind": (
        words(VIDEO_PAD, SHOWN["a"]),
        InvalidPromptError,
        "0 videos, .* write none into a text",
    ),
    "one of the system": (
        [{"role": "system", "content": f"You see {IMAGE_PAD}."}, *asking(1)],
        InvalidPromptError,
        "write none into a text",
    ),
    # limits
    "too many items": (asking("d", "d", "v", "d"), InvalidMediaError, "4 images and videos .* max_items=3"),
    "a large picture": (
        image(picture("l", 9, 8)),
        InvalidMediaError,
        "64x72 are 4,608 pixels, .* max_image_pixels=",
    ),
    "a bomb": (image(bomb()), InvalidMediaError, "too large to be decoded: .*3600000000 pixels"),
    "a large file": (image(png() + bytes(4096)), InvalidMediaError, "more than max_file_bytes=4,096"),
    "many frames": (video(clip("m", 9, 1, 1)), InvalidMediaError, "more than max_video_frames=8"),
    "large frames": (
        video(clip("m", 5, 4, 4), num_frames=5),
        InvalidMediaError,
        "5,120 pixels, more than max_video_pixels",
    ),
    "a picture for no cache": (image(picture("n", 8, 4)), InvalidMediaError, "32 tokens, .* has room for 30"),
    "a clip for no cache": (video(clip("n", 4, 4, 4)), InvalidMediaError, "32 x 32 pixels become 32 tokens"),
    "long and narrow": (image(Image.new("RGB", (2, 402))), InvalidMediaError, "2x402 is too long and narrow: .* 201.0"),
    # broken
    "a truncated file": (image(png()[:100]), InvalidMediaError, "image 0 of message 0: it cannot be decoded"),
    "a still as a video": (video(png()), InvalidMediaError, "still picture, not a video"),
    "one frame": (video(clip("o", 1, 1, 1)), InvalidMediaError, "1 frame is no video, 2 are needed"),
    # from elsewhere
    "a URL": (image("http://host/a.png"), InvalidMediaError, "http: URLs are refused; Multimodal"),
    "a URL of a video": (said({"type": "video_url", "video_url": "http://h/v"}), InvalidMediaError, "http: URLs are"),
    # parts and roles
    "an unknown type": (said({"type": "audio", "audio": b"x"}), InvalidPromptError, "one of text, image,.*'audio'"),
    "no type": (said({"image": png()}), InvalidPromptError, "a part of a content has a type"),
    "a type that is an array": (said({"type": np.zeros((9, 9))}), InvalidPromptError, "this one is .*'type': array"),
    "a part that is none": (said("text"), InvalidPromptError, "a part of a content has a type, .* this one is 'text'"),
    "a text's key": (said({"type": "text", "text": "a", "style": 1}), InvalidPromptError, "a text part is"),
    "a text that is none": (said({"type": "text", "text": 5}), InvalidPromptError, "a text part is"),
    "no content": ([{"role": "user"}], InvalidPromptError, "needs a content: a string, or a list of parts"),
    "a content of bytes": ([{"role": "user", "content": b"x"}], InvalidPromptError, "needs a content"),
    "no conversation": ([*asking("a"), "text"], InvalidPromptError, "messages must be a list of"),  # type: ignore[list-item]
    "a picture of the system": (said(SHOWN["a"], role="system"), InvalidPromptError, "'system' cannot show a part"),
    "a picture of the assistant": (
        [*asking(1), *said(SHOWN["a"], role="assistant"), *asking(2)],
        InvalidPromptError,
        "'assistant' cannot show a part",
    ),
    "the last of several": (asking("a", "v")[:1] + image(png()[:60]), InvalidMediaError, "image 0 of message 1"),
}
