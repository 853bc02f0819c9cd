"""A command-line parser whose error messages are one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from engine.config.foreign import refusal
from engine.config.near import did_you_mean, near_options, suggestion

KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}


class OptionParser(argparse.ArgumentParser):
    """``argparse`` with errors that show no usage, name what was typed, and suggest close names.
    Options may be written with underscores, as in vLLM."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        hint = f"; {self.prog} --help lists them" if "are required" in message else ""
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")

    def shorten_usage(self) -> None:
        """Show only positional arguments in the usage: all options would fill a screen."""
        formatter = self._get_formatter()
        formatter.add_usage(None, self._get_positional_actions(), [], prefix="")
        places = formatter.format_help().strip().removeprefix(self.prog).strip()
        self.usage = f"{self.prog} [options] {places}".strip()

    @property
    def options(self) -> dict[str, argparse.Action]:
        """All options, keyed by each of their spellings."""
        return dict(self._option_string_actions)

    def unknown(self, arguments: Sequence[str]) -> str:
        """Return the error for arguments that were not recognised."""
        typed = next((each for each in arguments if each.startswith("-")), arguments[0])
        name = typed.partition("=")[0]
        if not name.startswith("-"):
            usage = self.format_usage().removeprefix("usage: ").strip()
            return f"unexpected argument {typed!r}; usage: {usage}"
        return self.unknown_option(name)

    def unknown_option(self, name: str) -> str:
        """Return the error for an unknown option. name: as it was typed."""
        if (why := refusal(name.strip("-").replace("-", "_"), name)) is not None:
            return why
        near = near_options(name, [each for each in self.options if each.startswith("--")])
        hint = suggestion(near) or f"; {self.prog} --help lists the known ones"
        return f"unknown option {name!r}{hint}"

    def read(self, action: argparse.Action, text: str) -> Any:
        """Convert and check one value of an option. Raises ``argparse.ArgumentError``."""
        value = self._get_value(action, text)
        self._check_value(action, value)
        return value

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type not in KINDS:
            return super()._get_value(action, arg_string)
        kind: Callable[[str], Any] = action.type  # type: ignore[assignment]
        try:
            return kind(arg_string)
        except ValueError:
            message = f"{_named(action)} is {arg_string!r}, must be {KINDS[action.type]}"
            raise argparse.ArgumentError(None, message) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(each) for each in action.choices]
        hint = did_you_mean(str(value), known)
        if isinstance(action, argparse._SubParsersAction):
            kind = str(action.metavar or action.dest).lower()
            message = f"unknown {kind} {value!r}, there are: {', '.join(known)}{hint}"
        else:
            message = f"{_named(action)} is {value!r}, must be one of: {', '.join(known)}{hint}"
        raise argparse.ArgumentError(None, message)


def _named(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)


def spelled(arguments: Sequence[str]) -> list[str]:
    """Replace underscores in the names of options by hyphens."""
    written: list[str] = []
    for place, each in enumerate(arguments):
        if each == "--":
            return [*written, *arguments[place:]]
        name, equals, value = each.partition("=")
        written.append(f"{name.replace('_', '-')}{equals}{value}" if each[:2] == "--" else each)
    return written
