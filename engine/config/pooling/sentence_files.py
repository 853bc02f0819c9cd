"""Reads the files of sentence-transformers in a model directory, as versions 3 to 6 write them.

Types of modules are known by their last name, since the packages in front of it have moved.
Modules that are not supported are refused by name."""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from engine.config.model import ModelInfo, read_json
from engine.config.pooler import PoolingMode
from engine.config.pooling.spec import ACTIVATIONS, HeadLayer
from engine.errors import ModelError

logger = logging.getLogger("engine.config")

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
TOKENS, SENTENCE, SCORES, LOGITS = (
    "token_embeddings",
    "sentence_embedding",
    "scores",
    "causal_logits",
)
"""What modules read and write: a vector per token, one per text, scores, and logits of tokens."""
OUTPUTS = {"feature-extraction": TOKENS, "sequence-classification": SCORES}
OUTPUTS["text-generation"] = LOGITS
"""What the transformer computes, by its task."""
FORMER_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
MODES: dict[str, PoolingMode] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
SENTENCE_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
LENGTHS = (
    ("max_seq_length",),
    ("tokenizer_args", "model_max_length"),
    ("processor_kwargs", "model_max_length"),
    ("processing_kwargs", "common", "max_length"),
    ("processing_kwargs", "text", "max_length"),
)
"""Where the transformer's file may limit a text; later ones win."""
MANY = 1 << 30
"""Tokens from which a tokenizer's limit means that it has none."""


class SentenceFiles(NamedTuple):
    """What the files of sentence-transformers say."""

    result: str
    """What the last module computes: ``SENTENCE``, ``TOKENS`` or ``SCORES``."""
    mode: PoolingMode | None = None
    """``None``: no module pools."""
    layers: tuple[HeadLayer, ...] = ()
    """The layers after pooling, a normalisation at the end left out."""
    is_normalized: bool = False
    """Whether the last module normalises."""
    activation: str | None = None
    """The function after the scores, as its dotted path."""
    skipped_tokens: tuple[str, ...] = ()
    """Tokens of documents that are left out of scores."""
    prompts: Mapping[str, str] = MappingProxyType({})
    """Texts to put in front of an input, by name."""
    default_prompt_name: str | None = None
    """The prompt of requests that name none."""
    max_seq_length: int | None = None
    """Tokens after which an input is cut; ``None``: never."""
    lower_case: bool = False
    """Inputs are converted to lower case."""
    similarity: str | None = None
    """How embeddings are compared."""
    dimensions: int | None = None
    """Numbers of an embedding that are kept; ``None``: all."""


class Module(NamedTuple):
    """An entry of modules.json."""

    kind: str
    """The last name of its type."""
    folder: str
    """Inside the model's directory; empty: the directory itself."""
    config: Mapping[str, Any]
    """Its JSON file; empty without one."""
    file: Path
    """The file of ``config``, which need not exist."""


def read_sentence_files(info: ModelInfo, hidden_size: int, tokenizer: Path) -> SentenceFiles | None:
    """Read modules.json and the files that it names; ``None`` if the directory has none.

    hidden_size: numbers of a hidden state. tokenizer: directory of the tokenizer. Raises
    ``ModelError`` for damaged files and for modules that are not supported."""
    if not (info.path / MODULES).is_file():
        return None
    modules = _modules(info.path)
    settings = read_json(info.path / SETTINGS) or {}
    if not modules or modules[0].kind != "Transformer":
        found = modules[0].kind if modules else "nothing"
        raise ModelError(
            f"{info.path / MODULES} begins with {found!r:.80}, and only 'Transformer' is supported "
            "there: use a model that computes texts with a transformer"
        )
    first, *rest = modules
    if first.folder:
        raise ModelError(
            f"{info.path / MODULES} has the transformer in the folder {first.folder!r:.80}: move "
            "the files of this folder into the model's directory, and set its path to ''"
        )
    files = _Reader(info.path, hidden_size, _transformer_output(first)).read(rest, settings)
    return files._replace(
        **_texts(info, first, tokenizer),
        **_settings(info.path / SETTINGS, settings),
    )


