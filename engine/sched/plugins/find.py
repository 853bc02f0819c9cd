"""Finds the scheduler, policy and resources that a configuration names, and checks plug-ins."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from types import CodeType, NoneType
from typing import Any, NamedTuple, TypeVar, get_type_hints
from weakref import WeakValueDictionary

from engine.config.check import check_kind, kinds_of
from engine.config.dotted import load_dotted
from engine.config.near import near_names
from engine.config.sched import SchedulerConfig, SchedulerOptions
from engine.errors import ConfigError, PolicyError
from engine.kv.block_pool import BlockPool
from engine.kv.manager import KVManager
from engine.kv.retention import ShelvedPool
from engine.sched.cache_policies import LRU, Shares
from engine.sched.cache_policy import CachePolicy
from engine.sched.interface import SchedulerInterface
from engine.sched.plugins.checks import require_share
from engine.sched.plugins.kept import GuardedCachePolicy
from engine.sched.policies import POLICIES
from engine.sched.policies.continuum import Programs
from engine.sched.policy import API_VERSION, Policy
from engine.sched.predict.lengths import look_up_predictor
from engine.sched.resource import Resource
from engine.sched.scheduler import Scheduler

logger = logging.getLogger("engine.sched")

SCHEDULERS_GROUP = "engine.schedulers"  # entry points: Policy or SchedulerInterface classes
RESOURCES_GROUP = "engine.resources"  # entry points: Resource classes
CACHE_POLICIES_GROUP = "engine.cache_policies"  # entry points: CachePolicy classes

CACHE_POLICIES: dict[str, type[CachePolicy]] = {"lru": LRU, "programs": Programs, "shares": Shares}

KINDS = (  # base classes, and the option in which such a class is given
    (Policy, "a policy: give it as scheduling_policy"),
    (Resource, "a resource: give it in resources"),
    (CachePolicy, "a cache policy: give it as cache_policy"),
    (SchedulerInterface, "a scheduler: give it as scheduler_cls"),
)

PLAIN = (bool, int, float, str, NoneType)  # types that can be checked by annotation
NEAR = 0.85  # names of at least this similarity count as misspellings of each other

Plugin = TypeVar("Plugin")  # an instance of a class with ``api_version`` and hooks

_deciding: WeakValueDictionary[int, SchedulerInterface] = WeakValueDictionary()  # by id of object


class Chosen(NamedTuple):
    """A scheduler class, and the policies and resources to create it with. ``cache_policy``:
    ``None`` if the content used least recently goes first."""

    cls: type[Scheduler]
    policy: Policy
    resources: tuple[Resource, ...] = ()
    cache_policy: CachePolicy | None = None

    @property
    def pool(self) -> type[BlockPool]:
        """The class of the pool of KV blocks, for a ``KVManager``."""
        return BlockPool if self.cache_policy is None else ShelvedPool


def make_scheduler(
    config: SchedulerConfig,
    kv: KVManager,
    *,
    clock: Callable[[], float],
    timer: Callable[[], float] = float,
    seed: int = 0,
    chosen: Chosen | None = None,
) -> SchedulerInterface:
    """Create the configured scheduler with its policy and resources. Raises ``ConfigError``.

    ``chosen``: result of an earlier ``choose`` for this configuration, which is then used.
    """
    cls, policy, resources, cache_policy = chosen or choose(config)
    scheduler = cls(config, kv, policy, clock=clock, timer=timer, seed=seed, resources=resources)
    if cache_policy is not None:
        if not isinstance(scheduler, Scheduler):
            raise ConfigError(
                f"cache_policy {type(cache_policy).__name__} reads the view of a Scheduler, but "
                f"scheduler_cls {cls.__name__} is no subclass of it; leave one of them out"
            )
        if not isinstance(kv.pool, ShelvedPool):
            raise ConfigError(
                f"cache_policy {type(cache_policy).__name__} needs another pool of KV blocks: make "
                "the KVManager with choose(config).pool(num_blocks) in place of num_blocks"
            )
        GuardedCachePolicy(cache_policy, scheduler)
    _note_objects((config.scheduling_policy, config.cache_policy, *config.resources), scheduler)
    return scheduler


def _note_objects(given: Iterable[Any], scheduler: SchedulerInterface) -> None:
    """Warn if a policy or resource object is already used by the scheduler of another engine."""
    for plugin in given:
        if not isinstance(plugin, Policy | Resource | CachePolicy):
            continue
        if id(plugin) in _deciding:
            logger.warning(
                "two engines use the same %s object, which mixes up their requests; give each "
                "engine its own object, or the class",
                type(plugin).__name__,
            )
        _deciding[id(plugin)] = scheduler


def choose(config: SchedulerOptions) -> Chosen:
    """Find the scheduler class; create policy and resources. Raises ``ConfigError``."""
    look_up_predictor(config.length_predictor)  # only checked here; created later
    policy = find_policy(config.scheduling_policy, config.policy_options)
    if config.user_weights and not policy.uses_ledger:
        logger.warning(
            "user_weights has no effect: policy %s ignores it; use scheduling_policy 'vtc'",
            type(policy).__name__,
        )
    resources = tuple(find_resource(name) for name in config.resources)
    cache_policy = find_cache_policy(config.cache_policy, policy)
    return Chosen(find_scheduler(config.scheduler_cls), policy, resources, cache_policy)


def find_policy(name: Any, options: dict[str, Any]) -> Policy:
    """Create a policy from its name, dotted path or class; return a policy object unchanged."""
    if isinstance(name, Policy) and options:
        raise ConfigError(
            f"policy_options {options} cannot be applied, since scheduling_policy is already an "
            f"object of {type(name).__name__}; give the class instead"
        )
    if isinstance(name, Policy):
        _check_class(type(name), Policy, "scheduling_policy")
        return name
    cls: type[Policy] = find_named("scheduling_policy", name, POLICIES, SCHEDULERS_GROUP)
    _check_kind(cls, Policy, "scheduling_policy", name)
    _check_class(cls, Policy, "scheduling_policy")
    return _make(cls, options, "policy_options")


def find_cache_policy(name: Any, policy: Policy) -> CachePolicy | None:
    """Create a cache policy from its name, dotted path or class; return an object unchanged.
    ``None``: ``policy``, if it is one."""
    found: CachePolicy | None = None
    if name is None:
        found = policy if isinstance(policy, CachePolicy) else None
    else:
        found = find_plugin(
            "cache_policy",
            name,
            CachePolicy,  # type: ignore[type-abstract]
            CACHE_POLICIES,
            CACHE_POLICIES_GROUP,
        )
    if found is not None:
        check_hooks(type(found), CachePolicy)
        try:
            require_share(max_pinned=found.max_pinned)
        except ValueError as error:
            raise ConfigError(f"cache policy {type(found).__name__}: {error}") from error
    return found


def find_resource(name: Any) -> Resource:
    """Create a resource from its name, dotted path or class; return a resource object unchanged."""
    return find_plugin("resources", name, Resource, {}, RESOURCES_GROUP)


def find_plugin(
    option: str,
    name: Any,
    base: type[Plugin],
    shipped: Mapping[str, Any],
    group: str,
    options: dict[str, Any] | None = None,
) -> Plugin:
    """Create a plug-in that is a ``base`` from its name, dotted path or class, with ``options`` as
    arguments of its constructor; return an object unchanged. ``shipped``: classes by name;
    ``group``: entry points of installed ones. Raises ``ConfigError``, which names ``option``."""
    if isinstance(name, base):
        _check_class(type(name), base, option)
        return name
    cls: type[Plugin] = find_named(option, name, shipped, group)
    _check_kind(cls, base, option, name)
    _check_class(cls, base, option)
    try:
        return _make(cls, options or {}, "options")
    except ConfigError as error:
        raise ConfigError(f"{error}; to pass options, give an object") from error


def find_scheduler(name: Any) -> type[Scheduler]:
    """Find a scheduler class by name, dotted path or the class itself. ``None``: ``Scheduler``."""
    if name is None:
        return Scheduler
    cls: type[Scheduler] = find_named("scheduler_cls", name, {}, SCHEDULERS_GROUP)
    _check_kind(cls, SchedulerInterface, "scheduler_cls", name)
    if missing := getattr(cls, "__abstractmethods__", None):
        raise ConfigError(
            f"scheduler_cls {cls.__name__} lacks the methods {', '.join(sorted(missing))}"
        )
    return cls


def installed_policies() -> dict[str, type[Policy] | str]:
    """Policies of installed packages, by name; an error text for each that cannot be loaded."""
    found: dict[str, type[Policy] | str] = {}
    for entry in entry_points(group=SCHEDULERS_GROUP):
        try:
            cls = find_named("scheduling_policy", entry.name, {}, SCHEDULERS_GROUP)
        except ConfigError as error:
            found[entry.name] = str(error)
            continue
        if entry.name not in POLICIES and isinstance(cls, type) and issubclass(cls, Policy):
            found[entry.name] = cls
    return found


def find_named(option: str, name: Any, shipped: Mapping[str, Any], group: str) -> Any:
    """Resolve a name or dotted path; return any value but a string unchanged."""
    if not isinstance(name, str):
        return name
    if name in shipped:
        return shipped[name]
    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name in installed:
        try:
            return installed[name].load()
        except Exception as error:  # importing a plug-in may raise anything
            raise ConfigError(
                f"{option} {name!r} is installed ({installed[name].value}) but cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
    if "." in name and ":" not in name:
        return load_dotted(name, option)
    known = sorted({*shipped, *installed})
    near = difflib.get_close_matches(name.lower(), known, 1)
    meant = name.replace(".py:", ".").replace(":", ".") if ":" in name else "".join(near)
    hint = f"; did you mean {meant!r}?" if meant else ""
    raise ConfigError(
        f"{option} {name!r} is not known; there are: {', '.join(known) or 'none'} (or give the "
        f"dotted path of a class, e.g. my_module.MyClass){hint}"
    )


def _check_kind(found: Any, base: type, option: str, name: Any) -> None:
    """Raise ``ConfigError`` unless ``found`` is a subclass of ``base``."""
    cls = found if isinstance(found, type) else type(found)
    if cls is found and issubclass(cls, base):
        return
    own = [what for kind, what in KINDS if kind is not base and issubclass(cls, kind)]
    hint = f"it is {own[0]}" if own else "give such a class, its name or its dotted path"
    home = "engine" if base in dict(KINDS) else base.__module__
    raise ConfigError(f"{option} {name!r} is not a subclass of {home}.{base.__name__}; {hint}")


def _check_class(cls: Any, base: type, option: str) -> None:
    """Raise ``ConfigError`` if a plug-in class has another API version or invalid hooks."""
    if cls.api_version != API_VERSION:
        is_number = isinstance(cls.api_version, int)
        hint = "install the release that fits" if is_number else "set api_version to a number"
        raise ConfigError(
            f"{option}: {cls.__name__} was written for API version {cls.api_version!r}, this "
            f"engine has API version {API_VERSION!r}; {hint}"
        )
    check_hooks(cls, base)


def _make(cls: type[Plugin], options: dict[str, Any], source: str) -> Plugin:
    check_options(cls, options, source)
    try:
        return cls(**options)
    except Exception as error:  # a plug-in's constructor may raise anything
        raise ConfigError(
            f"{cls.__name__} cannot be created with {source} {options}: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_options(cls: type, options: dict[str, Any], source: str) -> None:
    """Raise ``ConfigError`` if the constructor of ``cls`` does not accept these options.
    ``source``: name of the setting that contains the options, for the message."""
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):  # some constructors have no signature
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        known = ", ".join(map(_shown, signature.parameters.values())) or "none"
        raise ConfigError(
            f"{cls.__name__} cannot be created with {source} {options}: {error}; its options are: "
            f"{known}"
        ) from error
    hints = _hints(cls)
    for name, value in options.items():
        kinds = kinds_of(hints.get(name, Any))
        if all(kind in PLAIN for kind in kinds):
            check_kind(f"{source}[{name!r}] of {cls.__name__}", value, kinds)


def _shown(parameter: inspect.Parameter) -> str:
    """Format a parameter as in source code, with its annotation unquoted."""
    kind = parameter.annotation
    return str(parameter).replace(repr(kind), kind, 1) if isinstance(kind, str) else str(parameter)


def check_hooks(cls: type, base: type) -> None:
    """Raise ``ConfigError`` for a hook that is missing, not callable or has wrong arguments.

    A misspelt hook would never be called: it raises ``PolicyError`` or, if it may be a method for
    another purpose, logs a warning.
    """
    if problem := _problem(cls, base):
        raise ConfigError(f"{cls.__name__}{problem}")
    for slip in _slips(cls, base):
        if slip.is_certain:
            raise PolicyError(
                f"{cls.__name__}.{slip.name} is never called: the engine has no hook or option of "
                f"this name; did you mean {slip.meant!r}? If not, call it _{slip.name}"
            )
        logger.warning(
            "%s.%s is not used by the engine; did you mean %s?", cls.__name__, slip.name, slip.meant
        )


def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls.__init__)  # type: ignore[misc]
    except Exception:  # a plug-in's annotations may be anything
        return {}


@cache
def _problem(cls: type, base: type) -> str | None:
    """The error text for a plug-in class with a missing or invalid hook; ``None`` if all fit."""
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        return f" lacks {', '.join(missing)}"
    for name, hook in vars(base).items():
        if name.startswith("_") or not inspect.isfunction(hook) or getattr(cls, name) is hook:
            continue
        own = getattr(cls, name)
        wanted = list(inspect.signature(hook).parameters)[1:]
        if not callable(own):
            return f".{name} is {own!r:.80}, must be a method with arguments ({', '.join(wanted)})"
        if inspect.iscoroutinefunction(own) or inspect.isasyncgenfunction(own):
            return f".{name} is async, must be a plain method, since a step cannot wait for it"
        if not _takes(own, inspect.getattr_static(cls, name), wanted):
            return f".{name}{inspect.signature(own)} must take ({', '.join(['self', *wanted])})"
    return None


def _takes(own: Any, raw: object, wanted: list[str]) -> bool:
    """True if the method takes the arguments ``wanted``. raw: the method as stored in its class."""
    given = wanted if isinstance(raw, staticmethod | classmethod) else ["self", *wanted]
    try:
        inspect.signature(own).bind(*given)
    except TypeError:
        return False
    except ValueError:  # not every callable has a signature
        return True
    return True


class Slip(NamedTuple):
    """A public name in a plug-in class that resembles a name of the base class: a method that
    resembles a method, or another attribute that resembles one of those."""

    name: str
    meant: str
    is_certain: bool
    """True if it can only be a misspelling: see ``_is_misspelt``."""


@cache
def _slips(cls: type, base: type) -> list[Slip]:
    known = [name for name in dir(base) if not name.startswith("_")]
    own = [name for name in dir(cls) if not name.startswith("_") and name not in known]
    near = []
    for name in own:
        is_method = callable(getattr(cls, name, None))
        alike = [each for each in known if callable(getattr(base, each)) is is_method]
        near.append((name, near_names(name, alike) or _resembling(name, alike)))
    return [
        Slip(name, found[0], _is_misspelt(cls, base, name, found[0]))
        for name, found in near
        if found
    ]


def _resembling(name: str, known: list[str]) -> list[str]:
    """A list with the one known name most similar to ``name``; empty if none is similar."""
    return difflib.get_close_matches(name, known, 1, NEAR)


def _is_misspelt(cls: type, base: type, name: str, meant: str) -> bool:
    """True if ``name`` is surely a misspelt ``meant``: the class does not define ``meant`` and
    never uses ``name``, and both are flags, or methods with the same arguments."""
    classes = [each for each in cls.__mro__ if each not in base.__mro__]
    owner: Mapping[str, object] = next((vars(c) for c in classes if name in vars(c)), {})
    value, original = owner.get(name), getattr(base, meant)
    if meant in owner or type(value) is not type(original):
        return False
    if inspect.isfunction(original):
        if not _takes(value, value, list(inspect.signature(original).parameters)[1:]):
            return False
    elif not isinstance(original, bool):
        return False
    return not any(_uses(each, name) for one in classes for each in vars(one).values())


def _uses(value: object, name: str) -> bool:
    """True if a function or property uses ``name`` as an attribute or a string."""
    if isinstance(value, property):
        return any(_uses(each, name) for each in (value.fget, value.fset))
    value = inspect.unwrap(getattr(value, "__func__", value))  # type: ignore[arg-type]
    code = value if isinstance(value, CodeType) else getattr(value, "__code__", None)
    if not isinstance(code, CodeType):
        return False
    return name in (*code.co_names, *code.co_consts) or any(
        _uses(each, name) for each in code.co_consts
    )
