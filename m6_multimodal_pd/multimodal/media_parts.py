"""Step 1 of an image's way: a part of a chat message, which names an image or a video.

In m1 to m5 the content of a message is text. From here on it may be a list of parts, in the forms of the chat templates
and of OpenAI's interface. Every key must be known: a misspelt option is an error. vLLM: `entrypoints/chat_utils.py`;
SGLang: `load_mm_data` of the `BaseMultimodalProcessor`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from m1_single_request.errors import InvalidPromptError, shown
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.inputs import Modality

Message = Mapping[str, Any]
"""As m1's, whose file imports torch."""
MEDIA_KINDS = {
    "image": Modality.IMAGE,
    "image_url": Modality.IMAGE,
    "video": Modality.VIDEO,
    "video_url": Modality.VIDEO,
}
"""The types of parts that are media. The media stands under a key of the same name."""
VIDEO_OPTIONS = ("video_fps", "fps", "num_frames")
"""Keys that may stand beside a video."""


def media_parts(message: Message) -> list[Mapping[str, Any]]:
    """Return the images and videos of a message, in order. Raises `InvalidPromptError` for an invalid content."""
    content = message.get("content")
    if isinstance(content, str):
        return []
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray | memoryview):
        raise InvalidPromptError(f"message {shown(message)} needs a content: a string, or a list of parts")
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind == "text":  # an array that is compared with a string gives no bool
            if not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
                raise InvalidPromptError(f"a text part is {{'type': 'text', 'text': ...}}, not {shown(part)}")
        elif isinstance(kind, str) and kind in MEDIA_KINDS:
            found.append(part)
        else:
            known = ", ".join(["text", *MEDIA_KINDS])
            raise InvalidPromptError(f"a part of a content has a type, one of {known}; this one is {shown(part)}")
    return found


def without_media(message: Message) -> dict[str, Any]:
    """Return a message for the chat template, which needs only the place of each image."""
    content = message.get("content")
    if isinstance(content, str):
        return dict(message)
    assert content is not None
    parts = [dict(part) if part["type"] == "text" else {"type": MEDIA_KINDS[part["type"]].value} for part in content]
    return {**message, "content": parts}


def check_part(part: object) -> str:
    """Return the type of a media part. Raises `InvalidMediaError` unless it has exactly the keys of its type."""
    if not isinstance(part, Mapping):
        raise InvalidMediaError(f"{shown(part)} is no part of a message; give a dict such as {{'type': 'image', ...}}")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in MEDIA_KINDS:
        raise InvalidMediaError(f"type={shown(kind)} of a part is not known; known are {', '.join(MEDIA_KINDS)}")
    known = ("type", kind, *(VIDEO_OPTIONS if MEDIA_KINDS[kind] is Modality.VIDEO else ()))
    for key in part:
        if key not in known:
            raise InvalidMediaError(f"{shown(key)} in a part of type {kind} is not known; known are {', '.join(known)}")
    if part.get(kind) is None:
        raise InvalidMediaError(f"a part of type {kind} lacks its {kind!r}")
    return kind


def url_of(value: object, kind: str, what: str) -> str:
    """Return the URL of a part of type `kind`: the string, or that of `{"url": URL}`."""
    if isinstance(value, Mapping):
        if set(value) != {"url"}:
            raise InvalidMediaError(f"{what}: {kind} has the keys {shown(list(value))}; known is only 'url'")
        value = value["url"]
    if not isinstance(value, str):
        raise InvalidMediaError(f"{what}: {kind}={shown(value)} must be a URL or {{'url': URL}}")
    return value
