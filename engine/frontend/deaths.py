"""Describes how an engine ended."""

from __future__ import annotations

import logging

from engine.errors import EngineDeadError

logger = logging.getLogger(__name__)


def death_by(cause: BaseException | None) -> EngineDeadError:
    """The error for an engine whose thread ended with ``cause``; ``None``: it was shut down."""
    if cause is None:
        return EngineDeadError("the engine was shut down")
    if isinstance(cause, EngineDeadError):
        return cause
    death = EngineDeadError(f"the engine core has died: {type(cause).__name__}: {cause}")
    death.__cause__ = cause
    return death


def log_death(death: EngineDeadError) -> None:
    """Log the cause of death, with its traceback unless another process has printed it."""
    cause = death.__cause__
    is_here = cause is not None and cause.__traceback__ is not None
    logger.critical("%s", death, exc_info=cause if is_here else None)
