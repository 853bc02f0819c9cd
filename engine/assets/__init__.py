"""The model in the box: a small Llama checkpoint that ships with the package."""

from pathlib import Path

BOX_MODEL: Path = Path(__file__).parent / "metronome-3m"
"""Directory of the model, in the Hugging Face layout; its README.md is the model card."""
