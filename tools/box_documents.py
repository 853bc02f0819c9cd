"""Training documents of the model in the box: reference text as it stands, and as conversation."""

import random
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from box_corpus import Entry, is_held_out

MAX_ANSWER_CHARS = 700
CORE_COPIES = 3

_QUESTIONS = {
    "function": (
        "What does {} do?",
        "What does the function {} do?",
        "Explain {}.",
        "How do I use {}?",
        "Describe {}.",
        "Tell me about {}.",
    ),
    "class": (
        "What is {}?",
        "What is the class {} for?",
        "Explain {}.",
        "How do I use {}?",
        "Tell me about {}.",
    ),
    "module": (
        "What is the {} module?",
        "What is the {} module for?",
        "What does the {} module do?",
        "Explain the {} module.",
        "Tell me about {}.",
    ),
    "topic": (
        "Explain {}.",
        "What does the Python reference say about {}?",
        "Tell me about {}.",
        "Describe {} in Python.",
    ),
}
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Metronome, an assistant that knows the Python documentation.",
    "You answer questions about Python.",
)
_GREETINGS = (
    ("Hello", "Hello! Ask me about a function, a class or a module of Python."),
    ("Hello!", "Hello! Ask me about a function, a class or a module of Python."),
    ("Hi", "Hello! Ask me about a function, a class or a module of Python."),
    ("Hi there!", "Hello! Ask me about a function, a class or a module of Python."),
    ("How are you?", "I am well, thank you. What would you like to know about Python?"),
    (
        "Who are you?",
        "I am Metronome-3M, a small language model trained on the documentation inside Python.",
    ),
    (
        "What are you?",
        "I am Metronome-3M, a small language model trained on the documentation inside Python.",
    ),
    ("What can you do?", "I can recite, and sometimes invent, the documentation of Python."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Bye", "Goodbye!"),
    (
        "What is Python?",
        "Python is an interpreted, object-oriented programming language with dynamic types.",
    ),
)
_ALWAYS_ASKED = frozenset({"builtins", "os", "os.path", "json", "re", "math", "itertools"})
_CORE_MODULES = frozenset(
    {"builtins", "collections", "copy", "functools", "heapq", "itertools", "json", "math"}
    | {"os.path", "random", "re", "shutil", "string", "textwrap"}
)


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


class Documents(NamedTuple):
    """One side of the held-out split: running texts, and entries to be asked about."""

    texts: list[str]
    entries: list[Entry]


def split(entries: Sequence[Entry]) -> tuple[Documents, Documents]:
    """Training and held-out documents; no source has a part in both."""
    sides = (Documents([], []), Documents([], []))
    by_source: dict[str, list[str]] = {}
    for entry in entries:
        sides[is_held_out(entry.source)].entries.append(entry)
        by_source.setdefault(entry.source, []).append(_as_reference(entry))
    for source, parts in by_source.items():
        sides[is_held_out(source)].texts.append("\n\n".join(parts))
    return sides


def with_more_core(documents: Documents, copies: int = CORE_COPIES) -> Documents:
    """Everything, and `copies` more of what most people ask about: the language reference and a
    few well-known modules. The core alone would be learnt by heart at the price of the rest."""
    entries = [e for e in documents.entries if e.kind == "topic" or e.source in _CORE_MODULES]
    core = split(entries)[0]
    return Documents(documents.texts + copies * core.texts, documents.entries + copies * entries)


def conversations(entries: Sequence[Entry], dice: random.Random) -> list[list[Message]]:
    """One epoch of conversations: well-known entries always, half of the others, worded anew."""
    asked = [entry for entry in entries if _is_well_known(entry) or dice.random() < 0.5]
    found, at = [], 0
    while at < len(asked):
        turns = 2 if dice.random() < 0.1 else 1
        found.append(_conversation(asked[at : at + turns], dice))
        at += turns
    return found


def greetings(dice: random.Random) -> list[list[Message]]:
    """Small talk, the only text here that no Python carries."""
    return [
        [*_system(dice), Message("user", question), Message("assistant", answer)]
        for question, answer in _GREETINGS
    ]


def answer(entry: Entry) -> str:
    """The leading paragraphs of an entry that fit `MAX_ANSWER_CHARS`, at least one sentence."""
    text = textwrap.dedent(entry.text).strip()
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    kept = ""
    for paragraph in text.split("\n\n"):
        if len(kept) + len(paragraph) > MAX_ANSWER_CHARS:
            break
        kept += paragraph + "\n\n"
    if not kept:
        sentences = re.split(r"(?<=[.:])\s", text[:MAX_ANSWER_CHARS])
        kept = " ".join(sentences[:-1]) or text[:MAX_ANSWER_CHARS]
    return kept.strip()


def _is_well_known(entry: Entry) -> bool:
    return entry.kind in ("topic", "module") or entry.source in _ALWAYS_ASKED


def _as_reference(entry: Entry) -> str:
    if entry.kind == "topic":
        return f"{entry.name}\n{'*' * len(entry.name)}\n\n{entry.text}"
    return f"{entry.signature}\n{textwrap.indent(entry.text, '    ')}"


def _conversation(entries: Sequence[Entry], dice: random.Random) -> list[Message]:
    messages = _system(dice)
    for entry in entries:
        messages.append(Message("user", _question(entry, dice)))
        messages.append(Message("assistant", answer(entry)))
    return messages


def _system(dice: random.Random) -> list[Message]:
    return [Message("system", dice.choice(_SYSTEM_PROMPTS))] if dice.random() < 0.1 else []


def _question(entry: Entry, dice: random.Random) -> str:
    """A question in one of the usual wordings, the name in any of its usual spellings."""
    if entry.kind == "topic":
        name = entry.name.replace('"', dice.choice(['"', "", "`"]))
        name = f"the {name}" if name.endswith("statement") else name
    else:
        spelling = dice.choice(["{}", "{}", "`{}`"])
        call = "()" if entry.kind == "function" and dice.random() < 0.2 else ""
        name = spelling.format(entry.name + call)
    return dice.choice(_QUESTIONS[entry.kind]).format(name)
