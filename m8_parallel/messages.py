"""Messages of rank 0 to the other ranks: inputs of a step, calls between steps, drafts and sampled tokens.

No message contains a batch: each rank schedules by itself which requests run next, because all decide the same. A
`Call` alone is a command. Types and bytes are m6's: a `Job` is a request as engines receive it, and arrays are parts of
their own (`wire.py`). SGLang: `recv_requests` broadcasts pickled requests; vLLM's external launcher lets every rank
read the same requests from its own program.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from m1_single_request.request import BaseFinishReason, FinishAbort, FinishError
from m1_single_request.sampler import LogprobRow
from m6_multimodal_pd.disaggregation.runtime.jobs import error_of, fault_of
from m6_multimodal_pd.disaggregation.runtime.messages import Fault, Job, Message, Value
from m6_multimodal_pd.wire import Codec, Frame

MAX_BYTES = 2**31
"""Of one message."""


class Arrival(Value, frozen=True, tag=True):
    """A request has arrived."""

    job: Job
    parent_id: str | None
    """Of one of several outputs: the id of the request that asks for them."""
    is_unread: bool
    """Whether its images were never read: it ends with the next step, and does not run."""


class Marked(Value, frozen=True, tag=True):
    """Requests end with the next update: by this error, or because the user has aborted them."""

    rids: tuple[str, ...]
    fault: Fault | None


class Rated(Value, frozen=True, tag=True):
    """Change `prompt_logprobs` of one output of a request with n > 1: the output that was to compute them has ended."""

    rid: str
    num_best: int | None


Input = Arrival | Marked | Rated


class Inputs(Message, frozen=True):
    """Some of the inputs of the next step, which has many."""

    inputs: tuple[Input, ...]


class Step(Message, frozen=True):
    """A step begins, after these inputs."""

    inputs: tuple[Input, ...]
    num_resets: int
    """Number of times that all requests were ended inside a step on rank 0, by an error that every rank must have."""


class Cleared(Message, frozen=True):
    """All requests have ended, and the KV is forgotten."""

    fault: Fault | None


class Call(Message, frozen=True):
    """Execute the verb of the face between two steps."""

    verb: str
    argument: str = ""


class Outcome(Message, frozen=True):
    """Output of rank 0 for a step: the fields of a `ModelRunnerOutput` except `sample_seconds`."""

    req_ids: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[LogprobRow | None, ...], ...] = ()
    prompt_logprobs: dict[str, tuple[LogprobRow, ...]] = msgspec.field(default_factory=dict)
    faults: dict[str, Fault] = msgspec.field(default_factory=dict)
    draft_token_ids: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)


class Drafted(Message, frozen=True):
    """The drafts of a step, by row of the batch."""

    token_ids: tuple[tuple[int, ...], ...]


class RankCodec(Codec[Any]):
    """m6's codec for ranks, which trust each other: only the size of a whole message is limited."""

    max_head_bytes = max_frames = MAX_BYTES


CODEC = RankCodec(Inputs | Step | Cleared | Call | Outcome | Drafted, MAX_BYTES)


def to_bytes(message: Message) -> bytes:
    """Return a message as bytes: the number of its frames and their sizes, then they themselves."""
    frames = CODEC.encode(message)
    sizes = msgspec.msgpack.encode([len(frame) for frame in frames])
    return b"".join([len(sizes).to_bytes(4, "little"), sizes, *frames])


def from_bytes(data: bytes) -> Any:
    """Return the message of `to_bytes`. Raises `WireError` for other bytes."""
    first = 4 + int.from_bytes(data[:4], "little")
    frames: list[Frame] = []
    for size in msgspec.msgpack.decode(data[4:first], type=list[int]):
        frames.append(memoryview(data)[first : first + size])
        first += size
    return CODEC.decode(frames)


def marked(rids: Sequence[str], reason: BaseFinishReason) -> Marked:
    """Return the message that these requests are to end for this reason."""
    return Marked(tuple(rids), fault_of(reason.error) if isinstance(reason, FinishError) else None)


def reason_of(fault: Fault | None) -> BaseFinishReason:
    """Return the reason of an end."""
    return FinishAbort() if fault is None else FinishError(error_of(fault, "rank 0"))
