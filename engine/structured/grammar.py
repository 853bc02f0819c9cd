"""What a backend of structured output must offer. Names nobody's library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Matcher(Protocol):
    """Follows one output through its grammar.

    Tokens that end a text are offered too; they are right where the grammar may end.
    """

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, from the first on. Changes nothing."""

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens follow; they are allowed."""


class Compilation(Protocol):
    """A grammar on its way."""

    def poll(self) -> Matcher | None:
        """A matcher at the beginning of the grammar, ``None`` while it is being compiled.

        Raises with what is wrong if the grammar cannot be used.
        """


class GrammarCompiler(Protocol):
    """Compiles in the background; equal grammars need compiling once."""

    def submit(self, grammar: str) -> Compilation:
        """Begin to compile and return at once. May raise like ``Compilation.poll``."""
