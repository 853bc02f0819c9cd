"""Packed training windows of the model in the box, the same for the same seed."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from box_documents import Documents, conversations, greetings
from box_tokenizer import END_OF_TEXT, render_chat
from tokenizers import Tokenizer
from torch import Tensor


class Stage(NamedTuple):
    """Steps that share a window length and a choice of documents."""

    steps: int
    rows: int
    length: int
    documents: Documents


def batches(plan: Sequence[Stage], tokenizer: Tokenizer, seed: int) -> Iterator[Tensor]:
    """Training batches of every stage in turn; each is [rows, length + 1]."""
    dice = random.Random(seed)
    for stage in plan:
        pieces = _pieces(stage.documents, tokenizer, dice)
        packed = _windows(pieces, stage.length + 1, dice)
        for _ in range(stage.steps):
            yield torch.tensor([next(packed) for _ in range(stage.rows)])


def held_out_batches(
    documents: Documents, tokenizer: Tokenizer, length: int = 1024
) -> dict[str, Tensor]:
    """Held-out text and held-out conversations, each as [rows, length + 1]."""
    chats = [render_chat(c) for c in conversations(documents.entries, random.Random(0))]
    found = {}
    for name, texts in (("text", documents.texts), ("chat", chats)):
        pieces = iter(_encode(texts, tokenizer))
        ids = [token for piece in pieces for token in piece]
        rows = len(ids) // (length + 1)
        found[name] = torch.tensor(ids[: rows * (length + 1)]).view(rows, length + 1)
    return found


def _pieces(documents: Documents, tokenizer: Tokenizer, dice: random.Random) -> Iterator[list[int]]:
    """Tokens of document after document, in a new order and with new questions every epoch."""
    while True:
        chats = conversations(documents.entries, dice) + greetings(dice)
        texts = documents.texts + [render_chat(chat) for chat in chats]
        dice.shuffle(texts)
        for start in range(0, len(texts), 512):
            yield from _encode(texts[start : start + 512], tokenizer)


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    return [item.ids for item in tokenizer.encode_batch([text + END_OF_TEXT for text in texts])]


def _windows(pieces: Iterator[list[int]], length: int, dice: random.Random) -> Iterator[list[int]]:
    """Windows of `length` tokens.

    What a window cuts off opens the next one, but a short rest is dropped half of the time: many
    windows then begin as a prompt does, at the beginning of a document.
    """
    window: list[int] = []
    for piece in pieces:
        rest = piece
        while len(window) + len(rest) >= length:
            cut = length - len(window)
            yield window + rest[:cut]
            window, rest = [], rest[cut:]
            if len(rest) < length and dice.random() < 0.5:
                rest = []
        window = window + rest
