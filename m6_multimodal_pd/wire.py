"""Messages between processes as bytes: a typed head in msgpack, and each large array in a frame of its own.

New in this milestone: until now everything ran in one process. A message that a socket receives is checked against its
type while it is read, sizes are compared with the bytes that are there before memory is reserved for them, and every
error is a `WireError`. A head has a type and fields, and holds values only; a pickle is a program, and to read it is to
run it. Arrays stay out of the head so that they are not copied into it or out of it: the head has dtype, shape and the
number of the frame. vLLM: `MsgpackEncoder` and `MsgpackDecoder` in
`v1/serial_utils.py`, which keep large arrays apart in the same way, used by `v1/engine/core_client.py`; SGLang:
`managers/scheduler.py` receives pickles over ZeroMQ (`recv_pyobj`).
"""

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import msgspec
import numpy as np

from m1_single_request.errors import shown
from m6_multimodal_pd.errors import WireError

M = TypeVar("M")

Frame = bytes | memoryview

DtypeName = Literal["float32", "float16", "int64", "int32", "uint8"]
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in get_args(DtypeName)}
MAX_FRAMES = 256
MAX_DIMENSIONS = 8
MAX_HEAD_BYTES = 8 * 2**20
"""A million tokens fit. A byte of a head can become an object of many: this bounds the memory that a bad one costs."""


class ArrayHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The array's entry in the head."""

    dtype: DtypeName
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    frame: int
    """Number of the frame of its elements, little-endian and in C order. The head is frame 0."""


class Codec(Generic[M]):
    """Writes and reads the messages of one union of tagged `msgspec.Struct`s. A field of type `np.ndarray` is an array.

    `Codec[Message](Message, max_bytes)`. Only dtype and size of an array are checked here; the `__post_init__` of a
    message raises a ValueError for a dtype or shape that it does not accept.
    """

    max_head_bytes, max_frames = MAX_HEAD_BYTES, MAX_FRAMES

    def __init__(self, message_type: Any, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        """Of one message, all frames together."""
        self._type = message_type

    def encode(self, message: M) -> list[Frame]:
        """Return the frames of `message`: the head, then one for each array, with which it may share memory.

        Raises WireError if it is larger than the limits, or has a value that cannot be sent.
        """
        frames = frames_of(message, self.max_bytes)
        self._check_sizes([len(frame) for frame in frames])
        return frames

    def decode(self, frames: Sequence[Frame]) -> M:
        """Return the message of the frames. Its arrays may be written to; they may share memory with the frames.

        Raises WireError, and no other error, for any bytes.
        """
        self._check_sizes([len(frame) for frame in frames])
        arrays = ArrayReader(frames)
        try:
            message: M = msgspec.msgpack.Decoder(self._type, dec_hook=arrays.take).decode(frames[0])
        except Exception as error:  # of msgspec, of str, of a message's own checks: the sender chooses which
            raise WireError(f"a message that cannot be read: {shown(str(error))}") from error
        if arrays.frames:
            raise WireError(f"a message with {len(arrays.frames)} frames too many")
        return message

    def _check_sizes(self, sizes: list[int]) -> None:
        if not 1 <= len(sizes) <= self.max_frames:
            raise WireError(f"a message of {len(sizes)} frames; there must be 1 to {self.max_frames}")
        if sizes[0] > self.max_head_bytes:
            raise WireError(f"a message with a head of {sizes[0]} bytes; {self.max_head_bytes} are the limit")
        if sum(sizes) > self.max_bytes:
            raise WireError(f"a message of {sum(sizes)} bytes; {self.max_bytes} are the limit")


def frames_of(message: Any, max_bytes: int) -> list[Frame]:
    """Return the frames of `message`, as `Codec.encode`; only its arrays are limited, to `max_bytes` in all."""
    arrays = ArrayWriter(max_bytes)
    try:
        head = msgspec.msgpack.encode(message, enc_hook=arrays.add)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"a {type(message).__name__} cannot be sent: {shown(str(error))}") from error
    return [head, *arrays.frames]


class ArrayWriter:
    """Puts the arrays of one message into frames, in the order in which they are encoded."""

    def __init__(self, max_bytes: int) -> None:
        self.frames: list[memoryview] = []
        self._bytes_left = max_bytes

    def add(self, value: object) -> ArrayHead | float | int | str:
        """Return the entry of `value` in the head. The encoder calls this for all types that msgpack does not have."""
        if isinstance(value, float):  # numpy's, for example, which every check of a parameter accepts
            return float(value)
        if isinstance(value, int):  # an IntEnum's
            return int(value)
        if isinstance(value, str):
            return str.__str__(value)
        if not isinstance(value, np.ndarray):
            raise WireError(f"a {type(value).__name__} cannot be sent")
        dtype = DTYPES.get(value.dtype.name)
        if dtype is None:
            raise WireError(f"an array of {shown(value.dtype.name)} cannot be sent; of {', '.join(DTYPES)} it can")
        self._bytes_left -= value.nbytes
        if self._bytes_left < 0:
            raise WireError(f"an array of {value.nbytes} bytes is {-self._bytes_left} too large for its message")
        self.frames.append(np.ascontiguousarray(value, dtype).ravel().view(np.uint8).data)  # copied only if it must be
        return ArrayHead(value.dtype.name, value.shape, len(self.frames))


class ArrayReader:
    """The array frames of one message that are not read yet, by number; each becomes one array."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.frames = dict(enumerate(frames[1:], start=1))

    def take(self, kind: Any, value: Any) -> np.ndarray:
        """Return the array of an `ArrayHead`, which `value` has as lists and numbers."""
        assert kind is np.ndarray, f"a message has a field of type {kind}, which cannot be read"
        head = msgspec.convert(value, ArrayHead)
        dtype = DTYPES[head.dtype]
        frame = self.frames.pop(head.frame, None)
        if frame is None:
            raise WireError(f"frame {head.frame} is not there, or is of two arrays")
        if prod(head.shape) * dtype.itemsize != len(frame):
            raise WireError(f"an array of {head.dtype} {shown(head.shape)} in a frame of {len(frame)} bytes")
        array = np.frombuffer(frame, dtype).reshape(head.shape)
        return np.require(array, requirements=["ALIGNED", "WRITEABLE"])  # copies if not: a frame may start at any byte
