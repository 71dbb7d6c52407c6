"""The process that reads images for an engine. `MediaPool` starts it; the argument is the descriptor of its socket.

It has the media reader of the engine, with the same settings, and runs it on one message after the other. It imports
numpy and PIL, and torch only for a video: so it starts in a fraction of a second, and takes little memory. Its priority
is low, so that on a busy machine steps come first. It ends when the engine's end of the socket is closed. SGLang: a
worker of the `cpu_executor` of its `BaseMultimodalProcessor`, forked from the tokenizer's process.
"""

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

PACKAGES = Path(__file__).resolve().parents[2]
"""The folder of the milestones' packages."""
NICE = 10
"""Steps of priority below the engine's."""


def skip_package_inits() -> None:
    """Let the files of the milestones be imported one by one: the `__init__` of each package would import torch."""
    for folder in PACKAGES.glob("m[1-9]_*"):
        package = ModuleType(folder.name)
        package.__path__ = [str(folder)]
        sys.modules[folder.name] = package


def serve(connection: socket.socket) -> None:
    """Read media until the other end of the connection is closed."""
    from m6_multimodal_pd.errors import InvalidMediaError
    from m6_multimodal_pd.multimodal.media_channel import ItemRead, ReadingFailed, ToProcess, receive, send
    from m6_multimodal_pd.multimodal.media_reader import MediaReader
    from m6_multimodal_pd.multimodal.media_settings import MediaSettings

    with suppress(EOFError, ConnectionError):
        reader = MediaReader(settings=receive(connection, MediaSettings))
        while True:
            message = receive(connection, ToProcess)
            answer: ItemRead | ReadingFailed
            try:
                answer = ItemRead(reader.process(message.part, message.what))
            except Exception as error:
                is_media_error = isinstance(error, InvalidMediaError)
                text = str(error) if is_media_error else f"{message.what}: {type(error).__name__}: {error}"
                text = text.encode("utf-8", "backslashreplace").decode()  # a name may hold surrogates
                answer = ReadingFailed(is_media_error, text)
            send(connection, answer)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the engine's
    os.nice(NICE)
    skip_package_inits()
    serve(socket.socket(fileno=int(sys.argv[1])))
