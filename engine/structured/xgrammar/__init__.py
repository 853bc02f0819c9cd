"""Grammars compiled by xgrammar, which is optional: modules are imported if it is installed."""

from __future__ import annotations

from importlib.util import find_spec

NOT_INSTALLED = (
    "backend is 'xgrammar', which is not installed where the model runs: pip install "
    "metronome-engine[xgrammar], or leave backend out"
)


def is_installed() -> bool:
    """Whether the library is there. Does not import it."""
    return find_spec("xgrammar") is not None
