"""Response bodies, for the description of the server at `/openapi.json`, of which clients are generated.

The bodies themselves are plain dicts, made in `chat.py`, `completions.py` and `tokens.py`. New in this milestone. vLLM:
`entrypoints/openai/*/protocol.py`; SGLang: `entrypoints/openai/protocol.py`.
"""

from typing import Generic, Literal, NotRequired, TypeVar

from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

ChoiceT = TypeVar("ChoiceT")


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Answer(TypedDict, Generic[ChoiceT]):
    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage


class Choice(TypedDict):
    index: int
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None


class Token(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(Token):
    top_logprobs: list[Token]


class ChatLogprobs(TypedDict):
    content: list[ChosenToken]
    refusal: None


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    prompt: str


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


ChatCompletion = Answer[ChatChoice]
Completion = Answer[CompletionChoice]
