"""The code of docs/policy-guide.md runs as it stands there."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.simulate import expected, make_request, make_run, random_requests

from engine.sched import CachePolicy, Policy, Resource, Scheduler
from tools.guide_members import document

GUIDE = Path(__file__).parents[2] / "docs" / "policy-guide.md"
TEXT = GUIDE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
KINDS = (CachePolicy, Policy, Resource, Scheduler)


def classes() -> list[Any]:
    """What the guide defines, in its order."""
    found = []
    for block in BLOCKS:
        if re.search(r"^class ", block, re.MULTILINE):
            names: dict[str, Any] = {"__name__": "guide"}
            exec(compile(block, str(GUIDE), "exec"), names)
            found += [
                value
                for name, value in names.items()
                if isinstance(value, type)
                and value not in KINDS
                and re.search(rf"^class {name}\b", block, re.M)
            ]
    return found


CLASSES = classes()


@pytest.mark.parametrize("cls", CLASSES)
def test_everybody_gets_their_tokens(cls: Any, seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, Any]
    if issubclass(cls, Policy):
        options = {"policy": cls()}
    elif issubclass(cls, Resource):
        options = {"resources": (cls(),)}
    elif issubclass(cls, Scheduler):
        options = {"scheduler_cls": cls}
    elif issubclass(cls, CachePolicy):
        options = {"cache_policy": cls()}
    else:
        options = {"length_predictor": cls, "policy": "ltr"}
    sizes = {"num_blocks": 16, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    run = make_run(depth=2, max_model_len=48, **sizes, **options)
    wanted = {}
    for request in random_requests(rng, 30):
        name, prompt, count = request.request_id, request.prompt_token_ids, request.max_tokens
        run.add(make_request(name, prompt, count, user=rng.choice(["batch", "ann", "ben"])))
        wanted[name] = expected(prompt, count)
        run.step()
    run.drain()
    assert run.outputs == wanted
    assert run.scheduler.guard.faults.messages == []


def test_members_of_the_view_are_those_of_the_code() -> None:
    assert document() == TEXT, "run: python tools/guide_members.py"