def _modules(root: Path) -> list[Module]:
    file = root / MODULES
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is damaged: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise ModelError(f"{file} is damaged: expected a list of modules")
    return [_module(root, entry) for entry in entries]


def _module(root: Path, entry: dict[str, Any]) -> Module:
    kind, folder = entry.get("type"), entry.get("path", "")
    if not isinstance(kind, str) or not isinstance(folder, str):
        raise ModelError(
            f"{root / MODULES} is damaged: type and path of a module must be strings, got "
            f"{kind!r:.80} and {folder!r:.80}"
        )
    path = PurePosixPath(folder.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in folder:
        raise ModelError(
            f"{root / MODULES} names the folder {folder!r:.80}, which is not inside the model's "
            "directory"
        )
    name = kind.rpartition(".")[2]
    folder = "" if str(path) == "." else str(path)
    if name != "Transformer":
        file = root / folder / "config.json"
        return Module(name, folder, (read_json(file) or {}) if folder else {}, file)
    for each in SENTENCE_CONFIGS:
        config = read_json(root / folder / each)
        if config is not None:
            return Module(name, folder, config, root / folder / each)
    return Module(name, folder, {}, root / folder / SENTENCE_CONFIGS[0])


def lowers_case(root: Path) -> bool:
    """Whether the files of sentence-transformers in a directory say that texts are converted to
    lower case."""
    if not (root / MODULES).is_file():
        return False
    found = (read_json(root / name) for name in SENTENCE_CONFIGS)
    config: Mapping[str, Any] = next((each for each in found if each is not None), {})
    return bool(config.get("do_lower_case", False))


def _transformer_output(module: Module) -> str:
    task = module.config.get("transformer_task", "feature-extraction")
    if not isinstance(task, str) or task not in OUTPUTS:
        raise ModelError(
            f"{module.file} has transformer_task {task!r:.80}; supported are {', '.join(OUTPUTS)}"
        )
    return OUTPUTS[task]


class _Reader:
    """Follows the modules after the transformer."""

    def __init__(self, root: Path, hidden_size: int, output: str) -> None:
        self._root = root
        self._width = hidden_size
        self._current = output  # what the modules so far have computed
        self._mode: PoolingMode | None = None
        self._layers: list[HeadLayer] = []
        self._skipped: tuple[str, ...] = ()

    def read(self, modules: list[Module], settings: Mapping[str, Any]) -> SentenceFiles:
        for module in modules:
            read = getattr(self, f"_read_{module.kind.lower()}", None)
            if read is None or module.kind not in READ:
                _refuse(self._root, module)
            read(module, settings)
        if self._current == LOGITS:
            raise ModelError(
                f"{self._root / MODULES} has a transformer that computes logits and no LogitScore "
                "after it"
            )
        if settings.get("model_type") == "ColBERT":
            self._normalize()  # its code did this, and skipped punctuation
            words = settings.get("skiplist_words")
            self._skipped = tuple(string.punctuation) if words is None else _words(words)
        ends_normalized = bool(self._layers) and self._layers[-1].kind == "normalize"
        if ends_normalized:
            self._layers.pop()
        return SentenceFiles(
            result=self._current,
            mode=self._mode,
            layers=tuple(self._layers),
            is_normalized=ends_normalized,
            skipped_tokens=self._skipped,
        )

    def _read_pooling(self, module: Module, settings: Mapping[str, Any]) -> None:
        if self._current != TOKENS:
            raise ModelError(
                f"{self._root / MODULES} pools what {self._current} has pooled already"
            )
        if self._layers:
            raise ModelError(
                f"{self._root / MODULES} has {self._layers[-1].kind!r} in front of Pooling, which "
                "is not supported"
            )
        self._check_width(module, "embedding_dimension", "word_embedding_dimension")
        self._mode = _mode(module)
        self._current = SENTENCE
        if module.config.get("include_prompt") is False and any(_prompts(settings).values()):
            raise ModelError(
                f"{module.file} has include_prompt false, and leaving prompts out of the pooling "
                "is not supported"
            )

    def _read_dense(self, module: Module, settings: Mapping[str, Any]) -> None:
        config = module.config
        if not config:
            raise ModelError(f"{module.file} is missing: fetch the whole directory")
        default = TOKENS if _is_by_token(settings) else SENTENCE
        self._check_input(module, config.get("module_input_name") or default)
        self._check_width(module, "in_features")
        width = _size(module, "out_features")
        residual = bool(config.get("use_residual"))
        same = width == self._width
        self._layers.append(
            HeadLayer(
                kind="linear",
                folder=module.folder,
                names=("linear",),
                in_features=self._width,
                out_features=width,
                bias=bool(config.get("bias", True)),
                function=_function(module),
                residual="" if not residual else "input" if same else "projected",
            )
        )
        self._width = width
        self._current = config.get("module_output_name") or self._current
        if self._current not in (TOKENS, SENTENCE, SCORES):
            raise ModelError(
                f"{module.file} has module_output_name {self._current!r:.80}; supported are "
                f"{TOKENS}, {SENTENCE} and {SCORES}"
            )

    def _read_layernorm(self, module: Module, settings: Mapping[str, Any]) -> None:
        self._check_input(module, SENTENCE)
        self._check_width(module, "dimension")
        self._layers.append(
            HeadLayer(
                kind="layer_norm",
                folder=module.folder,
                names=("norm",),
                in_features=self._width,
                out_features=self._width,
                bias=True,
            )
        )

    def _read_normalize(self, module: Module, settings: Mapping[str, Any]) -> None:
        self._check_input(module, module.config.get("module_input_name") or SENTENCE)
        self._normalize()

    def _normalize(self) -> None:
        self._layers.append(
            HeadLayer(kind="normalize", in_features=self._width, out_features=self._width)
        )

    def _read_dropout(self, module: Module, settings: Mapping[str, Any]) -> None:
        """Does nothing outside training."""

    def _read_multivectormask(self, module: Module, settings: Mapping[str, Any]) -> None:
        self._check_input(module, TOKENS)
        config = module.config
        tasks = config.get("skiplist_tasks") or ["document"]
        if config.get("keep_only_token_ids") or tasks not in ("document", ["document"]):
            logger.warning(
                "%s leaves tokens out of scores: of keep_only_token_ids and skiplist_tasks, only "
                "words of documents have an effect here",
                module.file,
            )
        self._skipped = _words(config.get("skiplist_words") or [])

    def _read_logitscore(self, module: Module, settings: Mapping[str, Any]) -> None:
        self._check_input(module, LOGITS)
        yes, no = (module.config.get(f"{name}_token_id") for name in ("true", "false"))
        if type(yes) is not int or (no is not None and type(no) is not int):
            raise ModelError(
                f"{module.file} has true_token_id {yes!r:.80} and false_token_id {no!r:.80}, must "
                "be ids of tokens"
            )
        self._layers.append(
            HeadLayer(
                kind="logits",
                in_features=self._width,
                out_features=1,
                tokens=(yes,) if no is None else (no, yes),
                is_difference=no is not None,
            )
        )
        self._width, self._current, self._mode = 1, SCORES, "last"

    def _check_input(self, module: Module, wanted: object) -> None:
        if wanted != self._current:
            raise ModelError(
                f"{self._root / MODULES}: {module.kind} reads {wanted!r:.80}, and the modules in "
                f"front of it compute {self._current!r}"
            )

    def _check_width(self, module: Module, *keys: str) -> None:
        for key in keys:
            if key in module.config and _size(module, key) != self._width:
                raise ModelError(
                    f"{module.file} has {key} {module.config[key]}, and its input has "
                    f"{self._width} numbers"
                )


READ = ("Pooling", "Dense", "LayerNorm", "Normalize", "Dropout", "MultiVectorMask", "LogitScore")
"""Modules that are supported after the transformer."""


def _words(given: object) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(word, str) for word in given):
        raise ModelError(f"skiplist_words is {given!r:.80}, must be a list of words")
    return tuple(given)


