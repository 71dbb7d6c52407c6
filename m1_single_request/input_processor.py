"""Input processor: tokenize a user's prompt, check it and its parameters, and build the `Request`.

A request that can never run is rejected here, before any state changes, with an error that names the value and the
limit. vLLM: `v1/engine/input_processor.py`; SGLang: `tokenizer_manager.py`, a separate process.
"""

from collections.abc import Mapping, Sequence as SequenceOf
from functools import cached_property
from typing import Any, NamedTuple, TypedDict, Unpack

from jinja2 import Environment, TemplateError, meta

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.draws import derive_seed
from m1_single_request.errors import (
    InvalidParamsError,
    InvalidPromptError,
    InvalidRequestError,
    PromptTooLongError,
    is_unicode,
    shown,
)
from m1_single_request.model_loader import ModelDescription
from m1_single_request.prompt_length import NFC_SHRINKS_BY, characters_per_token
from m1_single_request.request import Request, Sequence
from m1_single_request.sampling_params import SamplingParams

Message = Mapping[str, Any]
Prompt = str | SequenceOf[int] | SequenceOf[Message]
"""Text or token ids; from m6 on also messages, which pass through `chat` first."""


class RequestOptions(TypedDict, total=False):
    """Options of a request in addition to its parameters. Each is an error before the milestone that supports it."""

    priority: int  # m4
    cache_salt: str | None  # m4
    speculate: bool  # m5


LONGEST_NAME = 4096  # characters of a request id or a cache salt; every message about a request contains them
TEMPLATE_ARGUMENTS = {"add_generation_prompt", "continue_final_message"}  # transformers' own


class Arrival(NamedTuple):
    """A prompt and its parameters, tokenized and checked, from which the request is built."""

    request_id: str
    prompt: str | None
    """The prompt if it was passed as text, or None."""
    token_ids: list[int]
    params: SamplingParams
    seed: int
    time: float
    """Monotonic seconds."""


