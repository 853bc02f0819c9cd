"""Finds the bytes of each token. The bytes of a text are those of its tokens, joined."""

from __future__ import annotations

from tokenizers import Tokenizer

from engine.text.token_texts import REPLACEMENT, flat_parts

SPACE = "\u2581"  # stands for a space in tokens of SentencePiece


class TokenBytes(dict[int, bytes | None]):
    """The bytes of each token id, computed at first use; for a special token, the bytes of its
    name.

    ``None`` if the token is part of a character and the tokenizer does not reveal its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        parts = [] if tokenizer.decoder is None else flat_parts(tokenizer.decoder)
        kinds = {part["type"] for part in parts}
        self._letters = byte_letters() if "ByteLevel" in kinds else {}
        self._has_bytes = "ByteFallback" in kinds
        self._replaced = [
            (part["pattern"]["String"], part["content"])
            for part in parts
            if part["type"] == "Replace" and "String" in part["pattern"]
        ]
        if "Metaspace" in kinds:
            self._replaced.append((SPACE, " "))
        self._is_known = bool(kinds & {"ByteLevel", "ByteFallback", "Metaspace"})
        added = tokenizer.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}

    def __missing__(self, token_id: int) -> bytes | None:
        found = self[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> bytes | None:
        if token_id in self._added:
            return self._added[token_id].encode()
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if not self._is_known:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            return None if REPLACEMENT in text else text.encode()
        if self._letters and all(letter in self._letters for letter in name):
            return bytes(self._letters[letter] for letter in name)
        if self._has_bytes and len(name) == 6 and name.startswith("<0x"):
            return bytes([int(name[3:5], 16)])
        for old, new in self._replaced:
            name = name.replace(old, new)
        return name.encode()


def byte_letters() -> dict[str, int]:
    """Return the byte for each letter of a byte-level vocabulary: a printable letter stands for its
    own code, the letters from 256 on stand for the other bytes in ascending order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
