"""All that a router and its engines say to each other, as types.

What is not one of these, with exactly these fields, is not read. Every message is a value; none names code. The two
engines of a room speak through the router (`Relay`, `Relayed`), which passes on and does not read. New in this
milestone. SGLang: `io_struct.py`, and the bytes that `disaggregation/common/conn.py` sends; vLLM: `EngineCoreRequest`
and `EngineCoreOutputs` in `v1/engine/__init__.py`.
"""

from typing import Annotated, Literal

import msgspec
import numpy as np

from m1_single_request.sampling_params import SamplingParams
from m6_multimodal_pd.disaggregation.runtime.credentials import CurveKeys
from m6_multimodal_pd.disaggregation.transport import Offer, Ticket

Role = Literal["prefill", "decode"]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Room = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Said = Annotated[str, msgspec.Meta(max_length=4096)]
Number = Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]
Word = Annotated[str, msgspec.Meta(max_length=64)]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message."""


class Message(Value, frozen=True, tag=True):
    """One message."""


# --- what a request is ------------------------------------------------------------------------------------------------


class Item(Value, frozen=True):
    """An image or a video, ready for the vision tower."""

    modality: Literal["image", "video"]
    offsets: tuple[tuple[Count, Count], ...]
    feature: np.ndarray
    grid_thw: tuple[Count, Count, Count]
    hash: Digest
    size: tuple[Count, Count]

    def __post_init__(self) -> None:
        if self.feature.dtype != np.float32 or self.feature.ndim != 2:
            raise ValueError("a feature is float32 [patches, patch_dim]")


class Media(Value, frozen=True):
    """The pictures of a prompt, and where they put its tokens."""

    items: tuple[Item, ...]
    mrope_positions: np.ndarray
    mrope_position_delta: int
    options_key: bytes

    def __post_init__(self) -> None:
        if self.mrope_positions.dtype != np.int64 or self.mrope_positions.ndim != 2 or len(self.mrope_positions) != 3:
            raise ValueError("M-RoPE positions are int64 [3, tokens]")


class Job(Value, frozen=True):
    """A request, as both engines must know it."""

    rid: Annotated[str, msgspec.Meta(min_length=1)]
    """As the user has it: intake limits its length."""
    prompt_token_ids: tuple[Token, ...]
    output_token_ids: tuple[Token, ...]
    """Said already, if another engine was lost on the way: the next token comes behind these."""
    params: SamplingParams
    seed: int
    priority: int
    cache_salt: str | None
    speculate: bool
    media: Media | None


class Row(Value, frozen=True):
    """The log-probabilities at one place."""

    token_ids: tuple[Token, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[Count, ...]


class Fault(Value, frozen=True):
    """An error, as it can be told: the name of a type that both sides know, and what it says."""

    kind: Name
    text: Said


# --- router to engine -------------------------------------------------------------------------------------------------


class Prefill(Message, frozen=True):
    """Compute this prompt, and hand its KV to an engine."""

    room: Room
    job: Job
    decode: Name


class Decode(Message, frozen=True):
    """Take this prompt's KV from an engine, and answer it."""

    room: Room
    job: Job
    prefill: Name


class Cancel(Message, frozen=True):
    """The request of this room is not wanted any more."""

    room: Room


class PeerLost(Message, frozen=True):
    """An engine is gone; it will not come back under this name."""

    name: Name


class Probe(Message, frozen=True):
    """Nothing is to be done: it could be sent, so the connection is there."""


class Refused(Message, frozen=True):
    """This engine does not fit, and why: it has no place here, and ends."""

    why: Said


class LengthFixed(Message, frozen=True):
    """Requests have at most so many tokens: reserve the KV memory for them, and join."""

    max_model_len: Count


class Relayed(Message, frozen=True):
    """What another engine says to this one."""

    origin: Name
    body: "PeerMessage"


class Call(Message, frozen=True):
    """Do something, and answer with this number."""

    number: Count
    verb: Literal["stats", "flush_cache", "update_weights", "start_profile", "stop_profile", "shutdown"]
    argument: Said = ""


# --- engine to router -------------------------------------------------------------------------------------------------


