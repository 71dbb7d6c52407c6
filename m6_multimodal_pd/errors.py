"""Errors of images, and of engines that work together; all other errors are those of earlier milestones."""

from m1_single_request.errors import EngineError, InvalidRequestError


class InvalidMediaError(InvalidRequestError):
    """An image or a video that cannot be used: broken, too large, of an unknown form, or at a URL that is not allowed.

    No request was queued, or, if another process has read the image, its request ends with this error. No other request
    is affected.
    """


class TransferError(EngineError, RuntimeError):
    """KV pages cannot go from one engine to another: the two do not fit together, one of them broke the protocol, or
    there is no memory for a copy.

    It is raised before anything changes: no page was written, no frame is held.
    """


class WireError(EngineError):
    """A message between processes that cannot be sent or read: too large, cut off, or not one that is known."""


class PeerLostError(EngineError):
    """The process at the other end receives no messages: it has ended, was never started, or no longer reads."""


class EngineLostError(EngineError, RuntimeError):
    """An engine that a request needed is lost, and no other engine could replace it."""


class RemoteError(EngineError, RuntimeError):
    """An error in the process of another engine whose type is unknown here; its text has the name and the message."""
