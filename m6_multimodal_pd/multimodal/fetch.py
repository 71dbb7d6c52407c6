"""Step 2 of an image's way, if it names a file or a URL: the bytes there.

A URL makes this machine read data that its sender cannot reach: files, the local network, the metadata address of a
cloud. So `file`, `http` and `https` are rejected until `MultimodalConfig` allows them, a redirect is followed only to
an allowed URL, and no more bytes than the limit are read. An allowed `https` means every host, unless
`allowed_url_hosts` names some: then addresses are checked, too (`fetch_address.py`). vLLM: `MediaConnector`
(`multimodal/media`), with `allowed_local_media_path` and `allowed_media_domains`; SGLang: `load_image` in
`utils/common.py`.
"""

import base64
import http.client
import re
import stat
from contextlib import closing
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
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.config import URL_SCHEMES, MultimodalConfig
from m6_multimodal_pd.multimodal.fetch_deadline import Deadline, TimedHandler

CHUNK = 65536
WEB = ("http", "https")
OTHER_HOST = "its host is not one of allowed_url_hosts of MultimodalConfig"

SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):", re.IGNORECASE)
KNOWN_SCHEMES = frozenset({"data", "ftp", "javascript", *URL_SCHEMES})


def scheme_of(text: str) -> str | None:
    """Return the scheme of a URL in lower case; None if `text` is a path.

    A URL has `://` after its scheme, or one of the schemes without. `C:\\cat.png` is a path, because a scheme has two
    letters at least, and so is `shot 12:30.png`. A file called `http:cat` must be given as a `Path`.
    """
    found = SCHEME.match(text)
    if found is None:
        return None
    scheme = found[1].lower()
    return scheme if scheme in KNOWN_SCHEMES or text.startswith("//", found.end()) else None


def read_file(path: str | Path, config: MultimodalConfig, what: str) -> bytes:
    """Return the bytes of a regular file. Its size is checked before it is opened."""
    if path == "":  # to Path it is the current folder
        raise InvalidMediaError(f"{what}: its path is empty")
    try:
        path = Path(path)
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise InvalidMediaError(f"{what}: {shown_path(path)} is a folder; only a video may be one, of frame files")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise InvalidMediaError(f"{what}: {shown_path(path)} is not a regular file")
        check_bytes(status.st_size, config, what)
        with path.open("rb") as file:
            content = file.read(status.st_size + 1)  # not the limit: Python allocates as many bytes
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidMediaError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InvalidMediaError(f"{what}: {shown_path(path)} cannot be read: {reason}") from error
    if len(content) > status.st_size:
        raise InvalidMediaError(f"{what}: {shown_path(path)} has grown while it was read")
    return content


def check_bytes(size: int, config: MultimodalConfig, what: str) -> None:
    """Raise `InvalidMediaError` for an empty file, and for more than `max_file_bytes`."""
    if size == 0:
        raise InvalidMediaError(f"{what}: it is empty, 0 bytes")
    if size > config.max_file_bytes:
        raise InvalidMediaError(
            f"{what}: it has {size:,} bytes, more than max_file_bytes={config.max_file_bytes:,} of MultimodalConfig"
        )


def read_url(url: str, config: MultimodalConfig, what: str) -> bytes:
    """Return the content of a `data:` URL, or the bytes at a URL whose scheme is allowed."""
    scheme = check_url(url, config, what)
    if scheme == "data":
        return _read_data_url(url, config, what)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidMediaError(f"{what}: {shown(url)} is not a URL: {error}") from error
    if scheme == "file":
        return read_file(_file_of(parts, what), config, what)
    return _read_http(url, config, what)


