"""What can be wrong with a picture; all other errors are those of earlier milestones."""

from m1_single_request.errors import InvalidRequestError


class InvalidMediaError(InvalidRequestError):
    """An image or a video that cannot be taken: broken, too large, of an unknown form, or from where nothing may come.

    Nothing was queued, and no other request is touched.
    """
