"""API keys: middleware that rejects requests without a valid one.

Digests of keys are compared, in a time that depends on neither of them, and always with all keys. Keys guard every path
but those of OPEN, which load balancers, Prometheus and browsers read: they run no model and have no text of a request.
New in this milestone. vLLM: `AuthenticationMiddleware`; SGLang: `add_api_key_middleware`.
"""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from m7_serving.server.error_shape import failure

OPEN = {"/health", "/metrics", "/status", "/status/events", "/version", "/openapi.json", "/docs", "/redoc"}


class RequireKey:
    """ASGI middleware: answers with status 401 unless the request has one of the keys as its bearer token."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app, self.digests = app, [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["path"] not in OPEN and not self._is_valid(scope):
            message = "no valid API key was sent: the request needs the header `Authorization: Bearer KEY`"
            rejected = failure(401, message, {"WWW-Authenticate": "Bearer"}, code="invalid_api_key")
            await rejected.response(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_valid(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, valid) for valid in self.digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
