"""The tensors of a peft file, arranged by the modules that they change; only names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.lora.adapter import AdapterError
from engine.lora.peft_config import CONFIG, PeftConfig, is_end
from engine.lora.turns import give_way

Shape = tuple[int, ...]

# A tensor of a product: what comes before it is the path of a module.
PRODUCT = re.compile(
    r"(?P<path>.+)\.(?P<role>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(?:\.default)?(?P<of>\.weight|\.bias)?"
)
# Both together are the whole name of a tensor after the name of its module.
ROLES = {
    ("lora_A", ".weight"): "a",
    ("lora_B", ".weight"): "b",
    ("lora_B", ".bias"): "bias",
    ("lora_magnitude_vector", ".weight"): "magnitude",
    ("lora_magnitude_vector", ""): "magnitude",  # before peft 0.12
    ("lora_embedding_A", ""): "table_a",
    ("lora_embedding_B", ""): "table_b",
}
PREFIXES = ("base_model.model.", "")  # that peft and transformers write before a path
SAVED = re.compile(r"\.modules_to_save(\.default)?(?=\.)")
EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "word_embeddings", "embeddings")
# peft wraps the parameters of one module in the order in which transformers lists them; the first
# is the innermost.
ORDER = ("gate_proj", "gate_up_proj", "up_proj", "w1", "w3", "w2", "down_proj", "weight")
OTHER_TRAINERS = {
    "lora_down": "names of other trainers (lora_down, lora_up)",
    "lora_up": "names of other trainers (lora_down, lora_up)",
    "lora_ranknum": "AdaLoRA",
    "hada_w": "LoHa",
    "lokr_w": "LoKr",
    "trainable_tokens_delta": "trained rows of the embedding table",
}


class Part(NamedTuple):
    """One product of an adapter: the names of its tensors in the file by their roles."""

    names: Mapping[str, str]
    rank: int
    scale: float


@dataclass
class Arrangement:
    """Where the tensors of a file belong. The keys are paths in the base model."""

    modules: dict[str, Part] = field(default_factory=dict)
    tables: dict[str, Part] = field(default_factory=dict)
    experts: dict[str, Part] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)

    def names(self) -> Iterator[str]:
        """The names of all tensors that change results."""
        for parts in (self.modules, self.tables, self.experts):
            for part in parts.values():
                yield from part.names.values()
        yield from self.replaced.values()


def arrange(shapes: Mapping[str, Shape], config: PeftConfig, file: str) -> Arrangement:
    """Assign each tensor of a file to what it changes. shapes: by the names in the file.

    Raises ``AdapterError`` for names that are not known, and where names or shapes and the
    configuration do not agree. ``file``: what messages call the file."""
    found: dict[str, dict[str, str]] = {}
    result = Arrangement()
    for name in shapes:
        give_way()
        path = _without_prefix(name)
        product = PRODUCT.fullmatch(path)
        role = product and ROLES.get((product["role"], product["of"] or ""))
        if product and role:
            roles = found.setdefault(product["path"], {})
            if role in roles:
                raise AdapterError(f"{file} has both {roles[role]} and {name}, which are the same")
            roles[role] = name
        elif not _is_of_base(path):
            _keep_whole(path, name, config, file, result)
    _check_saved(config, result, file)
    layers: dict[str, dict[int, dict[str, str]]] = {}  # of products, by path and depth
    for path, roles in found.items():
        depth = path.count(".base_layer")
        layers.setdefault(path.replace(".base_layer", ""), {})[depth] = roles
    checker = _Checker(shapes, config, file)
    for path, by_depth in layers.items():
        give_way()
        _place(path, by_depth, checker, result)
    if not (result.modules or result.tables or result.experts or result.replaced):
        raise AdapterError(f"{file} has no tensors of an adapter")
    return result


def _without_prefix(name: str) -> str:
    return next(name[len(prefix) :] for prefix in PREFIXES if name.startswith(prefix))


def _is_of_base(path: str) -> bool:
    """True for the base's own embeddings, which peft writes next to their products."""
    end = ".base_layer.weight"
    return path.endswith(end) and is_end_of(path.removesuffix(end), EMBEDDINGS)


def is_end_of(path: str, names: tuple[str, ...]) -> bool:
    return any(is_end(path, name) for name in names)


def _keep_whole(path: str, name: str, config: PeftConfig, file: str, result: Arrangement) -> None:
    """Keep a tensor that takes the place of one of the base."""
    whole = SAVED.sub("", path)
    # peft writes an embedding whose size was changed even if the configuration does not list it.
    is_resized = whole.endswith(".weight") and is_end_of(whole[: -len(".weight")], EMBEDDINGS)
    if not is_resized and not config.is_saved(whole):
        kind = next((text for key, text in OTHER_TRAINERS.items() if key in path), None)
        raise AdapterError(
            f"{file} has {name}, a tensor of {kind}, which is not supported"
            if kind
            else f"{file} has {name}, which is neither a product of LoRA nor part of a module in "
            f"modules_to_save of {CONFIG}"
        )
    if whole in result.replaced:
        raise AdapterError(
            f"{file} has both {result.replaced[whole]} and {name}, which are the same"
        )
    result.replaced[whole] = name


def _check_saved(config: PeftConfig, result: Arrangement, file: str) -> None:
    for name in config.saved:
        if not any(config.is_saved_in(whole, name) for whole in result.replaced):
            raise AdapterError(
                f"modules_to_save of {CONFIG} lists {name!r}, of which {file} has no tensor"
            )


