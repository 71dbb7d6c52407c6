"""Messages between an engine and a process that reads its media: typed values, and arrays in memory that both share.

A message is a file in memory without a name: a head in msgpack, then its arrays. Its descriptor goes through a socket,
with the sizes of its frames. The engine maps what it receives, so the patches of an image are written once; and when
both have closed the file its memory is free: a process that is killed leaves nothing behind. Each end sends one message
and waits for the answer. The patches of an image may have 400 MB; a socket or a pipe would copy them twice more, and
`/dev/shm`, where named memory is, has 64 MB in a container by default. New in this milestone. vLLM: `MsgpackEncoder`
with `TensorIpcSender`; SGLang: pickles through the pipes of a `ProcessPoolExecutor`.
"""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from tempfile import TemporaryFile
from typing import IO, Any, Generic, TypeVar

import msgspec

from m1_single_request.errors import shown
from m6_multimodal_pd.errors import WireError
from m6_multimodal_pd.multimodal.decode_image import Picture
from m6_multimodal_pd.multimodal.decode_video import Frames
from m6_multimodal_pd.multimodal.media_settings import MediaSettings
from m6_multimodal_pd.multimodal.vision_processor import ProcessedItem
from m6_multimodal_pd.wire import ArrayReader, ArrayWriter, Frame

M = TypeVar("M")

ALIGNMENT = 64
"""Bytes; each frame starts at a multiple of it."""
LONGEST_SIZES = 65_536
"""Bytes of the sizes of a message's frames."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One message."""


class Order(Message, frozen=True):
    """The first message to a process: the settings of its reader. It has no answer."""

    settings: MediaSettings


class ReadPart(Message, frozen=True):
    """Read a part of a message, whose source is one of the two, and return its patches."""

    what: str
    kind: str
    """Its type."""
    text: str | list[str] | None
    """A path, a URL, or the paths of frames."""
    content: bytes | None
    """An encoded file."""
    options: dict[str, int | float | None]
    """Of a video."""

    @classmethod
    def of(cls, part: Mapping[str, Any], what: str) -> "ReadPart":
        """Return the message for a part of `MediaLoader.unread`."""
        kind = part["type"]
        source, options = part[kind], {name: value for name, value in part.items() if name not in ("type", kind)}
        is_content = isinstance(source, bytes)
        return cls(what, kind, None if is_content else source, source if is_content else None, options)

    @property
    def part(self) -> dict[str, Any]:
        """The part, as it was."""
        return {"type": self.kind, self.kind: self.text if self.content is None else self.content, **self.options}


class ProcessPicture(Message, frozen=True):
    """Return the patches of these pixels."""

    what: str
    part: Picture


class ProcessFrames(Message, frozen=True):
    """Return the patches of these pixels of a video."""

    what: str
    part: Frames


class Done(Message, frozen=True):
    """The patches."""

    item: ProcessedItem


class Failed(Message, frozen=True):
    """An error instead of patches."""

    is_media_error: bool
    """Whether it is an `InvalidMediaError`; else it is an error of the reader."""
    text: str


ToProcess = Order | ReadPart | ProcessPicture | ProcessFrames
FromProcess = Done | Failed


def read(file: IO[bytes]) -> memoryview:
    """Return the content of a file."""
    file.seek(0)
    return memoryview(file.read())


class Channel(Generic[M]):
    """One end of a connection; receives messages of one union of types."""

    def __init__(
        self, connection: socket.socket, receives: Any, memory_of: Callable[[IO[bytes]], memoryview] = read
    ) -> None:
        """`memory_of`: returns the content of a message's file; arrays are views of it."""
        self.connection, self._type, self._memory_of = connection, receives, memory_of

    def send(self, message: Message) -> None:
        """Send a message. Raises `WireError` for a value that cannot be sent, `OSError` if there is no memory or the
        other end is closed."""
        arrays = ArrayWriter(sys.maxsize)
        try:
            head = msgspec.msgpack.encode(message, enc_hook=arrays.add)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WireError(f"a {type(message).__name__} cannot be sent: {shown(str(error))}") from error
        frames: list[Frame] = [head, *arrays.frames]
        with memory_file() as file:
            for frame in frames:
                file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
                file.write(frame)
            file.flush()
            sizes = msgspec.msgpack.encode([len(frame) for frame in frames])
            socket.send_fds(self.connection, [sizes], [file.fileno()])

    def receive(self) -> M:
        """Wait for a message, and return it. Raises `EOFError` if the other end is closed, `OSError` if it was lost,
        and any other error for bytes that are no message."""
        sizes, descriptors, _, _ = socket.recv_fds(self.connection, LONGEST_SIZES, 1)
        if not descriptors:
            raise EOFError("the other end is closed")
        with open(descriptors[0], "rb") as file:
            memory = self._memory_of(file)
        frames, start = [], 0
        for size in msgspec.msgpack.decode(sizes, type=list[int]):
            frames.append(memory[start : start + size])
            start += size + -size % ALIGNMENT
        message: M = msgspec.msgpack.Decoder(self._type, dec_hook=ArrayReader(frames).take).decode(frames[0])
        return message


def memory_file() -> IO[bytes]:
    """Return a file without a name, in memory if the system has such files."""
    create: Callable[[str], int] | None = getattr(os, "memfd_create", None)  # Linux
    return TemporaryFile() if create is None else open(create("stepwise-media"), "w+b")
