"""What holds for every shipped policy."""

from __future__ import annotations

import ast
from contextlib import suppress
from pathlib import Path

import pytest
from support.simulate import make_request, make_run

import engine.sched
from engine.config.sched import SchedulerConfig
from engine.errors import RequestError
from engine.sched.plugins.find import find_policy
from engine.sched.policies import POLICIES

FILES = sorted((Path(engine.sched.__file__).parent / "policies").glob("*.py"))
ALLOWED = (
    "__future__",
    "numpy",
    "typing",
    "collections",
    "collections.abc",
    "math",
    "heapq",
    "itertools",
)
README = Path(__file__).resolve().parents[2] / "README.md"


def test_all_published_policies_are_there():
    assert f"{len(POLICIES)} published policies ship" in README.read_text(encoding="utf-8")
    assert set(POLICIES) == {name.lower() for name in POLICIES}
    assert not any("_" in name or " " in name for name in POLICIES)


def test_a_shipped_policy_is_found_by_name_with_its_options():
    policy = find_policy("fastserve", {"quantum": 0.5})
    assert policy.quantum == 0.5
    for name, cls in POLICIES.items():
        assert type(find_policy(name, {})) is cls
        assert SchedulerConfig(scheduling_policy=name).scheduling_policy == name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_policy_is_short_and_uses_the_public_module_alone(path):
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    num_imports = sum((n.end_lineno or n.lineno) - n.lineno + 1 for n in imports)
    assert len(source.splitlines()) - num_imports <= 60
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module]
        else:
            continue
        for module in imported:
            own = path.stem == "__init__" and module.startswith("engine.sched.policies.")
            assert own or module == "engine.sched" or module in ALLOWED, module


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_says_what_it_does_and_where_it_comes_from(name):
    cls = POLICIES[name]
    assert cls.__doc__
    module = ast.parse(
        next(p for p in FILES if p.stem == cls.__module__.split(".")[-1]).read_text()
    )
    assert ast.get_docstring(module)
    init = cls.__dict__.get("__init__")
    if init is not None:
        for option in init.__code__.co_varnames[1 : init.__code__.co_argcount]:
            assert f"``{option}``" in cls.__doc__, f"{option} is not explained"


@pytest.mark.parametrize("hint", ["ttft", "tbt", "offline", "program", "output_tokens"])
@pytest.mark.parametrize("name", POLICIES)
def test_no_hint_of_one_client_brings_a_policy_down(name, hint):
    """It is refused, or taken as it is: no fault, else one client could have it left out."""
    wrong = (None, "x", "5", b"x", float("nan"), float("inf"), -1, 0, 10**400, True, [1], {})
    run = make_run(policy=name, max_policy_faults=0)
    for index, value in enumerate(wrong):
        with suppress(RequestError):
            run.add(make_request(str(index), [index + 1] * 4, 3, hints={hint: value}))
        run.step()
    run.drain()
    assert not run.scheduler.guard.faults.messages
