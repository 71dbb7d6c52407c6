"""Request models: the bodies of HTTP requests as typed objects, checked while they are built.

Ranges of sampling parameters are not repeated here: `SamplingParams` checks them. New in this milestone. vLLM:
`entrypoints/openai/*/protocol.py`; SGLang: `entrypoints/openai/protocol.py`.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from m1_single_request.errors import shown
from m7_serving.openai import fields
from m7_serving.openai.fields import InvalidFieldError, field_error

MAX_N = 128  # OpenAI's
MAX_LOGPROBS = 20  # OpenAI's `top_logprobs`; vLLM's default for both endpoints
MAX_STOPS = 16  # OpenAI's is 4
MAX_DIGITS = 19  # of a token id


class Body(BaseModel):
    """A JSON object whose fields are all known. Values have exactly the types of JSON: "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    unsupported: ClassVar[fields.Absent] = {}
    no_effect: ClassVar[Collection[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_absent(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return fields.without_absent(body, cls.model_fields, cls.unsupported, cls.no_effect)


# --- values -----------------------------------------------------------------------------------------------------------


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _by_token_id(bias: Any) -> Any:
    """Convert the keys of `logit_bias`, which are strings in JSON, to token ids."""
    if not isinstance(bias, dict):
        return bias
    for key, value in bias.items():
        if not key.isascii() or not key.isdecimal() or len(key) > MAX_DIGITS or str(int(key)) != key:
            raise field_error(f"its keys are token ids as strings, and {shown(key)} is none")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise field_error(f"the value of {shown(key)} must be a number from -100 to 100, not {shown(value)}")
    return {int(key): float(value) for key, value in bias.items()}


def _as_prompts(prompt: Any) -> Any:
    """Return a list of prompts; `prompt` may be one text, or one list of token ids."""
    is_ids = isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list)
    return [prompt] if is_ids or isinstance(prompt, str) else prompt


def _kind_of_prompts(prompts: Any) -> str:
    return "[ids]" if isinstance(prompts, list) and prompts and isinstance(prompts[0], list) else "[texts]"


def _without_empty(prompts: list[Any]) -> list[Any]:
    if not prompts:
        raise field_error("the list has no prompt")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise field_error(f"prompt {index} is empty; give at least one token")
    return prompts


def _without_reserved(options: dict[str, Any]) -> dict[str, Any]:
    for name in fields.TEMPLATE_RESERVED:
        if name in options:
            raise field_error(f"{name} cannot be set by a request")
    return options


# What the functions above accept, for /openapi.json.
NotEmpty = Field(min_length=1)
Text = Annotated[str, NotEmpty]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], NotEmpty]
Prompt = Text | Ids | Annotated[list[Text], NotEmpty] | Annotated[list[Ids], NotEmpty]
Stop = Text | Annotated[list[Text], Field(max_length=MAX_STOPS)]
# Of a union, one member is chosen by a tag, so that an error concerns this one only.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True), Tag("[texts]")]
IdLists = Annotated[list[TokenIds], Field(fail_fast=True), Tag("[ids]")]
Prompts = Annotated[
    Annotated[Texts | IdLists, Discriminator(_kind_of_prompts)],
    BeforeValidator(_as_prompts, json_schema_input_type=Prompt),
    AfterValidator(_without_empty),
]
Stops = Annotated[
    list[str],
    Field(fail_fast=True, max_length=MAX_STOPS),
    BeforeValidator(_as_list, json_schema_input_type=Stop),
]
Biases = Annotated[dict[int, float], BeforeValidator(_by_token_id, json_schema_input_type=dict[str, float])]
TemplateOptions = Annotated[dict[str, Any], AfterValidator(_without_reserved)]
AtLeastOne = Annotated[int, Field(ge=1)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


# --- messages ---------------------------------------------------------------------------------------------------------


class Url(Body):
    """URL of an image or a video; a `data:` URL contains it."""

    unsupported = fields.IMAGE_URL
    url: str


class Part(Body):
    """A text, an image or a video of a message: the value is in the field that `type` names."""

    no_effect = fields.PART_NO_EFFECT
    type: Literal["text", "image_url", "video_url"]
    text: str | None = None
    image_url: Url | None = None
    video_url: Url | None = None

    @model_validator(mode="after")
    def _has_its_value(self) -> Self:
        if self.model_fields_set != {"type", self.type}:
            raise field_error(f"a part of type {self.type} has the fields type and {self.type}, and no other")
        return self


def _kind_of_content(content: Any) -> str:
    return "[text]" if isinstance(content, str) else "[parts]"


class Message(Body):
    """A message of a conversation. The chat template decides which roles, and which parts, it accepts."""

    unsupported = fields.MESSAGE
    no_effect = fields.MESSAGE_NO_EFFECT
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Tag("[text]")] | Annotated[list[Part], Field(fail_fast=True), Tag("[parts]")],
        Discriminator(_kind_of_content),
    ]
    name: str | None = None


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


