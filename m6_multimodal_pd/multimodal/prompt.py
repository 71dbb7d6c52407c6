"""Step 4 of an image's way: from a conversation to token ids, in which placeholders stand for its images.

The chat template writes one placeholder for each image, wherever it stands among the texts. Here each is repeated once
for every embedding of its image; that of a video is replaced by its frames, each after a text with its time. No request
is queued before all images are checked. New in this milestone: m1 has texts only. SGLang:
`QwenVLImageProcessor.process_mm_data_async`; vLLM: `Qwen3VLMultiModalProcessor`; transformers: `Qwen3VLProcessor`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from m1_single_request.errors import InvalidPromptError, PromptTooLongError
from m1_single_request.input_processor import InputProcessor, Message, check_messages
from m1_single_request.trace_event import some
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.inputs import Modality, MultimodalInputs, Range
from m6_multimodal_pd.multimodal.media_parts import MEDIA_KINDS, media_parts, without_media
from m6_multimodal_pd.multimodal.media_reader import MediaReader
from m6_multimodal_pd.multimodal.mrope import Block, get_rope_index
from m6_multimodal_pd.multimodal.vision_processor import ProcessedItem


class ChatPrompt(list[int]):
    """The token ids of a conversation, with the images that their placeholders stand for.

    A prompt like any other list of ids; a slice of it, or `list(prompt)`, is a plain list without images.
    """

    def __init__(self, token_ids: Sequence[int], multimodal_inputs: MultimodalInputs | None = None) -> None:
        super().__init__(token_ids)
        self.multimodal_inputs = multimodal_inputs


class PromptDraft(NamedTuple):
    """A prompt whose images are not read: their sizes, and so their tokens, are unknown."""

    text: str
    """With one placeholder for each image."""
    kinds: Sequence[Modality]
    """Of the placeholders, in the order of the text."""
    parts: Sequence[tuple[Mapping[str, Any], str]]
    """The images and videos in the order of the messages, each with its name in errors."""


class MultimodalPrompts:
    """Makes prompts of conversations with images and videos."""

    def __init__(self, text: InputProcessor, media: MediaReader) -> None:
        self.text, self.media = text, media
        self.max_items, self.tokens = media.settings.config.max_items, media.settings.tokens
        tokens = self.tokens
        ids = [tokens.image, tokens.video, tokens.vision_start, tokens.vision_end]
        image, video, start, end = list(text.tokenizer.convert_ids_to_tokens(ids))
        self._image, self._frame = image, f"{start}{video}{end}"
        # A template writes a video's placeholder with its markers around it; each frame brings markers of its own.
        self._placeholder = re.compile(f"{re.escape(image)}|{re.escape(self._frame)}|{re.escape(video)}")

    def make(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> ChatPrompt:
        """Return the prompt of a conversation. `options` are for the chat template.

        Raises `InvalidPromptError`, `InvalidMediaError` for an image, and `PromptTooLongError` if images alone leave no
        room for an output token.
        """
        draft, items = self.draft(messages, options), list[ProcessedItem]()
        for part, name in draft.parts:
            items.append(self.media.process(part, name))
            self.check_room(items)  # here, because the patches of many images may take much memory
        return self.complete(draft, items)

    def draft(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> PromptDraft:
        """Return the prompt of a conversation whose images are not read yet. Raises `InvalidPromptError`, and
        `InvalidMediaError` for too many images."""
        check_messages(messages)
        parts = [
            (part, f"{MEDIA_KINDS[part['type']].value} {number} of message {index}")
            for index, message in enumerate(messages)
            for number, part in enumerate(media_parts(message))
        ]
        if len(parts) > self.max_items:
            raise InvalidMediaError(
                f"{len(parts)} images and videos are more than a request may have: max_items={self.max_items}"
            )
        text = self.text.render_chat([without_media(message) for message in messages], options)
        found = [placeholder.group() for placeholder in self._placeholder.finditer(text)]
        kinds = [Modality.IMAGE if placeholder == self._image else Modality.VIDEO for placeholder in found]
        self._check_counts(kinds, [MEDIA_KINDS[part["type"]] for part, _ in parts])
        return PromptDraft(text, kinds, parts)

    def complete(self, draft: PromptDraft, items: Sequence[ProcessedItem]) -> ChatPrompt:
        """Return the prompt of a draft, with the patches of its parts."""
        if not items:
            return ChatPrompt(self.text.encode(draft.text, add_special_tokens=False))
        coming = {kind: iter([made for made in items if made.item.modality is kind]) for kind in Modality}
        # the first image has the first place
        return self._expanded(draft.text, [next(coming[kind]) for kind in draft.kinds])

    def check_room(self, items: Sequence[ProcessedItem]) -> None:
        """Raise `PromptTooLongError` if the tokens of some items of a prompt alone leave no room for an output."""
        num_tokens = sum(made.layout.num_tokens for made in items)
        if num_tokens >= self.text.max_model_len:
            raise PromptTooLongError(
                f"the images and videos of the messages are {num_tokens:,} tokens, counted up to number {len(items)}; "
                f"max_model_len is {self.text.max_model_len} for prompt and output together"
            )

    def check(self, token_ids: Sequence[int], inputs: MultimodalInputs | None) -> None:
        """Raise `InvalidPromptError` for a prompt whose placeholders are not those of its images, or are at other
        indices than in the result of `make`, or whose images were processed for another model."""
        if inputs is not None and inputs.options_key != self.media.options_key:
            raise InvalidPromptError(
                "the images of this prompt were processed by an engine with other settings of its processor: make the "
                "prompt with chat_prompt() of this engine"
            )
        found = [i for i, token_id in enumerate(token_ids) if token_id in (self.tokens.image, self.tokens.video)]
        ranges = [one for item in inputs.mm_items for one in item.offsets] if inputs is not None else []
        expected = [place for start, end in ranges for place in range(start, end)]
        if len(found) != len(expected):
            raise InvalidPromptError(
                f"the prompt has {len(found)} placeholder tokens for images ({self._image} or those of a video), and "
                f"its images need {len(expected)}: pass images as parts of chat messages"
            )
        if found != expected:
            place, own = next(pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1])
            raise InvalidPromptError(
                f"the prompt was changed after chat_prompt() had made it: the placeholder of an image is token "
                f"{place}, and was token {own}; change the messages, and make the prompt again"
            )

    def _check_counts(self, found: Sequence[Modality], given: Sequence[Modality]) -> None:
        for kind in Modality:
            num_given, num_found = given.count(kind), found.count(kind)
            if num_given != num_found:
                advice = "write none into a text" if num_given < num_found else "it may render those of a user only"
                raise InvalidPromptError(
                    f"the messages have {some(num_given, kind.value)}, and the prompt that the chat template made of "
                    f"them has {some(num_found, 'placeholder')} for that: {advice}"
                )

    def _expanded(self, text: str, items: Sequence[ProcessedItem]) -> ChatPrompt:
        """Return the prompt with the placeholders of all items, which are in the order of their first ones in `text`.

        Texts between placeholders are tokenized together with what surrounds them; so the frames of a video are written
        into the text first, and only then each placeholder is repeated.
        """
        coming = iter(items)
        written = self._placeholder.sub(lambda _: self._written(next(coming)), text)
        ids = np.array(self.text.encode(written, add_special_tokens=False))
        token_ids, ranges = self._repeated(ids, [count for made in items for count in made.layout.frame_tokens])
        frames = iter(ranges)
        mm_items = tuple(replace(made.item, offsets=tuple(islice(frames, made.layout.grid_thw[0]))) for made in items)
        blocks = [
            Block(start, *made.layout.merged_hw)
            for made, item in zip(items, mm_items, strict=True)
            for start, _ in item.offsets
        ]
        positions, delta = get_rope_index(len(token_ids), blocks)
        return ChatPrompt(token_ids, MultimodalInputs(mm_items, positions, delta, self.media.options_key))

    def _written(self, made: ProcessedItem) -> str:
        if made.item.modality is Modality.IMAGE:
            return self._image
        return "".join(f"<{seconds:.1f} seconds>{self._frame}" for seconds in made.timestamps)

    def _repeated(self, ids: np.ndarray, counts: list[int]) -> tuple[list[int], list[Range]]:
        """Return token ids with the i-th placeholder repeated `counts[i]` times, and the range of each."""
        places = np.flatnonzero(np.isin(ids, [self.tokens.image, self.tokens.video]))
        assert len(places) == len(counts), "the tokenizer lost a placeholder"
        repeats = np.ones_like(ids)
        repeats[places] = counts
        ends = np.cumsum(repeats)[places]
        return np.repeat(ids, repeats).tolist(), list(zip((ends - counts).tolist(), ends.tolist(), strict=True))