class LengthFitted(Message, frozen=True):
    """An engine has loaded its model, and waits for the length of the group's requests (`LengthFixed`)."""

    role: Role
    max_model_len: Count
    """The longest request that it has room for."""
    is_named: bool
    """Whether its user named this length, so that it takes no other."""


class Joined(Message, frozen=True):
    """An engine is ready."""

    role: Role
    page_size: Count
    total_tokens: Count
    max_model_len: Count
    layout: Said
    """Of a page of its KV: pages go only between engines with the same."""
    model: Said
    """What its weights are known by."""
    vocabulary: Digest
    """Of what its tokens' ids stand for."""


class Failed(Message, frozen=True):
    """An engine cannot be built, and why."""

    fault: Fault


class Heartbeat(Message, frozen=True):
    """It is alive, and this is how it stands."""

    num_steps: int
    num_running: Count
    num_waiting: Count
    free_tokens: Count


class Tokens(Message, frozen=True):
    """The next tokens of a request."""

    room: Room
    first: Count
    """How many output tokens it had before these."""
    token_ids: tuple[Token, ...]
    logprobs: tuple[Row | None, ...]
    prompt_logprobs: tuple[Row, ...] | None
    """With the first of them, where asked for."""
    cached_tokens: Count
    num_draft_tokens: Count
    num_accepted_tokens: Count


class Ended(Message, frozen=True):
    """A request is over here, by an error if there is one."""

    room: Room
    fault: Fault | None
    may_retry: bool
    """Whether another engine, or another try, may do better."""


class ToldEvent(Value, frozen=True):
    """An event of an engine's trace, as its readers would show it."""

    kind: Name
    rids: tuple[str, ...]
    said: str
    facts: tuple[tuple[Name, Number | Word], ...]
    """Its fields that are whole numbers or short words."""


class Told(Message, frozen=True):
    """What an engine's trace says of a step."""

    step: Count
    events: tuple[ToldEvent, ...]


class Answer(Message, frozen=True):
    """What came of a call."""

    number: Count
    value: msgspec.Raw
    fault: Fault | None


class Relay(Message, frozen=True):
    """Something for another engine."""

    to: Name
    body: "PeerMessage"


# --- engine to engine -------------------------------------------------------------------------------------------------


class Memory(Message, frozen=True):
    """P to D: where the KV will lie on its way; D to P, with the same name: it is mapped."""

    offer: Offer
    is_mapped: bool


class MemoryRefused(Message, frozen=True):
    """D to P: it cannot be mapped, so nothing can come this way."""

    why: Said


class Preallocated(Message, frozen=True):
    """D to P: there is room for this prompt's KV, and so many tokens of it are here already."""

    room: Room
    start: Count


class Chunk(Message, frozen=True):
    """P to D: these pages lie ready."""

    room: Room
    number: Count
    first_page: Count
    num_pages: Count
    ticket: Ticket


class Taken(Message, frozen=True):
    """D to P: the chunk with this ticket was read, or is not wanted: its place is free again."""

    number: Count


class FirstToken(Message, frozen=True):
    """P to D: the prompt is computed, and this comes next."""

    room: Room
    num_chunks: Count
    token_id: Token
    logprobs: Row | None
    prompt_logprobs: tuple[Row, ...] | None
    cached_tokens: Count


class Received(Message, frozen=True):
    """D to P: everything of this room is here."""

    room: Room


class RoomFailed(Message, frozen=True):
    """Either to the other: nothing will come of this room."""

    room: Room
    why: Said


# --- to a process that is to be an engine -----------------------------------------------------------------------------


class Order(Value, frozen=True):
    """All that a process that is being started must know to be an engine."""

    name: str
    role: Role
    address: str
    keys: CurveKeys
    owner: str
    """In the names of its shared memory."""
    is_traced: bool
    num_threads: int
    config: str


PeerMessage = Memory | MemoryRefused | Preallocated | Chunk | Taken | FirstToken | Received | RoomFailed
ToEngine = Prefill | Decode | Cancel | PeerLost | Probe | Refused | LengthFixed | Relayed | Call
ToRouter = LengthFitted | Joined | Failed | Heartbeat | Told | Tokens | Ended | Answer | Relay