# --- requests ---------------------------------------------------------------------------------------------------------


class StreamOptions(Body):
    """Options of a streamed answer."""

    unsupported = fields.STREAM_OPTIONS
    include_usage: bool = False
    """Send a last chunk without choices that has the usage."""
    continuous_usage_stats: bool = False
    """Send the usage so far with every chunk (vLLM's)."""


class GenerationRequest(Body):
    """The fields that both endpoints have. From `priority` on they are vLLM's, and `speculate` is ours."""

    no_effect = fields.NO_EFFECT
    model: str | None = None
    """Name of a served model; None for the only one."""
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Biases | None = None
    stop: Stops = Field(default_factory=list)
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str | None = None
    top_k: int = -1
    """-1 or 0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: TokenIds = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    speculate: bool = True

    @model_validator(mode="after")
    def _streams_with_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise field_error("it needs stream: true", "stream_options")
        return self


class ChatCompletionRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    unsupported = fields.CHAT
    messages: Messages
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    max_tokens: AtLeastOne | None = None
    """The older name of `max_completion_tokens`. None: as many tokens as fit."""
    max_completion_tokens: AtLeastOne | None = None
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise field_error("it needs logprobs: true", "top_logprobs")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise field_error("it differs from max_completion_tokens; give one of the two", "max_tokens")
        return self


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    unsupported = fields.COMPLETION
    prompt: Prompts
    """Texts, or lists of token ids."""
    echo: bool = False
    """Return the prompt in front of the output."""
    logprobs: NumLogprobs | None = None
    best_of: int | None = None
    max_tokens: Annotated[int, Field(ge=0)] = 16
    """0 with `echo`: return the prompt alone, and its log-probabilities."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise field_error(f"only {self.n}, the value of n, is supported", "best_of", "unsupported_parameter")
        if self.max_tokens == 0 and not self.echo:
            raise field_error("0 needs echo: true, because there is nothing else to return", "max_tokens")
        return self


class TokenizeRequest(Body):
    """Body of `/tokenize`: a text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Add those that the tokenizer adds to a text, such as the beginning of the sequence (default). The chat template
    writes its own, so that messages accept only False."""
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise field_error("give either a prompt or messages", "prompt")
        if self.messages is not None and self.add_special_tokens:
            raise field_error("only false is supported with messages", "add_special_tokens", "unsupported_parameter")
        if self.messages is None and self.chat_template_kwargs:
            raise field_error("it needs messages", "chat_template_kwargs")
        return self


class DetokenizeRequest(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds


# --- errors -----------------------------------------------------------------------------------------------------------


def first_problem(problem: Mapping[str, Any], body: object) -> InvalidFieldError:
    """Return an error of pydantic as ours, without the tags of unions. `problem` is one of `ValidationError.errors()`,
    and `body` what was validated."""
    context = problem.get("ctx", {})
    path = [place for place in problem["loc"] if not _is_tag(place)]
    if (param := context.get("param")) is not None:
        path.append(param)
    if not path:
        return InvalidFieldError("body", f"the body must be a JSON object, not {shown(body)}", "invalid_type")
    name = "".join(f"[{place}]" if isinstance(place, int) else f".{place}" for place in path).removeprefix(".")
    code = "missing_required_parameter" if problem["type"] == "missing" else context.get("code", "invalid_value")
    return InvalidFieldError(name, f"{name}: {context.get('reason', problem['msg'])}", code)


def _is_tag(place: int | str) -> bool:
    return isinstance(place, str) and place.startswith("[")
