"""Name, entry point, dotted path, class or object -> a scheduler with its policy and resources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeVar

from engine.config.dotted import load_dotted
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError
from engine.kv.manager import KVManager
from engine.sched.fitting import check_hooks, check_options
from engine.sched.interface import SchedulerInterface
from engine.sched.lengths import look_up_predictor
from engine.sched.policies import POLICIES
from engine.sched.policy import API_VERSION, Policy
from engine.sched.resource import Resource
from engine.sched.scheduler import Scheduler

SCHEDULERS_GROUP = "engine.schedulers"  # entry points: Policy or SchedulerInterface classes
RESOURCES_GROUP = "engine.resources"  # entry points: Resource classes

Plugin = TypeVar("Plugin", Policy, Resource)


class Chosen(NamedTuple):
    """A scheduler's class, the policy and the resources it will be given."""

    cls: type[Scheduler]
    policy: Policy
    resources: tuple[Resource, ...] = ()


def make_scheduler(
    config: SchedulerConfig,
    kv: KVManager,
    *,
    clock: Callable[[], float],
    timer: Callable[[], float] = float,
    seed: int = 0,
    chosen: Chosen | None = None,
) -> SchedulerInterface:
    """The configured scheduler around the configured policy. Raises ``ConfigError``.

    ``chosen``: what ``choose`` found before, since a policy is made once.
    """
    cls, policy, resources = chosen or choose(config)
    return cls(config, kv, policy, clock=clock, timer=timer, seed=seed, resources=resources)


def choose(config: SchedulerConfig) -> Chosen:
    """Find and make what the configuration names. Raises ``ConfigError``."""
    look_up_predictor(config.length_predictor)  # made later; what it is may be said now
    return Chosen(
        find_scheduler(config.scheduler_cls),
        find_policy(config.scheduling_policy, config.policy_options),
        tuple(find_resource(name) for name in config.resources),
    )


def find_policy(name: Any, options: dict[str, Any]) -> Policy:
    """A shipped policy or an installed one by name, any other by dotted path, class or object."""
    if isinstance(name, Policy) and options:
        raise ConfigError(
            f"policy_options {options} are for a policy that is yet to be made, and "
            f"scheduling_policy is an object of {type(name).__name__}; give its class instead"
        )
    if isinstance(name, Policy):
        _check_class(type(name), Policy, "scheduling_policy")
        return name
    cls = _find("scheduling_policy", name, POLICIES, SCHEDULERS_GROUP)
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        is_loop = isinstance(cls, type) and issubclass(cls, SchedulerInterface)
        hint = "; it is a scheduler: give it as scheduler_cls" if is_loop else ""
        raise ConfigError(f"scheduling_policy {name!r} is no subclass of engine.Policy{hint}")
    _check_class(cls, Policy, "scheduling_policy")
    return _make(cls, options, "policy_options")


def find_resource(name: Any) -> Resource:
    """A resource by the name it was installed under, by dotted path, class or object."""
    if isinstance(name, Resource):
        _check_class(type(name), Resource, "resources")
        return name
    cls = _find("resources", name, {}, RESOURCES_GROUP)
    if not (isinstance(cls, type) and issubclass(cls, Resource)):
        raise ConfigError(f"resources: {name!r} is no subclass of engine.Resource")
    _check_class(cls, Resource, "resources")
    try:
        return _make(cls, {}, "options")
    except ConfigError as error:
        raise ConfigError(f"{error}; a resource that wants some is given as an object") from error


def find_scheduler(cls: Any) -> type[Scheduler]:
    """The shared mechanism, or a class (its name or its dotted path) in place of it."""
    if cls is None:
        return Scheduler
    cls = _find("scheduler_cls", cls, {}, SCHEDULERS_GROUP)
    if not (isinstance(cls, type) and issubclass(cls, SchedulerInterface)):
        raise ConfigError(f"scheduler_cls {cls!r} is no subclass of engine.SchedulerInterface")
    if missing := getattr(cls, "__abstractmethods__", None):
        raise ConfigError(f"scheduler_cls {cls.__name__} lacks {', '.join(sorted(missing))}")
    return cls  # type: ignore[return-value]


def _find(option: str, name: Any, shipped: Mapping[str, Any], group: str) -> Any:
    """What a name stands for; anything but a string stands for itself."""
    if not isinstance(name, str):
        return name
    if name in shipped:
        return shipped[name]
    installed = {entry.name: entry for entry in entry_points(group=group)}
    if name in installed:
        try:
            return installed[name].load()
        except Exception as error:  # whatever importing a stranger's package raises
            raise ConfigError(
                f"{option} {name!r} is installed ({installed[name].value}) but cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
    if "." in name:
        return load_dotted(name, option)
    known = ", ".join(sorted({*shipped, *installed})) or "none"
    raise ConfigError(
        f"{option} {name!r} is not known; there are: {known} (or give the dotted path of a class)"
    )


def _check_class(cls: type[Plugin], base: type, option: str) -> None:
    """Refuse what does not fit this version of the API."""
    if cls.api_version != API_VERSION:
        raise ConfigError(
            f"{option}: {cls.__name__} was written for version {cls.api_version!r} of the API, "
            f"this engine has version {API_VERSION!r}; install the release that fits"
        )
    check_hooks(cls, base)


def _make(cls: type[Plugin], options: dict[str, Any], source: str) -> Plugin:
    check_options(cls, options, source)
    try:
        return cls(**options)
    except Exception as error:  # whatever a stranger's constructor raises
        raise ConfigError(
            f"{cls.__name__} cannot be made with {source} {options}: "
            f"{type(error).__name__}: {error}"
        ) from error