def check_url(url: str, config: MultimodalConfig, what: str) -> str:
    """Return the scheme of a URL. Raises `InvalidMediaError` unless it is `data` or an allowed one."""
    scheme = scheme_of(url)
    if scheme != "data" and scheme not in URL_SCHEMES:
        known = ", ".join(("data", *config.allowed_url_schemes))
        raise InvalidMediaError(f"{what}: {shown(url)} is not an accepted URL; accepted are {known}")
    if scheme != "data" and scheme not in config.allowed_url_schemes:
        raise InvalidMediaError(f"{what}: {refusal(scheme)}; the URL is {shown(url)}")
    if scheme in WEB and not is_allowed_host(url, config):
        raise InvalidMediaError(f"{what}: {OTHER_HOST}; the URL is {shown(url)}")
    return scheme


def is_allowed_host(url: str, config: MultimodalConfig) -> bool:
    """Return whether the host of a URL is among `allowed_url_hosts`, if these are given."""
    if config.allowed_url_hosts is None:
        return True
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return False
    return host in {allowed.lower() for allowed in config.allowed_url_hosts}


def refusal(scheme: str) -> str:
    """Return the message for a scheme that is not allowed."""
    return f"{scheme}: URLs are refused; MultimodalConfig(allowed_url_schemes=({scheme!r},)) allows them"


def _read_data_url(url: str, config: MultimodalConfig, what: str) -> bytes:
    """Return the content of a `data:` URL. Its content type is ignored: decoding finds the format."""
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidMediaError(f"{what}: {shown(url)} is not data:<type>;base64,<content>; only base64 is supported")
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
    with closing(Deadline(config.url_timeout_s)) as deadline:
        try:
            with _opener(config, what, deadline).open(Request(url), timeout=deadline.left()) as response:
                if response.length is not None:
                    check_bytes(response.length, config, what)
                content = _read_at_most(response, config.max_file_bytes + 1)
                if response.length and len(content) <= config.max_file_bytes:
                    raise EOFError(f"its last {response.length:,} bytes are missing")
        except (OSError, EOFError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, InvalidMediaError):
                raise
            if hasattr(error, "close"):  # an HTTP error is still an open connection
                error.close()
            raise InvalidMediaError(f"{what}: {shown(url)} cannot be read: {_why(error, config)}") from error
    check_bytes(len(content), config, what)
    return content


def _why(error: Exception, config: MultimodalConfig) -> str:
    """Return the reason of an error of urllib, in one line."""
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return f"it timed out: it did not arrive within url_timeout_s={config.url_timeout_s}"
    return " ".join(str(error).split()) or type(error).__name__


def _read_at_most(response: http.client.HTTPResponse, limit: int) -> bytes:
    content = bytearray()
    while len(content) < limit and (chunk := response.read1(min(CHUNK, limit - len(content)))):
        content += chunk
    return bytes(content)


def _opener(config: MultimodalConfig, what: str, deadline: Deadline) -> OpenerDirector:
    """Return an opener for http and https only: the one that urllib builds would also open files and ftp."""
    director = OpenerDirector()
    ends = HTTPErrorProcessor(), UnknownHandler(), HTTPDefaultErrorHandler()
    is_public_only = config.allowed_url_hosts is not None
    proxies = ProxyHandler({} if is_public_only else None)
    for handler in (TimedHandler(deadline, is_public_only), proxies, _Redirects(config, what), *ends):
        director.add_handler(handler)
    return director


class _Redirects(HTTPRedirectHandler):
    """urllib's handler; its `redirect_request` follows a redirect only to an allowed scheme, http or https."""

    def __init__(self, config: MultimodalConfig, what: str) -> None:
        self.config, self.what = config, what

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        """Return a request for `newurl`. Raises `InvalidMediaError` unless its scheme and its host are allowed."""
        fp.close()  # urllib would read all that came with the redirect
        scheme = scheme_of(newurl) or ""
        is_web = scheme in WEB
        if not is_web or scheme not in self.config.allowed_url_schemes:
            why = refusal(scheme) if is_web else "that is refused"
            raise InvalidMediaError(
                f"{self.what}: {shown(req.full_url)} cannot be read: it leads to {shown(newurl)}: {why}"
            )
        if not is_allowed_host(newurl, self.config):
            raise InvalidMediaError(f"{self.what}: it leads to another URL: {OTHER_HOST}; that is {shown(newurl)}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