def _place(
    path: str, by_depth: dict[int, dict[str, str]], checker: _Checker, result: Arrangement
) -> None:
    """Assign the products of one module, or of its parameters, which peft nests."""
    config = checker.config
    # peft also writes the product of a layer that it tied to a target.
    is_tied = config.ties_weights and is_end_of(path, EMBEDDINGS)
    if len(by_depth) == 1 and 0 in by_depth and (is_tied or config.is_target(path)):
        roles = by_depth[0]
        if "table_a" in roles or "table_b" in roles:
            result.tables[path] = checker.table(path, roles)
        else:
            result.modules[path] = checker.module(path, path, roles)
        return
    names = config.parameters_of(path, len(by_depth))
    if not names:
        raise AdapterError(
            f"{checker.file} has products for {path}, which {CONFIG} does not adapt "
            "(target_modules, exclude_modules, layers_to_transform, target_parameters)"
        )
    for depth, name in zip(sorted(by_depth, reverse=True), _ordered(path, names), strict=False):
        roles = by_depth[depth]
        if name == "weight":
            result.modules[path] = checker.module(path, f"{path}.weight", roles)
        else:
            result.experts[f"{path}.{name}"] = checker.experts(f"{path}.{name}", roles)
    if len(names) != len(by_depth):
        raise AdapterError(
            f"{checker.file} has products for {len(by_depth)} parameters of {path}, "
            f"target_parameters of {CONFIG} names {', '.join(names)}"
        )


def _ordered(path: str, names: list[str]) -> list[str]:
    if len(names) > 1 and (unknown := [name for name in names if name not in ORDER]):
        raise AdapterError(
            f"target_parameters of {CONFIG} names {', '.join(names)} in {path}; which of their "
            f"products is which is not known for {unknown[0]}"
        )
    return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else 0)


class _Checker:
    """Compares the shapes of products with the configuration."""

    def __init__(self, shapes: Mapping[str, Shape], config: PeftConfig, file: str) -> None:
        self.shapes, self.config, self.file = shapes, config, file

    def module(self, path: str, key: str, roles: Mapping[str, str]) -> Part:
        """The product of a linear module. key: the path by which its rank is found."""
        config = self.config
        wanted = ["a", "b"] + ["bias"] * config.has_bias + ["magnitude"] * config.is_dora
        self._roles(path, roles, wanted)
        part = Part(roles, config.rank_of(key), config.scale_of(key))
        (rows, _), (outs, columns) = (self._matrix(roles[role]) for role in "ab")
        self._rank(key, part.rank, {roles["a"]: rows, roles["b"]: columns})
        for role in wanted[2:]:
            self._vector(roles[role], outs)
        return part

    def table(self, path: str, roles: Mapping[str, str]) -> Part:
        """The product of an embedding."""
        config = self.config
        wanted = ["table_a", "table_b"] + ["magnitude"] * config.is_dora
        self._roles(path, roles, wanted)
        part = Part(roles, config.rank_of(path), config.scale_of(path))
        (rows, _), (width, columns) = (self._matrix(roles[role]) for role in wanted[:2])
        self._rank(path, part.rank, {roles["table_a"]: rows, roles["table_b"]: columns})
        for role in wanted[2:]:
            self._vector(roles[role], width)
        return part

    def experts(self, path: str, roles: Mapping[str, str]) -> Part:
        """The products of a parameter with a matrix for each expert."""
        self._roles(path, roles, ["a", "b"])
        part = Part(roles, self.config.rank_of(path), self.config.scale_of(path))
        (rows, _), (_, columns) = (self._matrix(roles[role]) for role in "ab")
        if rows % part.rank or rows != columns:
            raise AdapterError(
                f"{roles['a']} and {roles['b']} in {self.file} have {rows} rows and {columns} "
                f"columns; both should be the rank {part.rank} "
                f"({self.config.source_of_rank(path)} of {CONFIG}) times the number of experts"
            )
        return part

    def _roles(self, path: str, roles: Mapping[str, str], wanted: list[str]) -> None:
        missing = [role for role in wanted if role not in roles]
        extra = [name for role, name in roles.items() if role not in wanted]
        if missing:
            words = {"a": "lora_A", "b": "lora_B", "bias": "lora_B.bias (lora_bias is true)"}
            words |= {"magnitude": "lora_magnitude_vector (use_dora is true)"}
            words |= {"table_a": "lora_embedding_A", "table_b": "lora_embedding_B"}
            raise AdapterError(f"{self.file} has no {words[missing[0]]} for {path}")
        if extra:
            raise AdapterError(
                f"{self.file} has {extra[0]}, which does not agree with lora_bias = "
                f"{str(self.config.has_bias).lower()}, use_dora = "
                f"{str(self.config.is_dora).lower()} in {CONFIG}"
            )

    def _matrix(self, name: str) -> tuple[int, int]:
        shape = self.shapes[name]
        if len(shape) > 2:
            raise AdapterError(
                f"{name} in {self.file} has the shape {list(shape)}: products of convolutions are "
                "not supported"
            )
        if len(shape) < 2 or 0 in shape:
            raise AdapterError(
                f"{name} in {self.file} has the shape {list(shape)}, not that of a matrix: the "
                "trainer saved it before its parts were gathered"
            )
        return shape[0], shape[1]

    def _vector(self, name: str, size: int) -> None:
        if (shape := self.shapes[name]) != (size,):
            raise AdapterError(
                f"{name} in {self.file} has the shape {list(shape)}, should be [{size}]"
            )

    def _rank(self, path: str, rank: int, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            if size != rank:
                raise AdapterError(
                    f"{name} in {self.file} has rank {size}, but "
                    f"{self.config.source_of_rank(path)} of {CONFIG} is {rank}"
                )
