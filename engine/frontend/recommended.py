"""Default sampling parameters from a model's ``generation_config.json``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.config.model import ModelConfig, read_json
from engine.config.near import did_you_mean
from engine.errors import ConfigError, RequestError
from engine.messages.params import SamplingParams

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
AUTO, NOTHING = "auto", "vllm"
FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of the file that are used -> fields of ``SamplingParams``."""
INTEGERS = ("top_k", "max_new_tokens")


def recommended_sampling(config: ModelConfig) -> Mapping[str, Any]:
    """Defaults for fields of ``SamplingParams`` that a request leaves out.

    An invalid value in the file is ignored and logged. Raises ``ConfigError`` if a directory that
    the user chose lacks the file, and for an invalid value in ``override_generation_config``."""
    file = _file(config)
    values = {} if file is None else _from_file(file)
    override = config.override_generation_config or {}
    for key, value in override.items():
        if key not in FIELDS:
            raise ConfigError(
                f"override_generation_config has the unknown key {key!r:.80}; there are: "
                f"{', '.join(FIELDS)}{did_you_mean(str(key), FIELDS)}"
            )
        if value is None:
            values.pop(FIELDS[key], None)
        elif (fault := _fault(key, value)) is not None:
            raise ConfigError(f"override_generation_config: {fault}")
        else:
            values[FIELDS[key]] = _number(key, value)
    if values:
        places = [str(file)] if file is not None else []
        places += ["override_generation_config"] if override else []
        logger.info(
            "default sampling parameters from %s: %s",
            " and ".join(places),
            ", ".join(f"{name} {value}" for name, value in values.items()),
        )
    return MappingProxyType(values)


def _file(config: ModelConfig) -> Path | None:
    """Path of the generation_config.json to use; ``None`` if the options select none or the model's
    directory has none. Raises ``ConfigError`` if the directory that a user chose lacks the file."""
    if config.generation_config == NOTHING:
        return None
    if config.generation_config == AUTO:
        path = Path(config.model).expanduser() / FILE
        return path if path.is_file() else None
    path = Path(config.generation_config).expanduser() / FILE
    if not path.is_file():
        raise ConfigError(
            f"generation_config is {config.generation_config!r}, must be 'auto' (the file in the "
            f"model's directory), 'vllm' (none), or a directory with {FILE}"
        )
    return path


def _from_file(file: Path) -> dict[str, Any]:
    values = {}
    content = read_json(file) or {}
    for key, field in FIELDS.items():
        value = content.get(key)
        if value is None:
            continue
        if (fault := _fault(key, value)) is None:
            values[field] = _number(key, value)
        else:
            logger.warning("%s: %s; the value is ignored", file, fault)
    return values


def _fault(key: str, value: object) -> str | None:
    """Why a value for this key is invalid, for a message; ``None`` if it is valid."""
    try:
        SamplingParams(**{FIELDS[key]: _number(key, value)})
    except RequestError as error:
        return str(error).replace(FIELDS[key], key, 1)
    return None


def _number(key: str, value: Any) -> Any:
    """Convert a float such as 20.0 to an integer if the field needs an integer."""
    is_integer = key in INTEGERS and isinstance(value, float) and value.is_integer()
    return int(value) if is_integer else value
