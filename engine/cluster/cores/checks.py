"""Compares the nodes of a cluster with the machine of the front end, before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.assets import BOX_MODEL
from engine.cluster.cores.node import describe, fingerprint
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


def local_model(config: EngineConfig) -> str | None:
    """The path of a model that must exist on every node; ``None`` if each node has or fetches its
    own."""
    model = config.model.model
    return None if model == str(BOX_MODEL) or is_hub_name(model) else str(Path(model).absolute())


def wanted_from(config: EngineConfig) -> tuple[Sequence[str], str | None, Sequence[str]]:
    """The arguments of ``describe`` for this configuration."""
    return PACKAGES, local_model(config), VARIABLES


def check_nodes(config: EngineConfig, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ConfigError`` naming each node that differs from this machine, the value and the way
    out. nodes: results of ``CoreNode.report``."""
    here = describe(*wanted_from(config))
    here["secret"] = fingerprint(config.core.core_secret)
    by_id = {node["node"]: node for node in nodes}
    problems = [
        f"node {node['ip']} ({node['host']}): {problem}"
        for node in by_id.values()
        for problem in problems_of(here, node, local_model(config))
    ]
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ConfigError(
            "cores cannot start on this cluster: " + "; ".join([*problems[:SHOWN], *more])
        )


def problems_of(
    here: Mapping[str, Any], node: Mapping[str, Any], model: str | None
) -> Iterator[str]:
    """What must be changed on a node, compared with this machine, ``here``."""
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
    if model is not None:
        yield from _problems_of_files(here["files"], node["files"], model)


def _problems_of_files(
    here: Mapping[str, int], node: Mapping[str, int], model: str
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
            yield f"model {model}: {name} has {node[name]} bytes, here {here[name]}; copy it"
