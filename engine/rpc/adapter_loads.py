"""AdapterLoads: which adapters clients have loaded, for cores that start again."""

from __future__ import annotations

from typing import Any, Protocol


class Callee(Protocol):
    """A core whose utilities can be called."""

    def call(self, name: str, *args: Any) -> Any: ...


class AdapterLoads:
    """What one client has loaded, removed and pinned. A core that starts again begins with the
    adapters of its own options; ``repeat`` makes up for the rest."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[Any, ...]] = {}  # arguments of ``put_adapter``, by name
        self._removed: set[str] = set()
        self._pinned: set[str] = set()

    def record(self, name: str, args: tuple[Any, ...], answer: Any) -> bool:
        """Record a utility call that all cores have answered. Returns whether it has loaded or
        removed an adapter."""
        if name == "put_adapter":
            _, adapter, _, *rest = args
            self._loaded[adapter] = ("", adapter, answer["number"], *rest)
            self._removed.discard(adapter)
        elif name == "remove_adapter" and answer is not None:
            self._loaded.pop(answer["name"], None)
            self._pinned.discard(answer["name"])
            self._removed.add(answer["name"])
        elif name == "pin_adapter" and answer:
            self._pinned.add(args[0])
        return name in ("put_adapter", "remove_adapter")

    def digests(self) -> dict[str, str]:
        """The digests of the loaded adapters, by name."""
        return {name: args[4] for name, args in self._loaded.items()}

    def repeat(self, core: Callee) -> None:
        """Make a core that was started again know the same adapters. It reads their files when
        they are first used."""
        for name in self._removed:
            core.call("remove_adapter", name)
        for args in self._loaded.values():
            core.call("put_adapter", *args)
        for which in self._pinned:
            core.call("pin_adapter", which)
