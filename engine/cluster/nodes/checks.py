"""Compares the nodes of a cluster with this machine, before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.assets import BOX_MODEL
from engine.cluster.nodes.node import describe, fingerprint
from engine.config.engine import EngineConfig
from engine.config.env import CORE_SECRET, CPU_ISA, INTERPRET_CUDA
from engine.config.model import is_hub_name
from engine.errors import ConfigError

PACKAGES = (
    "metronome-engine", "torch", "transformers", "tokenizers", "safetensors", "numpy", "numba",
    "msgspec", "pyzmq", "llguidance", "ray",
)  # fmt: skip
VARIABLES = (CPU_ISA, INTERPRET_CUDA)  # they change what a core computes
SHOWN = 8  # problems named in an error


def local_models(config: EngineConfig, drafting: str | None = None) -> list[str]:
    """The paths of models that must exist on every node; without those that each node has or
    fetches itself. drafting: the path of a draft model."""
    named = [config.model.model, *([] if drafting is None else [drafting])]
    paths = [model for model in named if model != str(BOX_MODEL) and not is_hub_name(model)]
    return [str(Path(model).absolute()) for model in paths]


def wanted_from(models: Sequence[str]) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """The arguments of ``describe`` for an engine with these local models."""
    return PACKAGES, models, VARIABLES


def check_nodes(
    secret: str | None,
    reports: Sequence[tuple[str, Mapping[str, Any]]],
    what: str,
    *,
    are_ranks: bool = False,
) -> None:
    """Raise ``ConfigError`` naming each node that differs from this machine, the value and the way
    out.

    secret: of this machine. reports: what runs on a node, for messages (may be empty), and the
    result of ``Keeper.report``. what: cannot start if a node differs. are_ranks: of one model, so
    that their processors must have the same instructions, too."""
    by_id = {about["node"]: (title, about) for title, about in reversed(reports)}
    here = describe(*wanted_from(list(reports[0][1]["models"]) if reports else []))
    here["secret"] = fingerprint(secret)
    if not are_ranks:
        here["processor"] = ""
    problems = [
        f"{f'{title} on ' if title else ''}node {about['ip']} ({about['host']}): {problem}"
        for title, about in reversed(by_id.values())
        for problem in problems_of(here, about)
    ]
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ConfigError(
            f"{what} cannot start on this cluster: " + "; ".join([*problems[:SHOWN], *more])
        )


def problems_of(here: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[str]:
    """What must be changed on a node, compared with this machine, ``here``."""
    yield from _problems_of_versions(here, node)
    if node["source"] != here["source"] and here["versions"] == node["versions"]:
        yield (
            f"the files of the engine differ ({node['source']}, here {here['source']}); install "
            "the same ones on both"
        )
    if here["processor"] and node["processor"] != here["processor"]:
        yield (
            f"its processor has {node['processor'] or 'no vector instructions'}, that of this "
            f"machine {here['processor']}; ranks of one model need processors alike"
        )
    yield from _problems_of_environment(here, node)
    for model, files in here["models"].items():
        yield from _problems_of_files(files, node["models"][model], model)


def _problems_of_versions(here: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[str]:
    if node["python"] != here["python"]:
        yield (f"Python is {node['python']}, here {here['python']}; use the same version on both")
    for package, version in here["versions"].items():
        other = node["versions"][package]
        if other is None and version is not None:
            yield f"{package} is not installed; pip install {package}=={version}, as here"
            if package == PACKAGES[0]:  # it brings the others
                return
        elif other != version and version is not None:
            yield f"{package} is {other}, here {version}; install the same version on both"


def _problems_of_environment(here: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[str]:
    for name, value in here["variables"].items():
        other = node["variables"][name]
        if other not in (None, value):
            yield (
                f"{name} is {other!r}, here {value!r}; set the same value before `ray start` there "
                "and here, or nowhere"
            )
    if here["secret"] is not None and node["secret"] != here["secret"]:
        how = "not set" if node["secret"] is None else "another secret"
        yield (
            f"{CORE_SECRET} is {how}; set the secret of this machine before `ray start`, or unset "
            "it here: a new one is then made for each start and sent by Ray"
        )


def _problems_of_files(
    here: Mapping[str, str], node: Mapping[str, str], model: str
) -> Iterator[str]:
    if not node:
        yield (
            f"model {model} does not exist; copy it to the same path, mount a shared directory, or "
            "name the model by its repository"
        )
        return
    for name in sorted(here):
        if name not in node:
            yield f"model {model} has no file {name}; copy it from here"
        elif here[name] != node[name]:
            yield f"model {model}: {name} has {node[name]}, here {here[name]}; copy it"
