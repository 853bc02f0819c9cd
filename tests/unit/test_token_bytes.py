"""Bytes of tokens: those of a text's tokens are the text, for every kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import made_tokenizers as made
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from engine.config.model import ModelConfig
from engine.text.tokenizer import RustBackend, Tokenizer, load_tokenizer

STRANGE = "\u00a0\u2581 \u0000\u007f\u00ad é e\u0301 \U0001f468\u200d\U0001f469 \ufdfd \U0001d518"
TEXTS = [*made.TEXT[:4], STRANGE, "<0x41> <s> a  b"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", made.MAKERS)
def test_those_of_its_tokens_are_the_text(tmp_path: Path, kind: str, text: str) -> None:
    root = made.save(tmp_path, made.MAKERS[kind]())
    tokenizer = load_tokenizer(ModelConfig(model=str(root)))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    parts = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    joined = b"".join(part for part in parts if part is not None).decode()
    if kind == "metaspace":  # it puts one space in front, and takes it away again
        joined = joined.removeprefix(" ")
    assert joined == tokenizer.decode(token_ids, skip_special_tokens=False)
    if text == STRANGE:  # which it has not learnt
        assert any(part is not None and len(part) == 1 and part[0] > 127 for part in parts)


def test_every_byte_is_a_token_of_its_own_or_has_one(tmp_path: Path) -> None:
    for kind in made.MAKERS:
        root = made.save(tmp_path / kind, made.MAKERS[kind]())
        tokenizer = load_tokenizer(ModelConfig(model=str(root)))
        found = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
        assert {bytes([byte]) for byte in range(256)} <= found
        assert tokenizer.token_bytes(1) == b"<s>"
        assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_a_tokenizer_of_words_has_their_texts() -> None:
    backend = RustTokenizer(models.WordPiece({"[UNK]": 0, "caf": 1, "##é": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(RustBackend(backend), {}, {})
    assert tokenizer.token_bytes(1) == b"caf" and tokenizer.token_bytes(2) == "##é".encode()
