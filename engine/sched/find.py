"""Name, dotted path, class or object -> a scheduler with its policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.config.dotted import load_dotted
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError
from engine.kv.manager import KVManager
from engine.sched.interface import SchedulerInterface
from engine.sched.policies import POLICIES
from engine.sched.policy import Policy
from engine.sched.scheduler import Scheduler


class Chosen(NamedTuple):
    """A scheduler's class and the policy it will be given."""

    cls: type[Scheduler]
    policy: Policy


def make_scheduler(
    config: SchedulerConfig,
    kv: KVManager,
    *,
    clock: Callable[[], float],
    seed: int = 0,
    chosen: Chosen | None = None,
) -> SchedulerInterface:
    """The configured scheduler around the configured policy. Raises ``ConfigError``.

    ``chosen``: what ``choose`` found before, since a policy is made once.
    """
    cls, policy = chosen or choose(config)
    return cls(config, kv, policy, clock=clock, seed=seed)


def choose(config: SchedulerConfig) -> Chosen:
    """Find and make what the configuration names. Raises ``ConfigError``."""
    return Chosen(
        find_scheduler(config.scheduler_cls),
        find_policy(config.scheduling_policy, config.policy_options),
    )


def find_policy(name: Any, options: dict[str, Any]) -> Policy:
    """A shipped policy by name, any other by dotted path, class or object."""
    if isinstance(name, Policy):
        return name
    if isinstance(name, str) and name not in POLICIES and "." not in name:
        raise ConfigError(
            f"scheduling_policy {name!r} is not known; there are: {', '.join(sorted(POLICIES))} "
            "(or give the dotted path of a Policy class)"
        )
    cls = POLICIES.get(name) if isinstance(name, str) else name
    cls = cls or load_dotted(name)
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise ConfigError(f"scheduling_policy {name!r} is no subclass of engine.Policy")
    try:
        return cls(**options)
    except Exception as error:  # whatever a stranger's constructor raises
        raise ConfigError(
            f"policy {cls.__name__} cannot be made with policy_options {options}: "
            f"{type(error).__name__}: {error}"
        ) from error


def find_scheduler(cls: Any) -> type[Scheduler]:
    """The shared mechanism, or a class (or its dotted path) in place of it."""
    if cls is None:
        return Scheduler
    if isinstance(cls, str):
        cls = load_dotted(cls)
    if not (isinstance(cls, type) and issubclass(cls, SchedulerInterface)):
        raise ConfigError(f"scheduler_cls {cls!r} is no subclass of engine.SchedulerInterface")
    if missing := getattr(cls, "__abstractmethods__", None):
        raise ConfigError(f"scheduler_cls {cls.__name__} lacks {', '.join(sorted(missing))}")
    return cls  # type: ignore[return-value]
