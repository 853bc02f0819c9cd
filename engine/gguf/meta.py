"""Typed values of a GGUF file's metadata, checked before use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import ModelError
from engine.gguf.header import GgufHeader

MAX_COUNT = 2**31 - 1
ABSENT: Any = object()


@dataclass(frozen=True)
class Meta:
    """The metadata of one file. Keys are relative to the architecture's name, for example
    ``block_count`` for ``llama.block_count``. Without a default, a key must be there."""

    header: GgufHeader

    @property
    def architecture(self) -> str:
        found = self.header.metadata.get("general.architecture")
        if not isinstance(found, str) or not found:
            raise ModelError(
                f"{self.header.path} does not name its general.architecture; convert the model "
                "again with a current llama.cpp"
            )
        return found

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.header.metadata

    def count(
        self, key: str, default: Any = ABSENT, *, least: int = 1, most: int = MAX_COUNT
    ) -> Any:
        """Return a whole number from ``least`` to ``most``, or the default. An array with equal
        elements counts as one number. Raises ``ModelError`` for any other value."""
        found = self._value(key, default)
        if found is default:
            return default
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            raise self.wrong(key, found, f"a whole number from {least} to {most}")
        return found

    def real(self, key: str, default: Any = ABSENT, *, is_positive: bool = True) -> Any:
        """Return a finite number, or the default. Raises ``ModelError`` for any other value.

        Files store most numbers in 32 bits; the result is the shortest decimal number that rounds
        to the same 32 bits, which is the number that config.json had."""
        found = self._value(key, default)
        if found is default:
            return default
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not math.isfinite(found) or abs(found) > 1e30:
            raise self.wrong(key, found, "a finite number")
        if is_positive and found <= 0:
            raise self.wrong(key, found, "a number above 0")
        short = np.float32(found)
        return float(str(short)) if float(short) == found else float(found)

    def text(self, key: str, default: str = "") -> str:
        """Return a string, or the default. Raises ``ModelError`` for any other value."""
        found = self._value(key, default)
        if not isinstance(found, str):
            raise self.wrong(key, found, "a string")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value, or the default. Raises ``ModelError`` for any other value."""
        found = self._value(key, default)
        if not isinstance(found, bool):
            raise self.wrong(key, found, "true or false")
        return found

    def flags(self, key: str, length: int) -> list[bool] | None:
        """Return an array of ``length`` truth values; ``None`` if the value is a single number or
        missing. Raises ``ModelError`` for arrays of another kind."""
        found = self.header.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(found, np.ndarray | list):
            return None
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "bui":
            raise self.wrong(key, found, "an array of truth values")
        if len(found) != length:
            raise self.wrong(key, found, f"an array of {length} truth values, one for each layer")
        return [bool(each) for each in found]

    def counts(self, key: str, length: int) -> list[int]:
        """Return an array of ``length`` whole numbers of at least 0; a single number stands for
        equal ones. Raises ``ModelError`` for any other value."""
        found = self._value(key, ABSENT)
        if not isinstance(found, np.ndarray):
            return [int(self.count(key, least=0))] * length
        if found.dtype.kind not in "ui" or len(found) != length or found.min() < 0:
            raise self.wrong(key, found, f"an array of {length} whole numbers, one for each layer")
        return [int(each) for each in found]

    def token(self, name: str, vocab_size: int) -> int | None:
        """Return the id of a special token, such as "bos"; ``None`` if the file names none in its
        vocabulary. Raises ``ModelError`` if the value is not a whole number."""
        key = f"tokenizer.ggml.{name}_token_id"
        found = self.header.metadata.get(key)
        if found is None:
            return None
        if not isinstance(found, int) or isinstance(found, bool):
            raise self.wrong(key, found, "a whole number", is_absolute=True)
        return found if 0 <= found < vocab_size else None

    def wrong(self, key: str, value: object, what: str, *, is_absolute: bool = False) -> ModelError:
        """Return an error about the value of a key. what: description of valid values."""
        name = key if is_absolute else f"{self.architecture}.{key}"
        if isinstance(value, np.ndarray | list):
            shown = f"an array of {len(value)} values"
        else:
            shown = f"{value!r:.60}"
        return ModelError(
            f"{self.header.path} is damaged or of an unknown kind: its {name:.80} is {shown}, "
            f"must be {what}; fetch the file again, or convert the model again"
        )

    def _value(self, key: str, default: Any) -> Any:
        """Return the value of a key; arrays with equal elements as one of them."""
        found = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if found is ABSENT:
            raise ModelError(
                f"{self.header.path} lacks the metadata key {self.architecture}.{key}; convert the "
                "model again with a current llama.cpp"
            )
        if isinstance(found, np.ndarray) and len(found) and (found == found[0]).all():
            return found[0].item()
        return found
