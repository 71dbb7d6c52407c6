"""Intake for prompts with pictures: messages may hold them, and anything that cannot be seen is refused here.

m5's intake takes texts and token ids, and still does all that there is to do with them. In front of it stands what
makes placeholders of pictures (`multimodal/prompt.py`); behind it, each request is handed the pictures of its prompt.
SGLang: `TokenizerManager` with its `mm_processor`; vLLM: `InputProcessor` with its `MultiModalProcessor`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.errors import InvalidPromptError, InvalidRequestError
from m1_single_request.input_processor import Message, Prompt, check_messages
from m1_single_request.request import Request
from m1_single_request.sampling_params import SamplingParams
from m3_paged_attention.request import ParentRequest
from m5_chunked_prefill_spec.input_processor import InputProcessor as TextInputProcessor
from m5_chunked_prefill_spec.request import Req
from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.models.qwen3_vl import MediaTokens
from m6_multimodal_pd.multimodal.inputs import PadValues
from m6_multimodal_pd.multimodal.prompt import (
    ChatPrompt,
    MultimodalPrompts,
    ReadsMedia,
    as_template_sees,
    media_parts,
)


@dataclass(frozen=True)
class Sight:
    """What intake must know of a model that sees."""

    media: ReadsMedia
    tokens: MediaTokens
    config: MultimodalConfig


class InputProcessor:
    """m5's, with pictures."""

    def __init__(
        self,
        *,
        request_class: type[Req],
        detokenizer_class: type[IncrementalDetokenizer],
        loaded_model: Any,
        seed: int,
        max_num_batched_tokens: int | None,
        max_total_tokens: int,
        sight: Sight | None,
        guesses_texts_only: bool,
    ) -> None:
        """`sight`: None for a model that takes texts only. `guesses_texts_only`: the draft model cannot see."""
        self.text = TextInputProcessor(
            request_class=request_class,
            detokenizer_class=detokenizer_class,
            loaded_model=loaded_model,
            seed=seed,
            max_num_batched_tokens=max_num_batched_tokens,
            max_total_tokens=max_total_tokens,
        )
        self.tokenizer, self.max_model_len = self.text.tokenizer, self.text.max_model_len
        self.guesses_texts_only = guesses_texts_only
        self.pad_values = PadValues(self.text.vocab_size)
        self.prompts: MultimodalPrompts | None = None
        if sight is not None:
            self.prompts = MultimodalPrompts(
                text=self.text,
                media=sight.media,
                tokens=sight.tokens,
                config=sight.config,
            )

    def process_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        number: int,
        arrival_time: float,
        **options: Any,
    ) -> Request:
        """As m1's; a prompt may also be messages, or what `apply_chat_template` made of them.

        Raises a child of `InvalidRequestError`.
        """
        if is_conversation(prompt):
            prompt = self.apply_chat_template(prompt)
        inputs = prompt.multimodal_inputs if isinstance(prompt, ChatPrompt) else None
        if inputs is not None and self.guesses_texts_only and options.get("speculate", True):
            raise InvalidRequestError(
                "the draft model cannot see: a request with pictures must come with speculate=False, or the engine "
                "must guess with method='ngram'"
            )
        request = self.text.process_request(
            request_id, prompt, params, number=number, arrival_time=arrival_time, **options
        )
        children = request.children if isinstance(request, ParentRequest) else [request]
        token_ids = children[0].sequence.prompt_token_ids
        if self.prompts is not None:
            self.prompts.check(token_ids, inputs)
        elif inputs is not None:
            raise InvalidPromptError("the prompt brings images or videos, and this model takes texts only")
        if inputs is not None:
            inputs = inputs.of_length(len(token_ids)).taken_in(self.pad_values)
            for child in children:
                assert isinstance(child, Req), "the part `request` must be a Req"
                child.multimodal_inputs = inputs
        return request

    def apply_chat_template(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> list[int]:
        """The token ids of a conversation, ready for the assistant's answer; they carry its pictures (`ChatPrompt`).

        A content is a string, or a list of parts: texts, images, videos. Raises `InvalidPromptError`, and
        `InvalidMediaError` for a picture that cannot be taken.
        """
        if self.prompts is not None:
            return self.prompts.make(messages, options)
        check_messages(messages)
        brought = [part for message in messages for part in media_parts(message)]
        if brought:
            raise InvalidPromptError(
                f"the messages bring {len(brought)} images or videos, and this model takes texts only"
            )
        return self.text.apply_chat_template([_as_text(message) for message in messages], options)


def is_conversation(prompt: Any) -> TypeGuard[Sequence[Message]]:
    """Whether a prompt is a list of messages: of any other one only the first entry is looked at."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _as_text(message: Message) -> dict[str, Any]:
    """For a template that knows strings only."""
    content = as_template_sees(message)["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return {**message, "content": text}
