"""Puts loads of LoRA adapters into a case: slow ones, failing ones, replacements and unloads.

A separate random generator leaves the rest of the case unchanged."""

from __future__ import annotations

from random import Random

import msgspec

from engine.messages.adapters import AdapterSource
from engine.messages.requests import AddRequest
from policylab.verify.adapters import BROKEN
from policylab.verify.case import Add, Case, Event, Load, Unload, Write

edit = msgspec.structs.replace
PATHS = {"x": "x", "y": "y", "z": "x"}  # by name; two names have the same files


def with_adapters(case: Case, seed: int) -> Case:
    """The case with sources of its requests' adapters, and with clients that load others."""
    rng = Random(f"adapters of {seed}")
    if "adapters" not in case.setup.needs:
        return case
    events: list[Event] = []
    breaks, changes, loads = (rng.choice((0.0, 0.1, 0.3)) for _ in range(3))
    for number, event in enumerate(case.events):
        if isinstance(event, Add):
            events.append(edit(event, request=_with_source(rng, event.request)))
        else:
            events.append(event)
        if rng.random() < changes:
            path = rng.choice("xy")
            is_broken = rng.random() < breaks
            events.append(Write(event.at, path, f"{path}{number}{BROKEN * is_broken}"))
        if rng.random() < loads:
            name = rng.choice("xyz")
            is_gone = rng.random() < 0.3
            load = Load(event.at, name, PATHS[name], replaces=rng.random() < 0.6)
            events.append(Unload(event.at, name) if is_gone else load)
    return edit(case, events=events)


def _with_source(rng: Random, request: AddRequest) -> AddRequest:
    """The request, sometimes with the path of its adapter, and sometimes to replace it."""
    if request.adapter is None or rng.random() < 0.3:
        return request
    source = AdapterSource(PATHS[request.adapter], replaces=rng.random() < 0.15)
    return edit(request, adapter_source=source)
