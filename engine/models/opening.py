"""Opens the weights of a model directory, whichever kind of files they are in."""

from __future__ import annotations

from pathlib import Path

from engine.gguf.link import gguf_file
from engine.models.checkpoint import Checkpoint


def open_checkpoint(root: Path) -> Checkpoint:
    """Open the weights of a model directory. Raises ``ModelError``."""
    file = gguf_file(root)
    if file is None:
        return Checkpoint(root)
    from engine.models.gguf_weights import GgufCheckpoint  # imports the gguf package

    return GgufCheckpoint(file)
