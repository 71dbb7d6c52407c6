"""The messages of a router and its engines, as types.

Bytes that are not one of these types, with exactly these fields, are refused. Every message is a value; none names
code. The two engines of a room send their messages through the router (`Relay`), which passes them on
unread. New in this milestone. SGLang: `io_struct.py`, and the bytes that `disaggregation/common/conn.py` sends; vLLM:
`EngineCoreRequest` and `EngineCoreOutputs` in `v1/engine/__init__.py`.
"""

from typing import Annotated, Literal

import msgspec

from m1_single_request.sampler import LogprobRow
from m1_single_request.sampling_params import SamplingParams
from m6_multimodal_pd.disaggregation.config import Role
from m6_multimodal_pd.disaggregation.runtime.credentials import CurveKeys
from m6_multimodal_pd.multimodal.inputs import MultimodalInputs

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Room = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Number = Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]
Word = Annotated[str, msgspec.Meta(max_length=64)]
Fact = Number | Word | tuple[Number | Word, ...]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message."""


class Message(Value, frozen=True, tag=True):
    """One message."""


# --- a request --------------------------------------------------------------------------------------------------------


class Job(Value, frozen=True):
    """A request, as both engines of a room receive it."""

    rid: Annotated[str, msgspec.Meta(min_length=1)]
    """The user's request id; intake limits its length."""
    prompt_token_ids: tuple[Token, ...]
    output_token_ids: tuple[Token, ...]
    """Those of earlier attempts; the next token comes after them."""
    params: SamplingParams
    seed: int
    priority: int
    cache_salt: str | None
    speculate: bool
    media: MultimodalInputs | None


class Fault(Value, frozen=True):
    """An error: the name of a type that both sides know, and its text."""

    kind: Name
    text: Text


# --- router to engine -------------------------------------------------------------------------------------------------


class Prefill(Message, frozen=True):
    """Compute the prompt of a request, and send its KV to the decode engine `peer`."""

    room: Room
    job: Job
    peer: Name


class Decode(Message, frozen=True):
    """Receive the KV of a request's prompt from the prefill engine `peer`, and compute the answer."""

    room: Room
    job: Job
    peer: Name


class Generate(Message, frozen=True):
    """Compute the prompt of a request, and the answer."""

    room: Room
    job: Job


class Cancel(Message, frozen=True):
    """Abort the request of this room."""

    room: Room


class PeerLost(Message, frozen=True):
    """An engine is lost, with all of its rooms."""

    name: Name


class Probe(Message, frozen=True):
    """Do nothing: that it could be sent shows that the connection is open."""


class Refused(Message, frozen=True):
    """The engine does not fit to the group, and ends."""

    why: Text


class LengthFixed(Message, frozen=True):
    """Requests have at most so many tokens: reserve the KV memory for them, and join."""

    max_model_len: Count


WITHOUT_LIMIT = ("check_weights", "update_weights")
"""Verbs that may take any time: files are read, and may come from a hub before."""


class Call(Message, frozen=True):
    """Execute the verb between two steps, and answer with this number."""

    number: Count
    verb: Literal[
        "stats", "flush_cache", "check_weights", "update_weights", "start_profile", "stop_profile", "shutdown"
    ]
    argument: Text = ""


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
    layout: Text
    """The meaning of the bytes of a page, the same for all engines of a group."""
    model: Text
    """Name, dtype and format of its weights."""
    vocabulary: Digest
    """Of its tokenizer (`members.vocabulary_of`)."""


class Failed(Message, frozen=True):
    """An engine cannot be built."""

    fault: Fault


class Heartbeat(Message, frozen=True):
    """An engine with requests is alive."""


class Tokens(Message, frozen=True):
    """The next tokens of a request."""

    room: Room
    first: Count
    """Number of output tokens before these."""
    token_ids: tuple[Token, ...]
    logprobs: tuple[LogprobRow | None, ...]
    prompt_logprobs: tuple[LogprobRow, ...] | None
    """With the first of them, if the request asks for log-probabilities of its prompt."""
    cached_tokens: Count
    num_draft_tokens: Count
    num_accepted_tokens: Count


class Ended(Message, frozen=True):
    """The request of a room has ended on this engine, by the error if there is one."""

    room: Room
    fault: Fault | None
    may_retry: bool
    """Whether another attempt may succeed."""


