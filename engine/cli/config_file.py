"""Reads options from a YAML file, whose keys are option names; the command line has priority."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from engine.cli.parser import OptionParser
from engine.errors import ConfigError, reason_of

OPTION = "--config"
NOT_IN_FILES = ("config", "help")


def add_config_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        OPTION,
        metavar="FILE",
        help="YAML file with options, whose keys are their names (max-num-seqs: 8); options on "
        "the command line override it",
    )


class ConfigEntry(NamedTuple):
    """A key of the option file, with its value and line number."""

    place: str
    key: str
    value: Any


def apply(parser: OptionParser, parsed: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Set options that the command line leaves out to the values in the ``--config`` file, if any.

    arguments: the command line. Raises ``ConfigError`` that names file, line and key."""
    path = getattr(parsed, "config", None)
    if path is None:
        return
    typed = {parser.options[name].dest for name in _names(arguments) if name in parser.options}
    if getattr(parsed, "model_tag", None) is not None:
        typed.add("model")
    seen: dict[str, str] = {}
    for entry in _entries(path):
        name = _option(entry.key)
        action = parser.options.get(name)
        if action is not None and action.dest in NOT_IN_FILES:
            raise ConfigError(f"{entry.place}: {name} belongs on the command line: leave it out")
        if action is None:
            raise ConfigError(f"{entry.place}: {parser.unknown_option(name)}")
        if action.dest in seen:
            raise ConfigError(f"{entry.place}: {entry.key} is given twice, as {seen[action.dest]}")
        seen[action.dest] = entry.key
        if entry.value is not None:
            value = _value(parser, action, entry)
            if action.dest not in typed:
                setattr(parsed, action.dest, value)


def _names(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the names of options on the command line."""
    for each in arguments:
        if each == "--":
            return
        yield each.partition("=")[0]


def _option(key: str) -> str:
    """Convert a key of the option file to the option on the command line, such as ``max_num_seqs``
    to ``--max-num-seqs``. vLLM's key ``model_tag`` becomes ``--model``."""
    name = key.removeprefix("--").replace("_", "-")
    return "--model" if name == "model-tag" else f"--{name}"


def _entries(path: str) -> list[ConfigEntry]:
    """Read the entries of a file. Raises ``ConfigError`` if it cannot be read."""
    try:
        text = Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{OPTION} is {path!r}, which cannot be read: {reason_of(error)}"
        ) from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None or loader.construct_object(node, deep=True) is None:
            return []
        if isinstance(node, yaml.MappingNode):
            loader.flatten_mapping(node)
            return [_entry(path, key, loader.construct_object(value)) for key, value in node.value]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {_problem(error)}") from error
    raise ConfigError(f"{path} has no keys: write option names and values, as in max-num-seqs: 8")


def _entry(path: str, key: yaml.Node, value: Any) -> ConfigEntry:
    return ConfigEntry(f"{path}, line {key.start_mark.line + 1}", str(key.value), value)


def _problem(error: Exception) -> str:
    """Describe a YAML error in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split()) or type(error).__name__


def _value(parser: OptionParser, action: argparse.Action, entry: ConfigEntry) -> Any:
    """Convert the value of an entry as the command line would. Raises ``ConfigError`` if it is
    invalid."""
    if action.nargs == 0:
        return _flag(action, entry)
    has_many = action.nargs == "+" or isinstance(action, argparse._AppendAction)
    if not has_many:
        return _read(parser, action, entry, entry.value)
    values = entry.value if isinstance(entry.value, list) else [entry.value]
    return [_read(parser, action, entry, each) for each in values]


def _flag(action: argparse.Action, entry: ConfigEntry) -> bool:
    if not isinstance(entry.value, bool):
        raise ConfigError(
            f"{entry.place}: {entry.key} is {entry.value!r:.80}, must be true or false"
        )
    is_negated = _option(entry.key).startswith("--no-") and len(action.option_strings) > 1
    return not entry.value if is_negated else entry.value


def _read(parser: OptionParser, action: argparse.Action, entry: ConfigEntry, value: Any) -> Any:
    """Convert a single value, or one element of a list, with the option's own parser. Raises
    ``ConfigError`` if it is invalid."""
    is_object = isinstance(value, dict)
    if (is_object and action.metavar != "JSON") or not isinstance(value, str | int | float | dict):
        wanted = "a JSON object" if action.metavar == "JSON" else "one value"
        raise ConfigError(f"{entry.place}: {entry.key} is {value!r:.80}, must be {wanted}")
    if isinstance(value, bool):
        raise ConfigError(
            f"{entry.place}: {entry.key} is {str(value).lower()}, a boolean, must be a text or "
            "number: put quotes around a text"
        )
    try:
        return parser.read(action, json.dumps(value) if is_object else str(value))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{entry.place}: {error}") from error
