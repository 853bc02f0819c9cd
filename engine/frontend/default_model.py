"""Names the default model in options that name no model."""

from __future__ import annotations

from dataclasses import replace

from engine.assets.default_model import default_model
from engine.config.args import EngineArgs
from engine.config.check import check_types
from engine.config.env import default_log_level
from engine.observe.logs import set_up_logging


def with_default_model(args: EngineArgs) -> EngineArgs:
    """Return the options with the default model if they name none, and log which model it is.

    An engine that connects to a running core gets no model here: that core has chosen one. Raises
    ``ConfigError`` for an option of the wrong type."""
    if args.model is not None or args.core_address is not None:
        return args
    check_types(args)
    set_up_logging(default_log_level() if args.log_level is None else args.log_level)
    return replace(args, model=default_model())
