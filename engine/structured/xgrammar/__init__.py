"""Compiles grammars with xgrammar, an optional package: the modules here load only if it exists."""

from __future__ import annotations

from importlib.util import find_spec

NOT_INSTALLED = (
    "backend is 'xgrammar', which is not installed where the model runs: pip install "
    "metronome-engine[xgrammar], or leave backend out"
)


def is_installed() -> bool:
    """Whether xgrammar is installed. Does not import it."""
    return find_spec("xgrammar") is not None
