"""AdapterLibrary: the adapters that a core knows, by name, and their versions.

    name ──> version (a content: path, digest) ──> copy in the host's memory ──> slot of the device
             by the library                        AdapterStore                  AdapterSlots

A version is read in a thread when a request needs it. A name gets a new version if its adapter is
replaced; requests keep the version that they began with. Only the core's thread calls a library.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from engine.config.near import did_you_mean_of_many
from engine.errors import ConfigError, EngineError, RequestError
from engine.lora.loading import AdapterReader, Order, Reading
from engine.lora.sharing import DROP, OtherRanks, SharedReader
from engine.lora.store import AdapterStore, HostCopy
from engine.messages.adapters import AdapterSource, check_name
from engine.messages.requests import AddRequest

MAX_LISTED = 20  # names in an error
MAX_TICKETS = 64  # adapters that clients load at the same time
CONFIG_FILE = "adapter_config.json"
UNREAD = "unread adapter "  # before the number of a version whose digest is not known yet


@dataclass(eq=False)
class Version:
    """One content of an adapter, from its first reading on."""

    name: str
    number: int  # the user's ``lora_int_id``
    order: Order
    serial: int  # no other version of this library has it
    is_numbered: bool = True  # the user has given the number
    digest: str = ""  # "" until it has been read
    fault: str = ""  # why it cannot be used
    rank: int = 0
    num_bytes: int = 0
    is_pinned: bool = False
    num_held: int = 0  # unfinished requests that began with it
    reading: Reading | None = None

    @property
    def identity(self) -> str:
        """What block hashes have of it: the digest or, before it is known, a text that no other
        version has."""
        return self.digest or f"{UNREAD}{self.serial}"

    def info(self) -> dict[str, Any]:
        """The fields of an ``AdapterInfo``."""
        return {
            "name": self.name,
            "number": self.number,
            "path": self.order.path,
            "digest": self.digest,
            "rank": self.rank,
            "num_bytes": self.num_bytes,
            "is_pinned": self.is_pinned,
        }


class AdapterLibrary:
    """The adapters that a core knows. ``methods`` are for clients, by name; those that describe an
    adapter return the fields of ``AdapterInfo``."""

    def __init__(
        self,
        reader: AdapterReader,
        store: AdapterStore[Any],
        *,
        most_pinned: int,
        directory: str | None = None,
        waits: bool = False,
    ) -> None:
        """most_pinned: adapters that may be pinned. directory: whose subdirectories are adapters.
        waits: read adapters before their requests are added, so that a recorded run and its replay
        start a request in the same step."""
        self.store = store
        self.num_read = 0
        self.num_failed = 0
        self.num_dropped = 0  # copies in the host's memory
        self._reader = reader
        self._most_pinned = most_pinned
        self._root = None if directory is None else str(Path(directory).resolve())
        self._waits = waits
        self._serials = itertools.count()
        self._names: dict[str, Version] = {}
        self._next: dict[str, Version] = {}  # read by requests, to replace those of these names
        self._tickets: dict[str, tuple[Version, bool]] = {}  # for clients; may it take a name?
        self._to_read: deque[Version] = deque()
        self._reading: list[Version] = []
        self._needed: Counter[str] = Counter()  # digest -> unfinished requests and pins
        self._pinned: set[str] = set()  # digests
        self._arriving: tuple[str, Version] | None = None  # the request that is being added

    # -- for requests

    def resolved(self, request: AddRequest) -> AddRequest:
        """Choose the version of an adapter for a new request: its name is replaced by the version's
        identity. Raises ``RequestError`` for an unknown name or one that another adapter has."""
        self._arriving = None  # the last request may have been refused
        if request.adapter is None:
            return request
        version = self._version_for(request.adapter, request.adapter_source or AdapterSource())
        self._arriving = request.request_id, version
        if self._waits:
            self._wait_for(version)
        return msgspec.structs.replace(request, adapter=version.identity, adapter_source=None)

    def arrived(self, request_id: str) -> Version | None:
        """The version chosen for the request that is being added, which then holds it."""
        name, version = self._arriving or ("", None)
        if version is None or name != request_id:
            return None
        self._arriving = None
        version.num_held += 1
        if version.digest:
            self._needed[version.digest] += 1
        return version

    def let_go(self, version: Version) -> None:
        """Called when a request has ended that held a version."""
        version.num_held -= 1
        if version.digest:
            self._unneed(version.digest)
        if self._to_read:
            self.sweep()

    def is_there(self, version: Version) -> bool:
        """True if the adapter is in the host's memory."""
        return version.digest in self.store

    def want(self, version: Version) -> None:
        """Start to read a version, as soon as there is room for it in the host's memory."""
        if not (self.is_coming(version) or version.fault or self.is_there(version)):
            self._to_read.append(version)
            self.sweep()

    def is_coming(self, version: Version) -> bool:
        """True while a version is being read or waits to be read."""
        return version in self._reading or version in self._to_read

    def sweep(self) -> None:
        """Take what has been read, and start to read what waits and has room. Must not be called
        while a request is being added."""
        self._arriving = None  # a request that has not arrived by now was refused
        self._reading = [version for version in self._reading if not self._has_ended(version)]
        # Another version may have brought the same content, for which there is then no more room.
        self._to_read = deque(each for each in self._to_read if not self.is_there(each))
        while self._to_read and self._has_room(self._to_read[0]):
            version = self._to_read.popleft()
            version.reading = self._reader.submit(version.order)
            self._reading.append(version)

    def hurry(self, is_alone: bool) -> None:
        """Set whether nothing else is computed until the next call than what is being read."""
        for version in self._reading:
            if version.reading is not None:
                version.reading.hurry(is_alone)

    def use(self, digest: str) -> None:
        """Record that the adapter with this digest is used now."""
        if digest in self.store:
            self.store.take(digest)

    def is_pinned(self, digest: str) -> bool:
        """True if the adapter with this digest must stay in its slot."""
        return digest in self._pinned

    def share(self, group: OtherRanks) -> None:
        """Let the other ranks of a group read and keep the same adapters. To be called before any
        is read."""
        self._reader = SharedReader(self._reader, group)
        self.store.on_drop = partial(group.notify_others, DROP)

    def shutdown(self) -> None:
        self._reader.shutdown()

    # -- for clients

    def load(self, name: str, path: str) -> None:
        """Read an adapter and name it, at the start. Raises ``ConfigError``."""
        try:
            self._check(name, 0, replaces=False)
            version = self._new(name, 0, Order(name, path))
            self._wait_for(version)
        except RequestError as error:
            raise ConfigError(f"lora_modules: {error}") from error
        self._names[name] = version

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Methods that clients may call by name, with plain values."""
        return {
            "read_adapter": self.read,
            "adapter_state": self.state,
            "put_adapter": self.put,
            "cancel_adapter": self.cancel,
            "remove_adapter": self.remove,
            "pin_adapter": self.pin,
            "find_adapter": self.find,
            "adapters": self.listed,
        }

    def read(
        self,
        ticket: str,
        name: str,
        number: int = 0,
        path: str = "",
        replaces: bool = False,
        files: dict[str, bytes] | None = None,
        is_confined: bool = False,
    ) -> None:
        """Start to read an adapter that ``put`` names later. Raises for a name or number that is
        taken. is_confined: the path must be in the directory of adapters, if there is one."""
        within = self._root if is_confined else None
        if within is not None:
            path = self._confined(path, Path(within))
        self._check(name, number, replaces)
        version = self._new(name, number, Order(name, path, files, within))
        if len(self._tickets) >= MAX_TICKETS:  # of clients that have died
            del self._tickets[next(iter(self._tickets))]
        self._tickets[ticket] = version, replaces
        self.want(version)

    def state(self, ticket: str) -> str | None:
        """The digest of an adapter that is being read for a client; ``None`` until it is known.
        Raises the reason why the adapter cannot be used."""
        if ticket not in self._tickets:
            raise ConfigError(f"no adapter is being read for {ticket!r:.80}: read it again")
        version, _ = self._tickets[ticket]
        self.sweep()
        if version.fault:
            del self._tickets[ticket]
            raise ConfigError(version.fault)
        return version.digest or None

    def put(
        self,
        ticket: str,
        name: str,
        number: int,
        path: str,
        digest: str,
        files: dict[str, bytes] | None = None,
    ) -> dict[str, Any]:
        """Give a name to an adapter that was read. For an unknown ticket, as after a restart, the
        adapter is read when it is first used, and must have the digest."""
        version, may_replace = self._tickets.pop(ticket, (None, True))
        if version is None:
            version = self._new(name, number, Order(name, path, files))
            version.digest = digest
        self._check(name, number, may_replace)
        self._name(version)
        return version.info()

    def cancel(self, ticket: str) -> None:
        """Forget an adapter that was read for a client."""
        self._tickets.pop(ticket, None)

    def remove(self, which: str | int) -> dict[str, Any] | None:
        """Forget an adapter by name or number. New requests cannot use it, others go on. Returns
        it, or ``None`` for an unknown one."""
        version = self._find(which)
        if version is None:
            return None
        del self._names[version.name]
        self._next.pop(version.name, None)
        self._unpin(version)
        return version.info()

    def pin(self, which: str | int) -> bool:
        """Keep an adapter in the host's memory and, once it is there, in its slot. Returns False
        for an unknown one. Raises ``ConfigError`` if too many are pinned."""
        version = self._find(which)
        if version is None or not version.digest:
            return False
        if version.is_pinned:
            return True
        num_pinned = len(self._pinned)
        if num_pinned >= self._most_pinned:
            raise ConfigError(
                f"{num_pinned} adapters are pinned, the limit is {self._most_pinned} (max_loras - "
                "1): raise max_loras, or remove one of them"
            )
        self._pin(version)
        self.want(version)
        return True

    def find(self, name: str) -> dict[str, Any] | None:
        """The adapter with a name, loaded or in the directory of adapters; ``None`` if there is
        none."""
        version = self._find(name)
        if version is not None:
            return version.info()
        path = self._in_directory(name)
        return None if path is None else self._new(name, 0, Order(name, path)).info()

    def name_of(self, digest: str) -> str:
        """A name of the adapter with this digest; the digest if none is known."""
        names = (name for name, version in self._names.items() if version.digest == digest)
        return next(names, digest)

    def listed(self) -> list[dict[str, Any]]:
        """The adapters that are loaded, in the order of their numbers."""
        known = [version for version in self._names.values() if version.digest]
        return [version.info() for version in sorted(known, key=lambda each: each.number)]

    # -- names

    def _version_for(self, name: str, source: AdapterSource) -> Version:
        version = self._names.get(name)
        if version is not None and source.replaces:
            if name not in self._next:
                self._check(name, source.number, replaces=True)
                path = source.path or version.order.path
                order = version.order._replace(path=path) if not source.path else Order(name, path)
                self._next[name] = self._new(name, source.number or version.number, order)
            return self._next[name]
        if version is not None:
            self._check_same(version, source)
            return version
        found = self._in_directory(name)
        if source.path:
            order = Order(name, source.path)
        elif found is not None:
            order = Order(name, found, within=self._root)
        else:
            raise self._unknown(name)
        self._check(name, source.number, replaces=False)
        version = self._names[name] = self._new(name, source.number, order)
        return version

    def _new(self, name: str, number: int, order: Order) -> Version:
        is_numbered = number > 0
        if not is_numbered:
            old = self._names.get(name)
            number = self._free_number() if old is None else old.number
        return Version(name, number, order, next(self._serials), is_numbered)

    def _name(self, version: Version) -> None:
        old = self._names.get(version.name)
        if old is not None and old.is_pinned:
            self._unpin(old)
            self._pin(version)
        self._names[version.name] = version
        self._next.pop(version.name, None)  # a replacement that came before this one is too late

    def _pin(self, version: Version) -> None:
        version.is_pinned = True
        self._pinned.add(version.digest)
        self._needed[version.digest] += 1

    def _unpin(self, version: Version) -> None:
        if version.is_pinned:
            version.is_pinned = False
            self._pinned.discard(version.digest)
            self._unneed(version.digest)

    def _find(self, which: str | int) -> Version | None:
        if isinstance(which, str):
            return self._names.get(which)
        return next((each for each in self._names.values() if each.number == which), None)

    def _free_number(self, besides: int = 0) -> int:
        taken = {besides, *(version.number for version in self._names.values())}
        return next(number for number in itertools.count(1) if number not in taken)

    def _check(self, name: str, number: int, replaces: bool) -> None:
        """Raise ``RequestError`` if a new adapter cannot have this name or number."""
        check_name(name)
        known = self._names.get(name)
        if known is not None and not replaces:
            raise RequestError(
                f"adapter {name!r:.80} is loaded already: choose another name, or set "
                "load_inplace=True to replace it",
                param="lora_name",
                code="adapter_exists",
            )
        self._check_number(name, number)

    def _check_same(self, version: Version, source: AdapterSource) -> None:
        """Raise ``RequestError`` if a request means another adapter than that of its name."""
        if source.path and source.path != version.order.path:
            raise RequestError(
                f"adapter {version.name!r:.80} was loaded from {version.order.path or 'memory'}, "
                f"not from {source.path!r:.200}: choose another name, or set load_inplace=True to "
                "replace it",
                param="lora_path",
                code="adapter_exists",
            )
        if not source.number or source.number == version.number:
            return
        self._check_number(version.name, source.number)
        if version.is_numbered:
            raise RequestError(
                f"adapter {version.name!r:.80} has lora_int_id {version.number}, not "
                f"{source.number}: give the same number in each request",
                param="lora_int_id",
            )
        version.number, version.is_numbered = source.number, True

    def _check_number(self, name: str, number: int) -> None:
        other = self._find(number) if number else None
        if other is None or other.name == name:
            return
        if not other.is_numbered:  # the number was chosen here, so it can be another one
            other.number = self._free_number(besides=number)
            return
        raise RequestError(
            f"lora_int_id {number} is that of adapter {other.name!r:.80}: give adapter "
            f"{name!r:.80} another number",
            param="lora_int_id",
            code="adapter_exists",
        )

    def _unknown(self, name: str) -> RequestError:
        known = list(self._names)
        listed = ", ".join(known[:MAX_LISTED]) + (" ..." if len(known) > MAX_LISTED else "")
        near = did_you_mean_of_many(name, known) or (f"; there are: {listed}" if known else "")
        return RequestError(
            f"adapter {name!r:.80} is not loaded{near}", param="adapter", code="model_not_found"
        )

    def _in_directory(self, name: str) -> str | None:
        """The subdirectory with the adapter of this name, or ``None``."""
        if self._root is None or not name.isprintable():
            return None
        with suppress(OSError, ValueError):
            root = Path(self._root)
            path = (root / name).resolve()
            if root in path.parents and (path / CONFIG_FILE).is_file():
                return str(path)
        return None

    def _confined(self, path: str, root: Path) -> str:
        """A path in the directory of adapters, made absolute. Raises ``ConfigError`` for another
        path."""
        try:
            found = (root / path).resolve()
        except (OSError, ValueError):
            found = root
        if root not in found.parents:
            raise ConfigError(
                f"lora_path is {path!r:.200}, which is not in adapter_dir ({root}): move the "
                "adapter there"
            )
        return str(found)

    # -- reading

    def _wait_for(self, version: Version) -> None:
        """Read a version now. Raises ``RequestError`` if it cannot be used."""
        if not self.is_there(version):
            reading = version.reading = self._reader.submit(version.order)
            reading.wait()
            self._has_ended(version)
        if version.fault:
            raise RequestError(version.fault, param="adapter", code="adapter_failed")

    def _has_ended(self, version: Version) -> bool:
        """True once a version is read or has failed; the first call puts it into the store."""
        reading = version.reading
        if reading is None:
            return True
        try:
            copy = reading.poll()
            if copy is None:
                return False
            if version.digest not in ("", copy.digest):
                self._keep(copy)
                raise ConfigError(
                    f"the files of adapter {version.name!r:.80} at {version.order.path} have "
                    "changed since it was loaded: send the request again to use them as they are"
                )
        except Exception as error:  # whatever a reader raises
            self._fail(version, error)
            return True
        version.reading = None
        if not version.digest and version.num_held:
            self._needed[copy.digest] += version.num_held
        version.digest, version.rank = copy.digest, copy.rank
        version.num_bytes = copy.num_bytes
        self.num_read += 1
        self._keep(copy)
        if self.store.is_over and not self._waits:  # others have become needed meanwhile
            self.store.drop(version.digest)
            self._to_read.append(version)
        if self._next.get(version.name) is version:
            self._name(version)
        return True

    def _keep(self, copy: HostCopy) -> None:
        self.store.add(copy)
        self.num_dropped += self.store.trim(self._is_needed)

    def _fail(self, version: Version, error: Exception) -> None:
        is_ours = isinstance(error, EngineError)
        reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
        named = f"adapter {version.name!r}"
        version.fault = reason if named in reason else f"{named}: {reason}"
        version.reading = None
        self.num_failed += 1
        if self._next.get(version.name) is version:
            del self._next[version.name]
        if self._names.get(version.name) is not version:
            return
        if version.digest:  # it was loaded before, so a later request tries again
            again = self._names[version.name] = self._new(version.name, 0, version.order)
            again.is_numbered = version.is_numbered
        else:
            del self._names[version.name]

    def _has_room(self, version: Version) -> bool:
        coming = [each.num_bytes for each in self._reading]
        return self.store.has_room(version.num_bytes, self._is_needed, coming)

    def _is_needed(self, digest: str) -> bool:
        arriving = None if self._arriving is None else self._arriving[1].digest
        return digest in self._needed or digest == arriving

    def _unneed(self, digest: str) -> None:
        self._needed[digest] -= 1
        if self._needed[digest] <= 0:
            del self._needed[digest]
        self.num_dropped += self.store.trim(self._is_needed)
