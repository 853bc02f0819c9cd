"""Schemas as zod writes them: ``zod_schemas.mjs`` made ``zod.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path

from structured.written import SchemaCase

KEPT = Path(__file__).with_name("zod.jsonl")


def cases() -> list[SchemaCase]:
    lines = map(json.loads, KEPT.read_text(encoding="utf-8").splitlines())
    return [SchemaCase(f"{line['name']}, {line['how']}", line["schema"]) for line in lines]
