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
from collections.abc import Callable
from tempfile import TemporaryFile
from typing import IO, Any

import msgspec

from m6_multimodal_pd.errors import InvalidMediaError, RemoteError
from m6_multimodal_pd.multimodal.decode_image import Picture
from m6_multimodal_pd.multimodal.decode_video import Frames
from m6_multimodal_pd.multimodal.vision_processor import ProcessedItem
from m6_multimodal_pd.wire import ArrayReader, frames_of

ALIGNMENT = 64
"""Bytes; each frame starts at a multiple of it."""
LONGEST_SIZES = 65_536
"""Bytes of the sizes of a message's frames."""


class MediaMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One message. The first one to a process is none of them: it is the `MediaSettings` of its reader."""


class ReadPart(MediaMessage, frozen=True):
    """Read a part of a chat message, and return its patches."""

    what: str
    """Its name in errors."""
    part: dict[str, Any]
    """As `MediaLoader.unread` returns it."""


class ReadPicture(MediaMessage, frozen=True):
    """Return the patches of these pixels."""

    what: str
    part: Picture


class ReadFrames(MediaMessage, frozen=True):
    """Return the patches of these pixels of a video."""

    what: str
    part: Frames


class ItemRead(MediaMessage, frozen=True):
    """The patches."""

    result: ProcessedItem


class ReadingFailed(MediaMessage, frozen=True):
    """An error instead of patches."""

    is_media_error: bool
    """Whether it is an `InvalidMediaError`; else it is an error of the reader."""
    text: str

    @property
    def result(self) -> Exception:
        """The error."""
        return InvalidMediaError(self.text) if self.is_media_error else RemoteError(self.text)


ToProcess = ReadPart | ReadPicture | ReadFrames
FromProcess = ItemRead | ReadingFailed


def send(connection: socket.socket, message: Any) -> None:
    """Send a message. Raises `WireError` for a value that cannot be sent, `OSError` if there is no memory or the other
    end is closed."""
    frames = frames_of(message, sys.maxsize)
    with memory_file() as file:
        for frame in frames:
            file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
            file.write(frame)
        file.flush()
        sizes = msgspec.msgpack.encode([len(frame) for frame in frames])
        socket.send_fds(connection, [sizes], [file.fileno()])


def read(file: IO[bytes]) -> memoryview:
    """Return the content of a file."""
    file.seek(0)
    return memoryview(file.read())


def receive(connection: socket.socket, kind: Any, memory_of: Callable[[IO[bytes]], memoryview] = read) -> Any:
    """Wait for a message of a type, and return it; its arrays are views of what `memory_of` returns for its file.

    Raises `EOFError` if the other end is closed, `OSError` if it was lost, and any other error for bytes that are no
    such message.
    """
    sizes, descriptors, _, _ = socket.recv_fds(connection, LONGEST_SIZES, 1)
    if not descriptors:
        raise EOFError("the other end is closed")
    with open(descriptors[0], "rb") as file:
        memory = memory_of(file)
    frames, start = [], 0
    for size in msgspec.msgpack.decode(sizes, type=list[int]):
        frames.append(memory[start : start + size])
        start += size + -size % ALIGNMENT
    return msgspec.msgpack.Decoder(kind, dec_hook=ArrayReader(frames).take).decode(frames[0])


def memory_file() -> IO[bytes]:
    """Return a file without a name, in memory if the system has such files."""
    create: Callable[[str], int] | None = getattr(os, "memfd_create", None)  # Linux
    return TemporaryFile() if create is None else open(create("stepwise-media"), "w+b")
