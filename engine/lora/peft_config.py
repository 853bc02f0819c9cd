"""Reads adapter_config.json as peft does: which modules are adapted, their ranks and scales."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from engine.lora.adapter import AdapterError

CONFIG = "adapter_config.json"
MATCHING_SECONDS = 1.0  # for all regular expressions of one adapter

# Keys that change no product of a trained adapter.
IGNORED = frozenset(
    {
        *("auto_mapping", "inference_mode", "peft_version", "revision", "task_type"),
        *("eva_config", "init_weights", "lora_dropout", "lora_dtype"),
        *("lorap_emb_lr", "lorap_lr_ratio", "megatron_core", "runtime_config"),
        *("corda_config", "lora_ga_config", "loftq_config"),  # of initialisations, checked by name
        "fan_in_fan_out",  # how the base stores its weights
        "qalora_group_size",  # of use_qalora, which is refused
    }
)
READ = frozenset(
    {
        *("alpha_pattern", "base_model_name_or_path", "bias", "ensure_weight_tying"),
        *("exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform"),
        *("lora_alpha", "lora_bias", "modules_to_save", "peft_type", "r", "rank_pattern"),
        *("target_modules", "target_parameters", "use_dora", "use_rslora"),
    }
)
REFUSED = {
    "alora_invocation_tokens": "activated LoRA (aLoRA) changes only the tokens after its "
    "invocation, which is not supported",
    "arrow_config": "routing between adapters (Arrow) is not supported",
    "enable_lora": "adapters of parts of a fused module (MergedLinear) are not supported",
    "kasa_config": "KaSA changes the weights of the base, which all adapters share",
    "layer_replication": "the base's layers are replicated, which is not supported",
    "megatron_config": "adapters of Megatron's parallel layers are not supported",
    "trainable_token_indices": "trained rows of the embedding table are not supported; merge them "
    "into an embedding that is listed in modules_to_save",
    "use_bdlora": "block-diagonal products (BD-LoRA) are not supported",
    "use_qalora": "QALoRA pools the inputs of its products, which is not supported",
}
INITIALISATIONS = ("gaussian", "eva", "orthogonal")  # those that leave the base as it is
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass
class PeftConfig:
    """What adapter_config.json says about products. Paths are those of modules in the base."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    is_dora: bool
    has_bias: bool
    ties_weights: bool
    targets: str | frozenset[str] | None
    excluded: str | frozenset[str]
    parameters: tuple[str, ...]
    saved: tuple[str, ...]
    layers: frozenset[int] | None
    layer_names: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    base: str
    _patterns: _Patterns = field(default_factory=lambda: _Patterns())

    def rank_of(self, path: str) -> int:
        """The rank of the product at a module's or parameter's path."""
        found = self._key_of(path, self.ranks)
        return self.rank if found is None else self.ranks[found]

    def scale_of(self, path: str) -> float:
        """The factor of the product at a module's or parameter's path."""
        found, rank = self._key_of(path, self.alphas), self.rank_of(path)
        alpha = self.alpha if found is None else self.alphas[found]
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def source_of_rank(self, path: str) -> str:
        """The entry that decides the rank at a path, in words."""
        found = self._key_of(path, self.ranks)
        return "r" if found is None else f"rank_pattern[{found!r}]"

    def is_target(self, path: str) -> bool:
        """True if the configuration adapts the module at a path."""
        if isinstance(self.excluded, str):
            if self.excluded and self._patterns.match(self.excluded, path):
                return False
        elif any(is_end(path, name) for name in self.excluded):
            return False
        if any(self._patterns.match(rf"(^|.*\.){name}($|\..*)", path) for name in self.saved):
            return False
        if self.targets is None:
            return not self.parameters
        if isinstance(self.targets, str):
            is_all = self.targets.lower() == "all-linear"
            return is_all or self._patterns.match(self.targets, path)
        if not any(is_end(path, name) for name in self.targets):
            return False
        return self.layers is None or self._layer_of(path) in self.layers

    def parameters_of(self, path: str, count: int) -> list[str]:
        """The adapted parameters of the module at a path, by their names in it. count: how many
        the file has; names without a module may be those of other modules."""
        named: dict[str, None] = {}
        free: dict[str, None] = {}
        for name in self.parameters:
            module, _, parameter = name.rpartition(".")
            if not module:
                free[parameter] = None
            elif is_end(path, module):
                named[parameter] = None
        return list(named) if len(named) == count else list(named | free)

    def is_saved(self, path: str) -> bool:
        """True if the tensor at a path is part of a module that the adapter replaces."""
        return any(self.is_saved_in(path, name) for name in self.saved)

    def is_saved_in(self, path: str, name: str) -> bool:
        """True if the tensor at a path is part of a module whose path ends with ``name``."""
        return any(module.endswith(name) for module in parents(path))

    def _key_of(self, path: str, pattern: Mapping[str, Any]) -> str | None:
        """The first key that matches the end of a path, from a dot on."""
        for key in pattern:
            is_plain = key.replace(".", "_").isidentifier()
            if is_plain and not path.endswith(key.rpartition(".")[2]):
                continue
            if self._patterns.match(rf"(.*\.)?({key})", path):
                return key
        return None

    def _layer_of(self, path: str) -> int | None:
        names = self.layer_names
        wholes = [rf"(?:^|.*?\.){name}" for name in names] or [r".*?\.[^.]*"]
        for whole in wholes:
            index = self._patterns.group(rf"{whole}\.(?P<idx>\d+)\..*", path)
            if index is not None:
                return int(index)
        return None