class InputProcessor:
    """Checks prompts and parameters, and builds requests. Holds the tokenizer and the model's limits."""

    max_model_len: int

    def __init__(
        self,
        *,
        request_class: type[Request],
        detokenizer_class: type[IncrementalDetokenizer],
        loaded_model: ModelDescription,
        seed: int,
    ) -> None:
        """`seed`: the engine's, from which a request without a seed derives one."""
        self.request_class = request_class
        self.detokenizer_class = detokenizer_class
        self.tokenizer = loaded_model.tokenizer
        self.vocab_size = loaded_model.vocab_size
        self.max_model_len = loaded_model.max_model_len
        self.seed = seed

    def process_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        number: int,
        arrival_time: float,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Check a prompt and its parameters against the model and build the request.

        `number` is the request's number in order of arrival; the seed is derived from it if `params` has none.
        `options` are those that a later milestone supports. Raises a subclass of `InvalidRequestError`.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidParamsError(f"params must be SamplingParams, not {shown(params)}")
        self._check_params(params)
        token_ids = self._token_ids(prompt, request_id)
        self._check_tokens(token_ids, request_id)
        self.check_limits(token_ids, params, request_id)
        seed = derive_seed(self.seed, number) if params.seed is None else params.seed
        text = prompt if isinstance(prompt, str) else None
        arrival = Arrival(request_id, text, token_ids, params, seed, arrival_time)
        extra: dict[str, Any] = {**options}  # keyword arguments of a later milestone's `build_request`
        return self.build_request(arrival, **extra)

    def build_request(self, arrival: Arrival) -> Request:
        """Build a request. A later milestone adds keyword arguments for its options."""
        request_id, prompt, token_ids, params, seed, arrival_time = arrival
        detokenizer = self.detokenizer_class(self.tokenizer, skip_special_tokens=params.skip_special_tokens)
        sequence = Sequence(request_id, token_ids, params, detokenizer)
        return self.request_class(request_id, prompt, sequence, seed, arrival_time)

    def apply_chat_template(self, messages: SequenceOf[Message], options: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of messages rendered with the tokenizer's chat template, up to the assistant's answer.

        `options` are passed to the template (such as `enable_thinking=False` for Qwen3). Raises `InvalidPromptError`.
        """
        check_messages(messages)
        for message in messages:
            if not isinstance(message.get("content"), str):
                raise InvalidPromptError(
                    f"message {shown(message)}: content must be text; pictures are for m6_multimodal_pd"
                )
        return self.encode(self.render_chat(messages, options), add_special_tokens=False)

    def render_chat(self, messages: SequenceOf[Message], options: Mapping[str, Any] | None = None) -> str:
        """Return the text that the chat template makes of messages, up to the assistant's answer.

        The template decides which types of content are valid. Raises `InvalidPromptError`.
        """
        if options is not None and not isinstance(options, Mapping):
            raise InvalidPromptError(f"chat_template_kwargs must map names to values, not {shown(options)}")
        if self.tokenizer.chat_template is None:
            raise InvalidPromptError("this model has no chat template: use generate() with a prompt of your own")
        self._check_template_options(options or {})
        arguments = {"add_generation_prompt": True, **(options or {}), "tokenize": False}
        try:
            return str(self.tokenizer.apply_chat_template([dict(m) for m in messages], **arguments))
        except Exception as error:  # a template is a program and can raise anything
            raise InvalidPromptError(f"the chat template rejects these messages: {str(error)[:200]}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises `InvalidPromptError` if `text` is not valid text. Raises `PromptTooLongError`, without tokenizing, if the
        number of characters alone shows that no output token would fit.
        """
        if isinstance(text, str) and len(text) >= self.max_model_len:
            self._check_characters(text)
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:  # a lone surrogate is not valid text
            raise InvalidPromptError(f"the prompt is not valid text: {shown(text)}") from error

    def _check_characters(self, text: str) -> None:
        characters = len(text) if text.isascii() else len(text) // NFC_SHRINKS_BY
        at_least = characters // self._characters_per_token if self._characters_per_token else 0
        if at_least >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(text):,} characters, which are at least {at_least:,} tokens; max_model_len is "
                f"{self.max_model_len} for prompt and output together"
            )

    @cached_property
    def _characters_per_token(self) -> int | None:  # at the first long text: it reads the vocabulary
        return characters_per_token(self.tokenizer)

    def _check_template_options(self, options: Mapping[str, Any]) -> None:
        """Reject an option that the template never reads; Jinja would ignore it silently."""
        template = self.tokenizer.chat_template
        if not options or not isinstance(template, str):
            return
        try:
            names = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
        except TemplateError:  # the template uses transformers' own Jinja extension, so its variables are unknown
            return
        for name in options:
            if name not in names | TEMPLATE_ARGUMENTS:
                known = ", ".join(sorted(names))
                raise InvalidPromptError(
                    f"chat_template_kwargs: the template has no variable {shown(name)}, only {known}"
                )

    def _check_params(self, params: SamplingParams) -> None:
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            if ids and (largest := max(ids)) >= self.vocab_size:
                raise InvalidParamsError(f"{name}: token id {largest} is outside the vocabulary of {self.vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.vocab_size:
                raise InvalidParamsError(f"{name}={value} is more than the vocabulary of {self.vocab_size} tokens")

    def _token_ids(self, prompt: Prompt, request_id: str) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        if isinstance(prompt, SequenceOf) and not isinstance(prompt, bytes | bytearray | memoryview):
            check_model_len(prompt, self.max_model_len, request_id)  # before the copy: a range can have any length
            ids = [i for i in prompt if isinstance(i, int) and not isinstance(i, bool)]
            if len(ids) == len(prompt):
                return ids
            if any(isinstance(message, Mapping) for message in prompt):
                raise InvalidPromptError("a prompt is a string or a list of token ids; messages are for chat()")
        raise InvalidPromptError(f"a prompt is a string or a list of token ids, not {shown(prompt)}")

    def _check_tokens(self, token_ids: list[int], request_id: str) -> None:
        if not token_ids:
            raise InvalidPromptError(f"request {shown(request_id)} has an empty prompt; give at least one token")
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidPromptError(f"token id {shown(token_id)} is outside the vocabulary of {self.vocab_size}")

    def check_limits(self, token_ids: list[int], params: SamplingParams, request_id: str) -> None:
        """Raise `InvalidRequestError` for a request that this engine can never run."""
        if params.n > 1:
            raise InvalidParamsError(
                f"n={params.n} must be 1: several outputs share KV blocks, from m3_paged_attention"
            )
        check_model_len(token_ids, self.max_model_len, request_id)


def check_name(name: str, value: Any) -> None:
    """Raise `InvalidRequestError` for a request id or a cache salt that cannot be sent between processes."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME or not is_unicode(value):
        raise InvalidRequestError(f"{name}={shown(value)} must be valid text of 1 to {LONGEST_NAME:,} characters")


def check_messages(messages: Any) -> None:
    """Raise `InvalidPromptError` unless `messages` is a list of mappings, each with a role."""
    is_list = isinstance(messages, SequenceOf) and not isinstance(messages, str)
    if not is_list or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise InvalidPromptError(f"messages must be a list of {{'role': ..., 'content': ...}}, not {shown(messages)}")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise InvalidPromptError(f"message {shown(message)} needs a role that is a string")


def check_model_len(token_ids: SequenceOf[Any], max_model_len: int, request_id: str) -> None:
    """Raise `PromptTooLongError` for a prompt that leaves no room for an output token."""
    if len(token_ids) >= max_model_len:
        raise PromptTooLongError(
            f"request {shown(request_id)} has {len(token_ids)} prompt tokens; max_model_len is {max_model_len} for "
            f"prompt and output together, so at most {max_model_len - 1} are possible"
        )
