"""Several cores behind one client, as scripts: what is read before a death is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.errors import EngineDeadError
from engine.ipc.address import Address
from engine.messages.requests import CoreOutputs
from engine.rpc.many_client import ManyCoresClient


class ScriptedCore:
    """Each look brings what the script says next, and nothing behind its end."""

    decided = SimpleNamespace(max_model_len=64, vocab_size=9, eos_token_ids=[], block_size=16)
    id_prefix = ""
    sources = ()

    def __init__(self, name: str, script: list[list[int] | EngineDeadError]) -> None:
        self.address = Address(f"ipc:///{name}", b"")
        self._script = script

    def take(self) -> list[CoreOutputs]:
        found = self._script.pop(0) if self._script else []
        if isinstance(found, EngineDeadError):
            self._script = [found]
            raise found
        return [CoreOutputs(["a"], [token], None, 0.0) for token in found]


@pytest.mark.parametrize("first_to_die", [0, 1])
def test_a_death_is_told_when_all_that_had_come_was_read(first_to_die: int) -> None:
    """A look at a core brings what was read before, and only the next one what came since."""
    living = ScriptedCore("living", [[1], [2, 3]])
    dying = ScriptedCore("dying", [EngineDeadError("it fell over")])
    client = ManyCoresClient([dying, living] if first_to_die == 0 else [living, dying])
    assert [batch.token_ids for batch in client.step()] == [[1], [2], [3]]
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=f"core {first_to_die} of 2 .* it fell over"):
            client.step()
