"""The corpus by family."""

from __future__ import annotations

from .corpus import (
    ANSWERS,
    BARE,
    EDIT,
    HARMONY,
    LLAMA,
    MISTRAL,
    MISTRAL_V3,
    OBJECTS,
    THOUGHT,
    Case,
    deepseek,
    deepseek_cases,
    deepseek_v31,
    hermes,
    of_arguments,
)
from .tagged import GLM, QWEN_CODER

TAGGED_OBJECTS = [
    *ANSWERS,
    *of_arguments(lambda arguments: hermes("edit", arguments)),
    *OBJECTS,
    THOUGHT,
]
NO_JSON = '<tool_call>{"arguments": "{\\"path\\": \\"a]}", "name": "edit"}</tool_call>'
CASES: dict[str, list[Case]] = {
    "hermes": [
        *TAGGED_OBJECTS,
        Case("an object after words", f"So:\n{BARE}", [], f"So:\n{BARE}"),
        Case("a string of arguments that is no JSON", NO_JSON, [], NO_JSON),
    ],
    "generic": [
        *TAGGED_OBJECTS,
        Case("an object after words", f"So:\n\n{BARE}\nDone.", [("edit", EDIT)], "So:\nDone."),
        Case("a fence after words", f"So:\n```\n{BARE}\n```", [("edit", EDIT)], "So:"),
        Case("an object in a line", f"Write {BARE}.", [], f"Write {BARE}."),
    ],
    "llama3-json": LLAMA,
    "mistral": MISTRAL,
    "mistral-v3": MISTRAL_V3,
    "deepseek": deepseek_cases(deepseek),
    "deepseek-v3.1": deepseek_cases(deepseek_v31),
    "gpt-oss": HARMONY,
    "qwen-coder": QWEN_CODER,
    "glm": GLM,
}
