"""From chat messages with pictures to token ids with placeholders, and the pictures that they stand for.

The chat template writes one placeholder for each picture, wherever it stands among the texts. Here each of them becomes
as many as the vision tower will make embeddings; a video becomes its frames, each behind a text with its time. Nothing
is queued before all of it is known to be sound. New in this milestone: m1 knew texts only. SGLang:
`QwenVLImageProcessor.process_mm_data_async`; vLLM: `Qwen3VLMultiModalProcessor`; transformers: `Qwen3VLProcessor`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from m1_single_request.errors import InvalidPromptError, PromptTooLongError, shown
from m1_single_request.input_processor import Message, check_messages
from m1_single_request.trace_event import some
from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.models.qwen3_vl import MediaTokens
from m6_multimodal_pd.multimodal.inputs import (
    Modality,
    MultimodalDataItem,
    MultimodalInputs,
    Range,
    content_hash,
)
from m6_multimodal_pd.multimodal.media import MEDIA_KINDS
from m6_multimodal_pd.multimodal.mrope import Block, get_rope_index
from m6_multimodal_pd.multimodal.vision_processor import ProcessedItem


class ChatPrompt(list[int]):
    """The token ids of a conversation, which carry the pictures that their placeholders stand for.

    A prompt like any other list of ids; a slice of it, or `list(prompt)`, is a plain list, and has lost its pictures.
    """

    def __init__(self, token_ids: Sequence[int], multimodal_inputs: MultimodalInputs | None = None) -> None:
        super().__init__(token_ids)
        self.multimodal_inputs = multimodal_inputs


class TextTools(Protocol):
    """What m1's input processor does with texts."""

    tokenizer: Any
    max_model_len: int

    def render_chat(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class ReadsMedia(Protocol):
    """Whatever makes patches of a content part: see `MediaReader`."""

    options_key: bytes
    merge_size: int

    def process(self, part: Mapping[str, Any], what: str) -> ProcessedItem: ...


class MultimodalPrompts:
    """Makes prompts of conversations with pictures."""

    def __init__(
        self,
        *,
        text: TextTools,
        media: ReadsMedia,
        tokens: MediaTokens,
        config: MultimodalConfig,
    ) -> None:
        self.text, self.media, self.tokens, self.config = text, media, tokens, config
        image, video, start, end = (
            text.tokenizer.convert_ids_to_tokens(i)
            for i in (tokens.image, tokens.video, tokens.vision_start, tokens.vision_end)
        )
        self._image, self._frame = image, f"{start}{video}{end}"
        # A template writes a video's placeholder with its markers around it; each frame brings markers of its own.
        self._placeholder = re.compile(f"{re.escape(image)}|{re.escape(self._frame)}|{re.escape(video)}")

    def make(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> ChatPrompt:
        """The prompt of a conversation.

        Raises `InvalidPromptError`, `InvalidMediaError` for a picture, and `PromptTooLongError` if pictures alone leave
        no room for an answer.
        """
        check_messages(messages)
        parts = [
            (part, MEDIA_KINDS[part["type"]], f"{number} of message {index}")
            for index, message in enumerate(messages)
            for number, part in enumerate(media_parts(message))
        ]
        if len(parts) > self.config.max_items:
            raise InvalidMediaError(
                f"{len(parts)} images and videos are more than a request may bring: max_items={self.config.max_items}"
            )
        text = self.text.render_chat([as_template_sees(message) for message in messages], options)
        kinds = [self._kind(found.group()) for found in self._placeholder.finditer(text)]
        brought = [kind for _, kind, _ in parts]
        self._check_counts(kinds, brought)
        if not parts:
            return ChatPrompt(self.text.encode(text, add_special_tokens=False))
        items, num_tokens = [], 0
        for part, kind, name in parts:
            items.append(self.media.process(part, f"{kind.value} {name}"))
            num_tokens += sum(frame_tokens(items[-1], self.media.merge_size))
            self._check_length(num_tokens, len(items))  # here, because patches of many pictures may take much memory
        in_order = _by_kind(kinds, brought, items)
        return self._expanded(text, list(zip(kinds, in_order, strict=True)))

    def check(self, token_ids: Sequence[int], inputs: MultimodalInputs | None) -> None:
        """Refuse a prompt whose placeholders are not those of its pictures, or stand elsewhere than they were put, or
        whose pictures were prepared for another model (`InvalidPromptError`)."""
        if inputs is not None and inputs.options_key != self.media.options_key:
            raise InvalidPromptError(
                "the pictures of this prompt were prepared by an engine with another processor: make the prompt with "
                "chat_prompt() of this one"
            )
        found = [i for i, token_id in enumerate(token_ids) if token_id in (self.tokens.image, self.tokens.video)]
        ranges = [one for item in inputs.mm_items for one in item.offsets] if inputs is not None else []
        expected = [place for start, end in ranges for place in range(start, end)]
        if len(found) != len(expected):
            raise InvalidPromptError(
                f"the prompt has {len(found)} placeholder tokens for pictures ({self._image} or those of a video), and "
                f"the pictures that came with it need {len(expected)}: hand pictures in as parts of chat messages"
            )
        if found != expected:
            place, own = next(pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1])
            raise InvalidPromptError(
                f"the prompt was changed after chat_prompt() had made it: a picture's placeholder stands at {place}, "
                f"where {own} was its place; change the messages, and make the prompt anew"
            )

    def _check_length(self, num_tokens: int, num_items: int) -> None:
        """Refuse pictures whose placeholders alone are too many."""
        if num_tokens >= self.text.max_model_len:
            raise PromptTooLongError(
                f"the images and videos of the messages are {num_tokens:,} tokens, counted up to number {num_items}; "
                f"max_model_len is {self.text.max_model_len} for prompt and output together"
            )

    def _kind(self, placeholder: str) -> Modality:
        return Modality.IMAGE if placeholder == self._image else Modality.VIDEO

    def _check_counts(self, found: Sequence[Modality], brought: Sequence[Modality]) -> None:
        for kind in Modality:
            came, shown_as = brought.count(kind), found.count(kind)
            if came != shown_as:
                advice = "write none into a text" if came < shown_as else "it may show those of a user only"
                raise InvalidPromptError(
                    f"the messages bring {some(came, kind.value)}, and the prompt that the chat template made of them "
                    f"has {some(shown_as, 'placeholder')} for that: {advice}"
                )

    def _expanded(self, text: str, items: Sequence[tuple[Modality, ProcessedItem]]) -> ChatPrompt:
        """Put the placeholders of all items in their places."""
        coming = iter(items)
        # The texts between placeholders are tokenised together with what surrounds them, so frames are written out
        # before, and only then each placeholder repeated.
        written = self._placeholder.sub(lambda found: self._written(found.group(), next(coming)[1]), text)
        ids = self.text.encode(written, add_special_tokens=False)
        counts = [tokens for _, item in items for tokens in frame_tokens(item, self.media.merge_size)]
        token_ids, ranges = self._repeated(ids, counts)
        found, blocks, at = [], [], 0
        for kind, item in items:
            frames, rows, columns = item.grid_thw
            offsets = tuple(ranges[at : at + frames])
            at += frames
            found.append(self._item(kind, item, offsets))
            size = self.media.merge_size
            blocks += [Block(start, rows // size, columns // size) for start, _ in offsets]
        positions, delta = get_rope_index(len(token_ids), blocks)
        inputs = MultimodalInputs(
            mm_items=tuple(found),
            mrope_positions=positions,
            mrope_position_delta=delta,
            im_token_id=self.tokens.image,
            video_token_id=self.tokens.video,
            im_start_id=self.tokens.vision_start,
            im_end_id=self.tokens.vision_end,
            options_key=self.media.options_key,
        )
        return ChatPrompt(token_ids, inputs)

    def _written(self, placeholder: str, item: ProcessedItem) -> str:
        if self._kind(placeholder) is Modality.IMAGE:
            return placeholder
        return "".join(f"<{seconds:.1f} seconds>{self._frame}" for seconds in item.timestamps)

    def _repeated(self, ids: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[Range]]:
        """Each placeholder as often as `counts` has it, in order, and where it stands now."""
        token_ids: list[int] = []
        ranges: list[Range] = []
        for token_id in ids:
            if token_id in (self.tokens.image, self.tokens.video):
                count = counts[len(ranges)]
                ranges.append((len(token_ids), len(token_ids) + count))
                token_ids += [token_id] * count
            else:
                token_ids.append(token_id)
        assert len(ranges) == len(counts), "the tokenizer lost a placeholder"
        return token_ids, ranges

    def _item(self, kind: Modality, item: ProcessedItem, offsets: tuple[Range, ...]) -> MultimodalDataItem:
        content = content_hash(kind, item.feature, item.grid_thw, self.media.options_key)
        return MultimodalDataItem(
            modality=kind,
            offsets=offsets,
            feature=item.feature,
            grid_thw=item.grid_thw,
            hash=content,
            size=item.size,
        )


def media_parts(message: Message) -> list[Mapping[str, Any]]:
    """The pictures of a message, in order. Raises `InvalidPromptError` for a content that is none."""
    content = message.get("content")
    if isinstance(content, str):
        return []
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray | memoryview):
        raise InvalidPromptError(f"message {shown(message)} needs a content: a string, or a list of parts")
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind == "text":  # what is no string may answer with no bool, an array for one
            if not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
                raise InvalidPromptError(f"a text part is {{'type': 'text', 'text': ...}}, not {shown(part)}")
        elif isinstance(kind, str) and kind in MEDIA_KINDS:
            found.append(part)
        else:
            known = ", ".join(["text", *MEDIA_KINDS])
            raise InvalidPromptError(f"a part of a content has a type, one of {known}; this one is {shown(part)}")
    return found


def as_template_sees(message: Message) -> dict[str, Any]:
    """A message without its pixels: the template must know of each picture only where it stands."""
    content = message.get("content")
    if isinstance(content, str):
        return dict(message)
    assert content is not None
    parts = [dict(part) if part["type"] == "text" else {"type": MEDIA_KINDS[part["type"]].value} for part in content]
    return {**message, "content": parts}


def frame_tokens(item: ProcessedItem, merge_size: int) -> list[int]:
    """Placeholders of each frame; an image has one."""
    frames, rows, columns = item.grid_thw
    return [(rows // merge_size) * (columns // merge_size)] * frames


def _by_kind(
    kinds: Sequence[Modality], brought: Sequence[Modality], items: Sequence[ProcessedItem]
) -> list[ProcessedItem]:
    """The items in the order of their placeholders: the first image belongs to the first placeholder of an image."""
    waiting = {kind: iter([i for i, own in zip(items, brought, strict=True) if own is kind]) for kind in Modality}
    return [next(waiting[kind]) for kind in kinds]
