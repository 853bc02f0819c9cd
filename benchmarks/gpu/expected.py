"""What a row is expected to say: estimates made without a device, beside what one measures.

`python -m tools.gpu_estimate --write` makes them anew from the kernels as they are.
"""

from __future__ import annotations

import json
from pathlib import Path

from gpu.box import Row

PLACE = Path(__file__).with_name("expected.json")
FIELDS = {
    "decode": ("us", ("model", "batch", "context")),
    "prefill": ("us", ("model", "prompts")),
    "qwen3-0.6b": ("ms", ("what", "requests")),
    "llama-3.1-8b": ("ms", ("what", "requests")),
}


def name_of(section: str, row: Row) -> str:
    """By which an estimate of this row is known; empty where there is none of its kind."""
    if section not in FIELDS or row.get("cache", "bfloat16") != "bfloat16":
        return ""
    return ", ".join(str(row.get(field)) for field in (*FIELDS[section][1],))


def expected(device: str, section: str, row: Row) -> Row:
    """The estimate for a card of this name, as a field for the row; nothing if there is none."""
    card = next((card for card in ("h200", "h100") if card in device.lower()), "")
    found = json.loads(PLACE.read_text()).get(card, {}).get(section, {})
    value = found.get(name_of(section, row))
    return {} if value is None else {f"expected {FIELDS[section][0]}": value}
