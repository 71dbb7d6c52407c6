"""Calls for operators, on a socket of their own: caches, weights, profiles, pauses, the log.

None of them is on the public address. The socket is a file that only the user of the server may open:

    curl --unix-socket /tmp/stepwise-8000.sock http://server/flush_cache -X POST

An answer comes when the work is done. New in this milestone. vLLM: its routes for development, such as `/pause`, on the
public address; SGLang: the same, with an admin key.
"""

import errno
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI

from m1_single_request.errors import EngineUsageError
from m4_radix_cache.llm_engine import Tier
from m6_multimodal_pd.weight_loader import absolute
from m7_serving.async_llm import AsyncLLM
from m7_serving.openai.requests import Body
from m7_serving.server.error_shape import HANDLERS


class Weights(Body):
    """Body of `/update_weights`."""

    model: str
    """A directory or a hub id."""


class Profile(Body):
    """Body of `/start_profile`."""

    folder: str


class LogLevel(Body):
    """Body of `/log_level`."""

    level: Literal["debug", "info", "warning", "error"]


def make_operators_app(llm: AsyncLLM) -> FastAPI:
    """Return the ASGI application of the calls. Errors have the form of the public API; 409: requests are unfinished,
    for which `/pause` waits."""
    app = FastAPI(title="Stepwise, for operators", exception_handlers=HANDLERS)

    @app.post("/pause")
    async def pause() -> dict[str, Any]:
        """Let new requests wait, and return when none runs."""
        await llm.pause()
        return {}

    @app.post("/continue")
    async def continue_() -> dict[str, Any]:
        """Start the requests that wait."""
        llm.resume()
        return {}

    @app.post("/flush_cache")
    async def flush_cache(tier: Tier | None = None) -> dict[str, Any]:
        """Clear the caches of all engines, or this tier of them."""
        if not await llm.call(lambda core: core.flush_cache(tier)):
            raise EngineUsageError("the caches are cleared between requests, and some are unfinished")
        return {}

    @app.post("/update_weights")
    async def update_weights(body: Weights) -> dict[str, Any]:
        """Replace the weights by those of another checkpoint of the same model, and clear the caches."""
        await llm.call(lambda core: core.update_weights(absolute(body.model)))
        return {}

    @app.post("/start_profile")
    async def start_profile(body: Profile) -> dict[str, Any]:
        """Start recording the steps of all engines with torch's profiler."""
        await llm.call(lambda core: core.profiler.start(os.path.abspath(body.folder)))
        return {}

    @app.post("/stop_profile")
    async def stop_profile() -> dict[str, Any]:
        """Stop recording; return the files for chrome://tracing or Perfetto."""
        return {"files": await llm.call(lambda core: core.profiler.stop())}

    @app.post("/log_level")
    async def log_level(body: LogLevel) -> dict[str, Any]:
        """Set the level of the log of the front's process; the engines have logs of their own."""
        logging.getLogger().setLevel(body.level.upper())
        return {}

    return app


def default_path(port: int) -> Path:
    """Return the path of the socket for a server at this port."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"stepwise-{port}.sock"


@contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """Bind a socket to a path that only this user may open, in place of one that a killed server has left; remove it in
    the end. Raises `OSError`."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as other:
            other.setblocking(False)  # its server may accept nothing
            if other.connect_ex(str(path)) == errno.ECONNREFUSED:
                with suppress(OSError):  # of another user: `bind` names it
                    path.unlink()
    with socket.socket(socket.AF_UNIX) as sock:
        mask = os.umask(0o177)
        try:
            sock.bind(str(path))
            sock.listen()  # now, so that no other server takes it for one that was left
        except OSError as error:
            raise OSError(f"cannot listen at {path}: {error.strerror or error}") from None
        finally:
            os.umask(mask)
        own = path.stat().st_ino
        try:
            yield sock
        finally:
            with suppress(OSError):  # it is gone
                if path.stat().st_ino == own:  # and no other server has put its own there
                    path.unlink()
