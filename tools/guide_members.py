"""Writes the table of requests, `view.cost`, `view.adapters`, `view.kv` and `view.lengths` in
`docs/policy-guide.md`.

    python tools/guide_members.py

Signatures and sentences are read from the code; `tests/unit/test_guide.py` compares the page.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.kv.manager import KVManager
from engine.sched.adapters import AdapterPlaces
from engine.sched.predict.cost import CostModel
from engine.sched.predict.lengths import LengthHistory
from engine.sched.request import Request

TARGET = Path(__file__).resolve().parent.parent / "docs" / "policy-guide.md"
BEGIN, END = "<!-- members -->\n", "<!-- members end -->\n"
PLAIN = {
    "num_prompt": "Prompt tokens.",
    "arrival": "Number of arrival, which breaks ties.",
}
"""Attributes without a property, all of them ``int``."""
MEMBERS: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    (
        "req",
        Request,
        (
            *(*PLAIN, "num_output", "num_computed", "num_uncomputed", "num_cached"),
            *("num_preempted", "max_total", "arrival_time", "first_token_time"),
            *("last_token_time", "is_waiting", "priority", "user", "deadline", "tbt", "hints"),
            "adapter",
        ),
    ),
    ("view.cost", CostModel, ("step_seconds", "prefill_seconds", "max_tokens", "load_seconds")),
    (
        "view.adapters",
        AdapterPlaces,
        ("num_slots", "in_slots", "in_use", "num_running", "place"),
    ),
    (
        "view.kv",
        KVManager,
        (
            *("num_free", "num_pinned", "num_usable", "num_blocks", "usage", "blocks_for", "held"),
            *("missing", "cached_prefix", "ready", "peak"),
        ),
    ),
    ("view.lengths", LengthHistory, ("__len__", "mean", "means", "quantile", "sample")),
)


def table() -> str:
    """All members, one a line."""
    lines = ["| member | answer |\n", "|---|---|\n"]
    for place, cls, names in MEMBERS:
        lines += [f"| `{_shown(place, cls, name)}` | {_answer(cls, name)} |\n" for name in names]
    return "".join(lines)


def _shown(place: str, cls: type, name: str) -> str:
    member = inspect.getattr_static(cls, name)
    if name in PLAIN:
        return f"{place}.{name}: int"
    if isinstance(member, property):
        assert member.fget is not None
        kind = str(inspect.signature(member.fget).return_annotation).replace(" | ", r" \| ")
        return f"{place}.{name}: {kind}"
    given = inspect.signature(member)
    own = [each for each in given.parameters.values() if each.name != "self"]
    plain = str(given.replace(parameters=own)).replace("'", "")
    plain = plain.replace("KVRequest", "Request").replace("[Any]", "[Request]")
    called = f"len({place})" if name == "__len__" else f"{place}.{name}{plain}"
    return called.replace("[Any, int]", "[Request, int]").replace("|", "\\|")


def _answer(cls: type, name: str) -> str:
    if name in PLAIN:
        return PLAIN[name]
    if name == "__len__":
        return "How many lengths are known: those of the last 1000 requests that ended."
    words = inspect.getdoc(inspect.getattr_static(cls, name)) or ""
    return " ".join(words.replace("``", "`").split()).replace("|", "\\|")


def document() -> str:
    """The guide as it should be."""
    written = TARGET.read_text(encoding="utf-8")
    before, _, rest = written.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
