"""The error for pictures that are not read."""

from engine.errors import RequestError

PARAM = "multi_modal_data"
NOT_READ = (
    "this model reads only text here (it has no encoder of pictures or no "
    "preprocessor_config.json, Pillow is not installed, or limit_mm_per_prompt is 0): leave it "
    "out, or start a model that reads pictures (docs/models.md)"
)


def refused(message: str) -> RequestError:
    """The error for a picture that is not read."""
    return RequestError(message, param=PARAM)
