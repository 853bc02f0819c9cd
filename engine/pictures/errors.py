"""The error for pictures that are not read."""

from engine.errors import RequestError

PARAM = "multi_modal_data"


def refused(message: str) -> RequestError:
    """The error for a picture that is not read."""
    return RequestError(message, param=PARAM)
