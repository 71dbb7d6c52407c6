"""Errors of m8: a rank is lost, or ranks have decided differently. Both end the job."""

from m1_single_request.errors import EngineDeadError


class RankLostError(EngineDeadError):
    """Another rank has ended, or does not answer."""


class RanksDifferError(EngineDeadError):
    """Two ranks have decided differently about the same step."""