class _Patterns:
    """Regular expressions of a configuration, which together may take a limited time."""

    def __init__(self) -> None:
        self._left = MATCHING_SECONDS
        self._compiled: dict[str, Any] = {}

    def match(self, pattern: str, text: str) -> bool:
        """True if a pattern matches a whole text."""
        return self._matched(pattern, text) is not None

    def group(self, pattern: str, text: str) -> str | None:
        """The group "idx" of the match of a whole text."""
        found = self._matched(pattern, text)
        return None if found is None else found["idx"]

    def _matched(self, pattern: str, text: str) -> Any:
        began = time.perf_counter()
        try:
            compiled = self._compiled.get(pattern)
            if compiled is None:
                compiled = self._compiled[pattern] = regex.compile(pattern)
            return compiled.fullmatch(text, timeout=max(self._left, 1e-3))
        except regex.error as error:
            raise AdapterError(
                f"{CONFIG} has {pattern!r}, not a regular expression: {error}"
            ) from error
        except (TimeoutError, RecursionError, MemoryError) as error:
            raise AdapterError(
                f"the regular expression {pattern!r} of {CONFIG} takes more than "
                f"{MATCHING_SECONDS:g} s for the names of modules; list the names instead"
            ) from error
        finally:
            self._left -= time.perf_counter() - began


def is_end(path: str, name: str) -> bool:
    """True if a name is a path or its last parts."""
    return path == name or path.endswith(f".{name}")


def parents(path: str) -> Iterator[str]:
    """The modules that a tensor is part of, the nearest first."""
    while path := path.rpartition(".")[0]:
        yield path


def load_json(text: bytes, name: str) -> dict[str, Any]:
    """An object of JSON. Raises ``AdapterError`` for anything else, and for repeated keys."""
    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise AdapterError(f"{name} holds {type(content).__name__}, not an object")
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is repeated")
    return found