class ReportedEvent(Value, frozen=True):
    """An event of an engine's trace."""

    kind: Name
    rids: tuple[str, ...]
    text: str
    facts: tuple[tuple[Name, Fact], ...]
    """Its fields that are integers or short strings, or tuples of these."""


class StepEvents(Message, frozen=True):
    """The events of one step of an engine."""

    step: Count
    events: tuple[ReportedEvent, ...]


class Answer(Message, frozen=True):
    """Result of a `Call`."""

    number: Count
    value: msgspec.Raw
    fault: Fault | None


class Relay(Message, frozen=True):
    """A message of one engine to another. The router replaces `peer`, the engine that it goes to, by the name of the
    one that it comes from."""

    peer: Name
    body: "PeerMessage"


# --- engine to engine -------------------------------------------------------------------------------------------------


class Preallocated(Message, frozen=True):
    """D to P: there is memory for the prompt's KV; the KV of the first `start` tokens is cached."""

    room: Room
    start: Count
    devices: tuple[Word, ...] = ()
    """UUIDs of the GPUs whose memory D can read."""


class Ticket(Value, frozen=True):
    """The place of a chunk's pages in the memory between the two engines."""

    number: Count
    """Rises from ticket to ticket of an engine, and is never used again."""
    segment: Annotated[str, msgspec.Meta(max_length=128)]
    """Name of the memory segment that the prefill engine has made for this decode engine, in the memory of the host or
    of a GPU (`Offer`)."""
    num_frames: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    """Number of frames of the segment; each holds a page."""
    first_frame: Count
    """The frame of the first page; the other pages are in the next ones."""
    checksums: tuple[Count32, ...] = ()
    """`zlib.crc32` of each page, if the prefill engine makes checksums."""


class DeviceSegment(Value, frozen=True):
    """A segment in the memory of a GPU, as CUDA and torch open it in another process."""

    device: Word
    """UUID of the GPU."""
    num_bytes: Annotated[int, msgspec.Meta(ge=1, lt=2**62)]
    handle: Annotated[bytes, msgspec.Meta(min_length=1, max_length=512)]
    """Of the allocation that the segment is in."""
    offset: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    """First byte of the segment in it."""
    counter: Annotated[str, msgspec.Meta(pattern=r"^/torch(_[0-9]{1,20}){3}\Z")]
    """File in which torch counts the processes that have the segment open."""
    counter_offset: Annotated[int, msgspec.Meta(ge=0, lt=10_000)]


class Offer(Message, frozen=True):
    """P to D: open this segment in GPU memory, through which all pages will go; the ticket has no page. `Taken` is the
    answer."""

    ticket: Ticket
    memory: DeviceSegment


class Chunk(Message, frozen=True):
    """P to D: these pages of a prompt are ready to be read."""

    room: Room
    number: Count
    """Index of the chunk in its room."""
    first_page: Count
    num_pages: Count
    ticket: Ticket


class Taken(Message, frozen=True):
    """D to P: the frames of this ticket are free again: its pages were read, or are not wanted."""

    number: Count
    is_mapped: bool
    """False if the segment of the ticket could not be mapped."""
    why: Text = ""
    """Cause of that."""


class FirstToken(Message, frozen=True):
    """P to D: the prompt is computed; the token that follows it, and the number of chunks of its KV."""

    room: Room
    num_chunks: Count
    token_id: Token
    logprobs: LogprobRow | None
    prompt_logprobs: tuple[LogprobRow, ...] | None
    cached_tokens: Count


class Received(Message, frozen=True):
    """D to P: all KV of this room has arrived."""

    room: Room


class RoomFailed(Message, frozen=True):
    """P to D or D to P: the transfer of this room has failed."""

    room: Room
    why: Text


# --- to a process that becomes an engine ------------------------------------------------------------------------------


class Order(Value, frozen=True):
    """The settings of a process that becomes an engine."""

    name: str
    role: Role
    address: str
    keys: CurveKeys
    owner: str
    """A part of the names of its memory segments."""
    is_traced: bool
    num_threads: int
    config: str


PeerMessage = Preallocated | Offer | Chunk | Taken | FirstToken | Received | RoomFailed
ToEngine = Prefill | Decode | Generate | Cancel | PeerLost | Probe | Refused | LengthFixed | Relay | Call
ToRouter = LengthFitted | Joined | Failed | Heartbeat | StepEvents | Tokens | Ended | Answer | Relay
