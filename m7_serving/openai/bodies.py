"""Response bodies, for the description of the server at `/openapi.json`, of which clients are generated.

The bodies themselves are plain dicts, made in `chat.py`, `completions.py` and `tokens.py`. New in this milestone. vLLM:
`entrypoints/openai/*/protocol.py`; SGLang: `entrypoints/openai/protocol.py`.
"""

from typing import Generic, Literal, NotRequired, TypeVar

from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

ChoiceT = TypeVar("ChoiceT")


class PromptTokensDetails(TypedDict):
    """Prompt tokens by their origin."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Answer(TypedDict, Generic[ChoiceT]):
    """Body of an answer, with choices of one kind."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage


class Choice(TypedDict):
    """Fields that the choices of both endpoints have."""

    index: int
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None


class Token(TypedDict):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(Token):
    """A token of the text, and the most likely ones in its place."""

    top_logprobs: list[Token]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a message."""

    content: list[ChosenToken]
    refusal: None


class ChatMessage(TypedDict):
    """Text of an answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Choice):
    """Choice of `/v1/chat/completions`."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a text: four lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    """Choice of `/v1/completions`."""

    text: str
    logprobs: CompletionLogprobs | None


class Tokens(TypedDict):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    """Answer of `/detokenize`."""

    prompt: str


class Model(TypedDict):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(TypedDict):
    """Answer of `/v1/models`."""

    object: Literal["list"]
    data: list[Model]


ChatCompletion = Answer[ChatChoice]
Completion = Answer[CompletionChoice]
