"""Where a picture may come from: a file, a `data:` URL, and other URLs only if they were allowed by name.

Whoever sends a URL makes this machine read it, and the machine can reach what the sender cannot: files, the local
network, a cloud's metadata address. So `file`, `http` and `https` are refused until `MultimodalConfig` names them, a
redirect leads only to where a URL may lead, and never more than the limit of bytes is taken in. An allowed `https`
means every host; what may be reached is then for the network to say. vLLM: `MediaConnector` (`multimodal/media`),
with `allowed_local_media_path` and `allowed_media_domains`; SGLang: `load_image` in `utils/common.py`.
"""

import base64
import http.client
import re
import stat
from pathlib import Path
from typing import IO, Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPRedirectHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
    url2pathname,
)

from m1_single_request.errors import shown, shown_path
from m6_multimodal_pd.config import URL_SCHEMES, MultimodalConfig
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.deadline import Deadline, TimedHTTPHandler, TimedHTTPSHandler

CHUNK = 65536

SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):", re.IGNORECASE)
KNOWN_SCHEMES = frozenset({"data", "ftp", "javascript", *URL_SCHEMES})


def scheme_of(text: str) -> str | None:
    """The scheme if `text` is a URL, in lower case, else None: then it is a path.

    A URL is what has `://` behind its scheme, or one of the schemes that do without. `C:\\cat.png` is a path, because a
    scheme has two letters at least, and so is `shot 12:30.png`. Whoever has a file called `http:cat` gives a `Path`.
    """
    found = SCHEME.match(text)
    if found is None:
        return None
    scheme = found[1].lower()
    return scheme if scheme in KNOWN_SCHEMES or text.startswith("//", found.end()) else None


def read_file(path: str | Path, config: MultimodalConfig, what: str) -> bytes:
    """The bytes of a regular file. Its size is looked at before it is opened."""
    if path == "":  # to Path it is the current folder
        raise InvalidMediaError(f"{what}: its path is empty")
    try:
        path = Path(path)
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise InvalidMediaError(f"{what}: {shown_path(path)} is a folder; only a video may be one, of frame files")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for somebody to write
            raise InvalidMediaError(f"{what}: {shown_path(path)} is not a regular file")
        check_bytes(status.st_size, config, what)
        with path.open("rb") as file:
            content = file.read(status.st_size + 1)  # not the limit: as many bytes would be made ready
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidMediaError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InvalidMediaError(f"{what}: {shown_path(path)} cannot be read: {reason}") from error
    if len(content) > status.st_size:
        raise InvalidMediaError(f"{what}: {shown_path(path)} has grown while it was read")
    return content


def check_bytes(size: int, config: MultimodalConfig, what: str) -> None:
    """Raise `InvalidMediaError` unless an encoded file of this size is taken."""
    if size == 0:
        raise InvalidMediaError(f"{what}: it is empty, 0 bytes")
    if size > config.max_file_bytes:
        raise InvalidMediaError(
            f"{what}: it has {size:,} bytes, more than max_file_bytes={config.max_file_bytes:,} of MultimodalConfig"
        )


def read_url(url: str, config: MultimodalConfig, what: str) -> bytes:
    """What a `data:` URL carries, or what lies at a URL whose scheme is allowed."""
    scheme = scheme_of(url)
    if scheme == "data":
        return _read_data_url(url, config, what)
    if scheme not in URL_SCHEMES:
        known = ", ".join(("data", *config.allowed_url_schemes))
        raise InvalidMediaError(f"{what}: {shown(url)} is not a URL that is taken; taken are {known}")
    if scheme not in config.allowed_url_schemes:
        raise InvalidMediaError(f"{what}: {refusal(scheme)}; refused was {shown(url)}")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidMediaError(f"{what}: {shown(url)} is not a URL: {error}") from error
    if scheme == "file":
        return read_file(_file_of(parts, what), config, what)
    return _read_http(url, config, what)


def refusal(scheme: str) -> str:
    """Why a URL of this scheme is not read, and what would allow it."""
    return f"{scheme}: URLs are refused; MultimodalConfig(allowed_url_schemes=({scheme!r},)) allows them"


def _read_data_url(url: str, config: MultimodalConfig, what: str) -> bytes:
    """The content type is not believed: what the bytes are is seen when they are decoded."""
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidMediaError(f"{what}: {shown(url)} is not data:<type>;base64,<content>; only base64 is taken")
    check_bytes(len(payload) // 4 * 3 - payload[-2:].count("="), config, what)
    try:
        content = base64.b64decode(payload, validate=True)
    except ValueError as error:
        raise InvalidMediaError(f"{what}: the base64 of {shown(url)} is broken: {error}") from error
    check_bytes(len(content), config, what)
    return content


def _file_of(parts: SplitResult, what: str) -> str:
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path.startswith("/"):
        raise InvalidMediaError(f"{what}: {shown(parts.geturl())} is not of the form file:///path")
    return url2pathname(parts.path)


def _read_http(url: str, config: MultimodalConfig, what: str) -> bytes:
    deadline = Deadline(config.url_timeout_s)
    try:
        with _opener(config, what, deadline).open(Request(url), timeout=deadline.left()) as response:
            length = response.headers.get("Content-Length", "")
            if length.isdecimal():
                check_bytes(int(length[:20]), config, what)
            content = _read_at_most(response, config.max_file_bytes + 1)
            if response.length and len(content) <= config.max_file_bytes:
                raise EOFError(f"its last {response.length:,} bytes did not come")
    except (OSError, EOFError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, InvalidMediaError):
            raise
        if hasattr(error, "close"):  # an answer that says no is still a connection
            error.close()
        raise InvalidMediaError(f"{what}: {shown(url)} cannot be read: {_why(error, config)}") from error
    check_bytes(len(content), config, what)
    return content


def _why(error: Exception, config: MultimodalConfig) -> str:
    """What an error of urllib says, in one line."""
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return f"it timed out: it did not arrive within url_timeout_s={config.url_timeout_s}"
    return " ".join(str(error).split()) or type(error).__name__


def _read_at_most(response: http.client.HTTPResponse, limit: int) -> bytes:
    content = bytearray()
    while len(content) < limit and (chunk := response.read1(min(CHUNK, limit - len(content)))):
        content += chunk
    return bytes(content)


def _opener(config: MultimodalConfig, what: str, deadline: Deadline) -> OpenerDirector:
    """Knows http and https and nothing else: the one that urllib builds would also open files and ftp."""
    director = OpenerDirector()
    redirects = _Redirects(config, what)
    for handler in (TimedHTTPHandler(deadline), TimedHTTPSHandler(deadline), ProxyHandler(), redirects):
        director.add_handler(handler)
    for rest in (HTTPErrorProcessor(), UnknownHandler(), HTTPDefaultErrorHandler()):
        director.add_handler(rest)
    return director


class _Redirects(HTTPRedirectHandler):
    """Follows a redirect only to http and https, and only where that is allowed."""

    def __init__(self, config: MultimodalConfig, what: str) -> None:
        self.config, self.what = config, what

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        """`newurl` as a request, unless its scheme is refused."""
        scheme = scheme_of(newurl) or ""
        if scheme not in ("http", "https") or scheme not in self.config.allowed_url_schemes:
            fp.close()
            why = refusal(scheme) if scheme in ("http", "https") else "that is refused"
            raise InvalidMediaError(
                f"{self.what}: {shown(req.full_url)} cannot be read: it leads to {shown(newurl)}: {why}"
            )
        fp.close()  # urllib would read all that came with the redirect
        return super().redirect_request(req, fp, code, msg, headers, newurl)
