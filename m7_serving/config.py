"""Configuration of the server: its address, its keys, and the limits that protect it from its clients.

The engine behind it has its own configurations. New in this milestone. vLLM: `FrontendArgs`; SGLang: `ServerArgs`.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from m1_single_request.errors import ConfigError, is_unicode, shown
from m1_single_request.field_rules import NonNegativeFloat, PositiveInt, check_fields
from m6_multimodal_pd.multimodal.config import Seconds

LONGEST_NAME = 256  # characters
Port = Annotated[int, Meta(ge=0, le=65_535)]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server. Times are in seconds."""

    host: str = "127.0.0.1"
    """Address at which the server listens: a name, IPv4 or IPv6. 0.0.0.0: all of the machine."""
    port: Port = 8000
    """Port at which the server listens. 0: any free one."""
    api_key: Sequence[str] = field(default=(), repr=False)
    """Key that a request must have as its bearer token, unless it only reads the state of the server or the description
    of its API. May be repeated: each of the keys is valid. Other users of the machine can read a command line, but not
    the variable STEPWISE_API_KEY, which is the default."""
    served_model_name: str | None = None
    """Name of the model in requests and answers. Default: tiny-qwen3-vl for the included model, and the path or hub id
    of another one."""
    operator_socket: str | None = None
    """Path of the socket for operators' calls, such as `/flush_cache`. Default: stepwise-PORT.sock in the folder
    XDG_RUNTIME_DIR, or in that for temporary files."""
    allowed_media_hosts: Sequence[str] = ()
    """Host from which an `image_url` may be fetched. May be repeated. Default: none, only `data:` URLs are read."""
    max_requests: PositiveInt = 256
    """Maximum number of unfinished outputs, of which a request has `n` for each of its prompts. More are rejected with
    status 503."""
    max_connections: PositiveInt = 512
    """Maximum number of open connections. Another one receives status 503 and is closed."""
    max_header_bytes: PositiveInt = 64 * 2**10
    """Maximum size of a request's first line and headers."""
    max_body_bytes: PositiveInt = 64 * 2**20
    """Maximum size of a request's body. Images are a third larger in it than their files."""
    header_timeout_s: Seconds = 10.0
    """Time within which a client must send the headers of a request: of the first one from the connection on, of later
    ones from their first byte on."""
    body_timeout_s: Seconds = 60.0
    """Time within which a client must send the body of a request."""
    write_timeout_s: Seconds = 60.0
    """Time within which a client must read some of a full send buffer, before its connection is aborted."""
    keep_alive_timeout_s: Seconds = 65.0
    """Time after which a connection without a request is closed. Longer than a proxy's, often 60 s: otherwise the proxy
    may send a request while the connection is being closed."""
    request_timeout_s: Seconds = 600.0
    """Maximum time for an answer, from the end of its request's body."""
    shutdown_timeout_s: NonNegativeFloat = 10.0
    """Time that running requests have to finish after SIGTERM or SIGINT. 0: they are aborted at once."""
    access_log: bool = False
    """Whether a line is logged for each request."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        self._check_text("host", self.host)
        for name in ("served_model_name", "operator_socket"):
            if getattr(self, name) is not None:
                self._check_text(name, getattr(self, name))
        for name in ("api_key", "allowed_media_hosts"):
            values = getattr(self, name)
            if not isinstance(values, tuple | list):
                raise ConfigError(f"{name} must be a tuple of texts, not a {type(values).__name__}")
            for value in values:
                self._check_text(name, value, is_secret=name == "api_key")
            object.__setattr__(self, name, tuple(values))

    @property
    def is_open_to_others(self) -> bool:
        """Whether another machine may reach the server, and no key is required."""
        try:
            is_loopback = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            is_loopback = self.host == "localhost"
        return not self.api_key and not is_loopback

    @staticmethod
    def _check_text(name: str, value: object, *, is_secret: bool = False) -> None:
        """Raise `ConfigError` unless the value is a text for a header or a URL."""
        if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME or not is_unicode(value):
            text = "" if is_secret else f"={shown(value)}"
            raise ConfigError(f"{name}{text} must be valid text of 1 to {LONGEST_NAME} characters")
