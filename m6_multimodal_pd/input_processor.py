"""Input processor for prompts with images: messages may have them, and an image that cannot be used is rejected here.

m5's intake checks texts and token ids, those of such prompts too. Before that, `multimodal/prompt.py` replaces images
by placeholders; after it, each request gets the images of its prompt. If other processes read the images, a request is
built twice: `process_request` checks everything but the images, and `completed` builds the request that runs. SGLang:
`TokenizerManager` with its `mm_processor`; vLLM: `InputProcessor` with its `MultiModalProcessor`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.errors import InvalidPromptError, InvalidRequestError
from m1_single_request.input_processor import Message, Prompt, check_messages
from m1_single_request.model_loader import ModelDescription
from m1_single_request.request import Request
from m1_single_request.sampling_params import SamplingParams
from m3_paged_attention.request import ParentRequest
from m5_chunked_prefill_spec.input_processor import InputProcessor as TextInputProcessor
from m6_multimodal_pd.multimodal.inputs import MultimodalInputs, PadValues
from m6_multimodal_pd.multimodal.media_parts import media_parts, without_media
from m6_multimodal_pd.multimodal.media_pool import MediaJob
from m6_multimodal_pd.multimodal.media_reader import MediaReader
from m6_multimodal_pd.multimodal.prompt import ChatPrompt, MultimodalPrompts
from m6_multimodal_pd.multimodal.vision_processor import ProcessedItem
from m6_multimodal_pd.request import Req, UnreadMedia


class InputProcessor(TextInputProcessor):
    """m5's input processor; `process_request` and `apply_chat_template` also take images and videos."""

    def __init__(
        self,
        *,
        request_class: type[Req],
        detokenizer_class: type[IncrementalDetokenizer],
        loaded_model: ModelDescription,
        seed: int,
        max_num_batched_tokens: int | None,
        max_total_tokens: int,
        media: MediaReader | None,
        guesses_texts_only: bool,
    ) -> None:
        """`media`: None for a model without vision. `guesses_texts_only`: the draft model has no vision."""
        super().__init__(
            request_class=request_class,
            detokenizer_class=detokenizer_class,
            loaded_model=loaded_model,
            seed=seed,
            max_num_batched_tokens=max_num_batched_tokens,
            max_total_tokens=max_total_tokens,
        )
        self.guesses_texts_only = guesses_texts_only
        self.pad_values = PadValues(self.vocab_size)
        self.prompts = None if media is None else MultimodalPrompts(self, media)

    def process_request(self, request_id: str, prompt: Prompt, params: SamplingParams, **options: Any) -> Request:
        """Build a request as m1 does; a prompt may also be messages, or the result of `apply_chat_template`.

        Raises a subclass of `InvalidRequestError`.
        """
        unread = None
        if is_conversation(prompt):
            prompt, unread = self._without_reading(prompt, params, options)
        inputs = prompt.multimodal_inputs if isinstance(prompt, ChatPrompt) else None
        if (inputs or unread) and self.guesses_texts_only and options.get("speculate", True):
            raise InvalidRequestError(
                "the draft model has no vision tower: a request with images needs speculate=False, or an engine with "
                "SpeculativeConfig(method='ngram')"
            )
        request = super().process_request(request_id, prompt, params, **options)
        children = children_of(request)
        if unread is None:
            self._add_images(children, inputs)
        else:
            for child in children:
                child.unread = unread
        return request

    def _without_reading(
        self, messages: Sequence[Message], params: SamplingParams, options: Mapping[str, Any]
    ) -> tuple[list[int], UnreadMedia | None]:
        """Return the prompt of a conversation, and None; or, if other processes read its images, the prompt with one
        placeholder for each, and the images."""
        if self.prompts is None or not self.prompts.media.settings.config.num_media_processes:
            return self.apply_chat_template(messages), None
        draft = self.prompts.draft(messages)
        unread = self.prompts.media.loader.unread
        jobs = [MediaJob.of(unread(part, what), what) for part, what in draft.parts]
        return self.prompts.complete(draft, []), UnreadMedia(draft, jobs, params, options) if jobs else None

    def completed(self, request: Request) -> Request | None:
        """Return the request that takes the place of one with unread images; None while one of them has no result.

        Raises the error of an image that cannot be used, and of a prompt that is too long, as `process_request`.
        """
        unread: UnreadMedia = children_of(request)[0].unread
        items: list[ProcessedItem] = []
        for job in unread.jobs:
            if isinstance(job.result, Exception):
                raise job.result
            if job.result is not None:
                items.append(job.result)
        assert self.prompts is not None, "a model without vision has no images"
        self.prompts.check_room(items)
        if len(items) < len(unread.jobs):
            return None
        prompt = self.prompts.complete(unread.draft, items)
        whole = self.process_request(request.request_id, prompt, unread.params, **unread.options)
        whole.final_only = request.final_only
        return whole

    def apply_chat_template(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of a conversation up to the assistant's answer, with its images (`ChatPrompt`).

        A content is a string, or a list of parts: texts, images, videos. Raises `InvalidPromptError`, and
        `InvalidMediaError` for an image that cannot be used.
        """
        if self.prompts is not None:
            return self.prompts.make(messages, options)
        check_messages(messages)
        num_media = sum(len(media_parts(message)) for message in messages)
        if num_media:
            raise InvalidPromptError(f"the messages have {num_media} images or videos, and this model takes texts only")
        return super().apply_chat_template([_as_text(message) for message in messages], options)

    def _add_images(self, requests: Sequence[Any], inputs: MultimodalInputs | None) -> None:
        """Check the placeholders of requests for one prompt, and give the requests its images."""
        token_ids = requests[0].sequence.prompt_token_ids
        if self.prompts is not None:
            self.prompts.check(token_ids, inputs)
        elif inputs is not None:
            raise InvalidPromptError("the prompt has images or videos, and this model takes texts only")
        if inputs is not None:
            inputs = inputs.of_length(len(token_ids)).with_pad_values(self.pad_values)
            for request in requests:
                assert isinstance(request, Req), "the part `request` must be a Req"
                request.multimodal_inputs = inputs


def children_of(request: Request) -> list[Any]:
    """Return the requests that a scheduler gets for `request`: itself, or `n` of them."""
    return request.children if isinstance(request, ParentRequest) else [request]


def is_conversation(prompt: Any) -> TypeGuard[Sequence[Message]]:
    """Return whether a prompt is a list of messages; only its first entry is checked."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _as_text(message: Message) -> dict[str, Any]:
    """Return a message for a template that takes strings only."""
    content = without_media(message)["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return {**message, "content": text}
