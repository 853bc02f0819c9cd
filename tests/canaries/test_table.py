"""Every canary can still be planted, and a few are found here; `tools/canaries.py` tries all."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("skip decref", "lose an abort")


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


canaries = load(ROOT / "tools" / "canaries.py")


@pytest.mark.parametrize("canary", canaries.CANARIES, ids=lambda canary: canary.name)
def test_a_canary_can_be_planted(canary):
    source = (ROOT / "engine" / canary.file).read_text(encoding="utf-8")
    planted = canaries.planted(canary, source)
    assert planted != source
    compile(planted, canary.file, "exec")


def test_a_canary_survives_a_rename_and_no_change_of_what_it_breaks():
    canary = next(canary for canary in canaries.CANARIES if canary.name == "lose a seat")
    place = "        self._free_slots.append( seat )\n"
    source = f"class Seats:\n    def free(self, seat):\n{place}        self.n(seat)\n"
    assert canaries.planted(canary, source).split() == source.replace(place, "").split()
    for other in (2 * place, place.replace("append(", "add(1 +")):
        with pytest.raises(LookupError, match="has changed"):
            canaries.planted(canary, source.replace(place, other))


@pytest.mark.parametrize("name", QUICK)
def test_a_canary_is_found(name):
    canary = next(canary for canary in canaries.CANARIES if canary.name == name)
    found = canaries.hunt(canary, max_steps=20_000)
    assert found.message, f"{name} sang for {found.num_steps} steps"