def _refuse(root: Path, module: Module) -> NoReturn:
    raise ModelError(
        f"{root / MODULES} has a module of type {module.kind!r:.80}, which is not supported; "
        f"supported are Transformer, {', '.join(READ)}"
    )


def _mode(module: Module) -> PoolingMode:
    config = module.config
    if not config:
        raise ModelError(f"{module.file} is missing: fetch the whole directory")
    chosen = config.get("pooling_mode")
    if chosen is None:
        chosen = [name for key, name in FORMER_MODES.items() if config.get(key)] or ["mean"]
    modes = [chosen] if isinstance(chosen, str) else chosen
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in MODES:
        raise ModelError(
            f"{module.file} pools by {chosen!r:.120}; supported is one of {', '.join(MODES)}"
        )
    return MODES[modes[0]]


def _function(module: Module) -> str:
    path = module.config.get("activation_function", "torch.nn.modules.activation.Tanh")
    name = "identity" if path is None else str(path).rpartition(".")[2].lower()
    if name not in ACTIVATIONS:
        raise ModelError(
            f"{module.file} has activation_function {path!r:.120}; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _size(module: Module, key: str) -> int:
    value = module.config.get(key)
    if type(value) is not int or value < 1:
        raise ModelError(
            f"{module.file} is damaged: {key} is {value!r:.80}, must be a whole number"
        )
    return value


def _is_by_token(settings: Mapping[str, Any]) -> bool:
    return settings.get("model_type") in ("ColBERT", "MultiVectorEncoder")


def _texts(info: ModelInfo, module: Module, tokenizer: Path) -> dict[str, Any]:
    """What happens to texts: fields of ``SentenceFiles``."""
    if "message" in (module.config.get("modality_config") or {}):
        raise ModelError(
            f"{module.file} renders texts by the chat template ('message' in modality_config), "
            "which is not supported for pooling: delete that key, and render texts before"
        )
    for key in ("query_expansion", "query_length", "document_length"):
        if module.config.get(key) is not None:
            logger.warning("%s has %s, which has no effect here", module.file, key)
    return {
        "max_seq_length": _longest(module) or stated_length(info, tokenizer),
        "lower_case": bool(module.config.get("do_lower_case", False)),
    }


def _longest(module: Module) -> int | None:
    """The tokens after which a text is cut: the last value that sentence-transformers would
    apply."""
    found: int | None = None
    for path in LENGTHS:
        value: Any = module.config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise ModelError(
                f"{module.file} is damaged: {'.'.join(path)} is {value!r:.80}, must be a whole "
                "number of at least 1"
            )
        found = value
    return found


def stated_length(info: ModelInfo, tokenizer: Path) -> int | None:
    """Tokens after which sentence-transformers cuts the texts of a model that states no
    ``max_seq_length``: the smaller of the limits of tokenizer and model."""
    given = (read_json(tokenizer / "tokenizer_config.json") or {}).get("model_max_length")
    own = given if isinstance(given, int) and 0 < given < MANY else None
    limits = [limit for limit in (own, info.stated_positions) if limit is not None]
    return min(limits, default=None)


def _prompts(settings: Mapping[str, Any]) -> dict[str, str]:
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(v, str | None) for v in prompts.values()
    ):
        raise ModelError(
            f"{SETTINGS} is damaged: prompts is {prompts!r:.80}, must be texts by name"
        )
    return {name: text or "" for name, text in prompts.items()}


def _settings(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``SentenceFiles`` that config_sentence_transformers.json has."""
    prompts, default = _prompts(settings), settings.get("default_prompt_name")
    for name, prompt in (("query", "query_prefix"), ("document", "document_prefix")):
        prefix = settings.get(prompt) or ""
        if prefix:
            prompts[name] = prefix + prompts.get(name, "").removeprefix(prefix)
    if default is not None and default not in list(prompts):
        raise ModelError(
            f"{file} has default_prompt_name {default!r:.80}, which is not among its prompts: "
            f"{', '.join(prompts) or 'none'}"
        )
    kept = settings.get("truncate_dim")
    if kept is not None and (type(kept) is not int or kept < 1):
        raise ModelError(f"{file} is damaged: truncate_dim is {kept!r:.80}, must be a whole number")
    activation, similarity = settings.get("activation_fn"), settings.get("similarity_fn_name")
    return {
        "prompts": prompts,
        "default_prompt_name": default,
        "dimensions": kept,
        "activation": activation if isinstance(activation, str) else None,
        "similarity": similarity if isinstance(similarity, str) else None,
    }
