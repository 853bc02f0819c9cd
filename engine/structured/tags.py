"""Structural tags: free text with tagged parts, whose contents must follow a JSON schema.

    text ... <function=search>{"query": "..."}</function> text ...

Once the model has written a trigger, such as ``<function=``, it must complete one of the tags that
start with the trigger. The input is vLLM's older format with ``structures`` and ``triggers``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

SpecialOf = Callable[[str], int | None]


def none_special(text: str) -> int | None:
    """A ``SpecialOf`` for grammars without special tokens: ``None`` for every text."""
    return None


def lark_of(tags: dict[str, Any], special_of: SpecialOf, name: str = "of") -> str:
    """Convert structural tags to a Lark grammar; ``@name_n`` in it is the schema of structure n.

    special_of: returns the id of the special token with a given text, or ``None``. A trigger that
    is a special token must be written as this token."""
    structures = tags["structures"]
    rules = []
    for number, structure in enumerate(structures):
        trigger = trigger_of(structure, tags["triggers"])
        rest = _text(structure["begin"][len(trigger) :])
        body = f"{rest} @{name}_{number} {_text(structure['end'])}"
        token = special_of(trigger)
        if token is not None:
            rules.append(f"tag_{number}: TEXT <[{token}]> {body}")
        else:
            rules.append(f"opened_{number}[lazy]: TEXT {_text(trigger)}")
            rules.append(f"tag_{number}: opened_{number} {body}")
    openings = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return "\n".join([f"start: ({openings})* rest", "rest: TEXT", "TEXT: /(.|\\n)*/", *rules])


def trigger_of(structure: dict[str, Any], triggers: list[str]) -> str:
    """Find the longest trigger that the tag begins with. Raises ``ValueError`` if none fits."""
    found = [trigger for trigger in triggers if structure["begin"].startswith(trigger)]
    if not found:
        raise ValueError(
            f"begin is {structure['begin']!r:.80}, which starts with none of the triggers: add one"
        )
    return max(found, key=len)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