def parse_config(content: Mapping[str, Any]) -> PeftConfig:
    """The configuration of an adapter from the object in adapter_config.json.

    Raises ``AdapterError`` for what is not supported, and for values of wrong types."""
    kind = content.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"{CONFIG} has peft_type {kind!r}; only adapters of type 'LORA' are supported"
        )
    for key, value in content.items():
        _check_key(key, value)
    _check_initialisation(content.get("init_lora_weights"))
    bias = content.get("bias")
    if bias not in (None, False, "none"):
        raise AdapterError(
            f"{CONFIG} has bias {bias!r}: biases of the base were trained, which is not supported; "
            "only 'none' is"
        )
    flags = {key: _flag(content, key) for key in FLAGS}
    targets, excluded = _names(content, "target_modules"), _names(content, "exclude_modules")
    layers = content.get("layers_to_transform")
    return PeftConfig(
        rank=_rank("r", content.get("r", 8)),
        alpha=_alpha("lora_alpha", content.get("lora_alpha", 8)),
        is_rank_stabilised=flags["use_rslora"],
        is_dora=flags["use_dora"],
        has_bias=flags["lora_bias"],
        ties_weights=flags["ensure_weight_tying"],
        targets=targets if isinstance(targets, str | None) else frozenset(targets),
        excluded=excluded if isinstance(excluded, str) else frozenset(excluded or ()),
        parameters=_list(content, "target_parameters"),
        saved=_list(content, "modules_to_save"),
        layers=_layers(layers),
        layer_names=_list(content, "layers_pattern", one=True),
        ranks={k: _rank(f"rank_pattern[{k!r}]", v) for k, v in _map(content, "rank_pattern")},
        alphas={k: _alpha(f"alpha_pattern[{k!r}]", v) for k, v in _map(content, "alpha_pattern")},
        base=str(content.get("base_model_name_or_path") or ""),
    )


FLAGS = ("ensure_weight_tying", "lora_bias", "use_dora", "use_rslora")


def _check_key(key: str, value: Any) -> None:
    if key in READ or key in IGNORED or value in (None, False, "", [], {}):
        return
    if key in REFUSED:
        raise AdapterError(f"{CONFIG} has {key} = {_short(value)}: {REFUSED[key]}")
    raise AdapterError(
        f"{CONFIG} has {key} = {_short(value)}, which is not known and may change results; remove "
        "it if it does not"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_initialisation(value: Any) -> None:
    if value in (None, True, False) or value in INITIALISATIONS:
        return
    if str(value).lower().startswith(CHANGES_BASE):
        raise AdapterError(
            f"{CONFIG} has init_lora_weights {value!r}, which changes the weights of the base; "
            "save the adapter with path_initial_model_for_weight_conversion, which converts it to "
            "one for the base as it is"
        )
    raise AdapterError(
        f"{CONFIG} has init_lora_weights {_short(value)}; known are True, False, "
        f"{', '.join(map(repr, INITIALISATIONS))}"
    )


def _flag(content: Mapping[str, Any], key: str) -> bool:
    value = content.get(key)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(f"{CONFIG} has {key} = {_short(value)}, must be true or false")
    return bool(value)


def _rank(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterError(f"{CONFIG} has {key} = {_short(value)}, must be an integer above 0")
    return value


def _alpha(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterError(f"{CONFIG} has {key} = {_short(value)}, must be a number")
    if not math.isfinite(number := float(value) if abs(value) < 1e30 else math.inf):
        raise AdapterError(f"{CONFIG} has {key} = {_short(value)}, must be a finite number")
    return number


def _names(content: Mapping[str, Any], key: str) -> str | tuple[str, ...] | None:
    """One regular expression, or names."""
    value = content.get(key)
    return (value or None) if isinstance(value, str | None) else _list(content, key)


def _list(content: Mapping[str, Any], key: str, *, one: bool = False) -> tuple[str, ...]:
    """A list of texts, or with ``one`` a text for a list of one; () for no value."""
    value = content.get(key)
    if one and isinstance(value, str) and value:
        return (value,)
    if value in (None, "", {}) or (isinstance(value, list) and not value):
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise AdapterError(f"{CONFIG} has {key} = {_short(value)}, must be a list of names")
    return tuple(value)


def _map(content: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"{CONFIG} has {key} = {_short(value)}, must be an object")
    yield from value.items()


def _layers(value: Any) -> frozenset[int] | None:
    """Indices of the adapted layers, ``None`` for all."""
    if value is None or value == []:
        return None
    indices = value if isinstance(value, list) else [value]
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in indices):
        raise AdapterError(
            f"{CONFIG} has layers_to_transform = {_short(value)}, must be a list of indices"
        )
    return frozenset(indices)
