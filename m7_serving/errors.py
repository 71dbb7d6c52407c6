"""Errors of a server; all other errors are those of earlier milestones."""

from m1_single_request.errors import EngineError


class ServerBusyError(EngineError):
    """As many requests are unfinished as may be, or the server is shutting down. The request was not queued; another
    attempt some seconds later may succeed."""


class EngineUnavailableError(EngineError):
    """No engine can answer now, because one that was lost is being started again, or the server has ended the
    request."""
