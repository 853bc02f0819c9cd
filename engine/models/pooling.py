"""Turns pooled hidden states into embeddings or scores, with the layers of a ``PoolingSpec``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from engine.config.model import ModelConfig, ModelInfo
from engine.config.pooling.spec import HeadLayer, PooledTask, PoolingSpec
from engine.errors import ModelError
from engine.layers.linear import make_linear
from engine.models.checkpoint import Checkpoint, StoredTensor
from engine.models.opening import open_checkpoint
from engine.text.tokenizer import load_tokenizer

logger = logging.getLogger("engine.models")
Layer = Callable[[torch.Tensor], torch.Tensor]
OUTPUT_LAYERS = ("lm_head", "model.embed_tokens", "model.language_model.embed_tokens")
"""Names of the output layer, and of the embedding that it may be tied to."""
FUNCTIONS: dict[str, Layer] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
}
DUMMY_SPREAD = 0.02  # standard deviation of random weights


class Head:
    """The layers between pooled hidden states and results. All arithmetic is in float32."""

    def __init__(self, spec: PoolingSpec, layers: list[Layer]) -> None:
        self.spec = spec
        self._layers = layers

    def __call__(self, pooled: torch.Tensor, task: PooledTask | None = None) -> torch.Tensor:
        """Compute results without the last operation. pooled: [R, H], float32; task: ``None`` for
        the model's own. Returns [R, D], float32.

        The embedding of a token by a model that was made for embeddings of texts is its hidden
        state: the layers are for texts."""
        if self._is_bare(task):
            return pooled
        for layer in self._layers:
            pooled = layer(pooled)
        return pooled

    def activate(
        self,
        values: torch.Tensor,
        task: PooledTask | None = None,
        *,
        use_activation: bool | None = None,
        dimensions: int | None = None,
    ) -> torch.Tensor:
        """Apply the last operation to results of requests that agree in all parameters.

        values: [R, D], float32, as ``__call__`` returns them. use_activation: ``None`` for the
        model's own choice. dimensions: numbers that are kept of an embedding. Returns [R, d]."""
        spec, is_bare = self.spec, self._is_bare(task)
        if spec.activation == "normalize":
            kept = spec.dimensions if dimensions is None and not is_bare else dimensions
            values = values if kept is None else values[:, :kept]
        elif spec.logit_mean or spec.logit_sigma != 1.0:
            values = (values - spec.logit_mean) / spec.logit_sigma
        own = spec.is_activated and not is_bare
        if not (own if use_activation is None else use_activation):
            return values
        match spec.activation:
            case "normalize":
                return F.normalize(values, p=2.0, dim=-1)
            case "softmax":
                return torch.softmax(values, dim=-1)
            case "sigmoid":
                return torch.sigmoid(values)
            case "tanh":
                return torch.tanh(values)
            case "none":
                return values

    def _is_bare(self, task: PooledTask | None) -> bool:
        """Whether results of this task are hidden states."""
        return task == "token_embed" and self.spec.task == "embed"


def load_head(spec: PoolingSpec, info: ModelInfo, config: ModelConfig, device: str) -> Head:
    """Load the layers of a spec from the model's directory; random ones for dummy weights.

    Raises ``ModelError`` for weights that are missing, pickled, or of another shape."""
    loader = _Loader(info, config, torch.device(device))
    return Head(spec, [loader.load(layer) for layer in spec.layers])


class _Loader:
    """Reads the weights of one layer after the other."""

    def __init__(self, info: ModelInfo, config: ModelConfig, device: torch.device) -> None:
        self._info = info
        self._config = config
        self._device = device
        self._random = torch.Generator().manual_seed(config.seed)

    def load(self, layer: HeadLayer) -> Layer:
        if layer.kind == "normalize":
            return partial(F.normalize, p=2.0, dim=-1)
        if self._config.load_format == "dummy":
            return self._make(layer, *self._made_up(layer))
        with self._open(layer.folder) as checkpoint:
            stored = _Stored(layer, checkpoint)
            if layer.kind == "logits":
                return self._make(layer, self._rows(layer, stored), None, None)
            projection = stored.matrix("residual") if layer.residual == "projected" else None
            weight = stored.matrix() if layer.kind == "linear" else stored.vector("weight")
            return self._make(layer, weight, stored.bias(), projection)

    def _open(self, folder: str) -> Checkpoint:
        root = self._info.path / folder
        if not folder:
            return open_checkpoint(root)
        if not root.is_dir():
            raise ModelError(f"{root} does not exist, and modules.json names it: fetch it")
        if not any(root.glob("*.safetensors")):
            raise _no_module_weights(root)
        return Checkpoint(root)

    def _made_up(
        self, layer: HeadLayer
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        shape = (layer.out_features, layer.in_features)
        if layer.kind == "layer_norm":
            return torch.ones(layer.out_features), torch.zeros(layer.out_features), None
        weight = torch.randn(shape, generator=self._random) * DUMMY_SPREAD
        projection = torch.zeros(shape) if layer.residual == "projected" else None
        return weight, torch.zeros(layer.out_features) if layer.bias else None, projection

    def _rows(self, layer: HeadLayer, stored: _Stored) -> torch.Tensor:
        ids = [self._id(token) for token in layer.tokens]
        rows = stored.rows(ids)
        return rows[1:] - rows[:1] if layer.is_difference else rows

    def _id(self, token: str | int) -> int:
        if isinstance(token, int):
            return token
        found = load_tokenizer(self._config).backend.token_id(token)
        if found is None:
            raise ModelError(
                f"classifier_from_token names {token!r:.80}, which is no token of {self._info.path}"
            )
        return found

    def _make(
        self,
        layer: HeadLayer,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        projection: torch.Tensor | None,
    ) -> Layer:
        if layer.kind == "layer_norm":
            shift = None if bias is None else bias.to(self._device)
            shape = (layer.in_features,)
            return partial(_layer_norm, shape, weight.to(self._device), shift, layer.eps)
        make = partial(make_linear, device=self._device, batch_invariant=True)
        product = make(weight, bias)
        function = FUNCTIONS.get(layer.function)
        applied = product if function is None else partial(_chain, product, function)
        if layer.residual == "input":
            return partial(_add, applied, None)
        return applied if projection is None else partial(_add, applied, make(projection))


def _no_module_weights(root: Path) -> ModelError:
    if any(root.glob("*.bin")):
        return ModelError(
            f"{root} has only pickled weights, which can run code when loaded; save the model "
            "again with sentence-transformers: SentenceTransformer(path).save_pretrained(new_path)"
        )
    return ModelError(f"{root} has no *.safetensors files; fetch the whole model directory")


def _chain(first: Layer, second: Layer, x: torch.Tensor) -> torch.Tensor:
    return second(first(x))


def _add(layer: Layer, projection: Layer | None, x: torch.Tensor) -> torch.Tensor:
    return layer(x) + (x if projection is None else projection(x))


def _layer_norm(
    shape: tuple[int, ...],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    x: torch.Tensor,
) -> torch.Tensor:
    return F.layer_norm(x, shape, weight, bias, eps)


class _Stored:
    """The tensors of one layer in a checkpoint, as float32."""

    def __init__(self, layer: HeadLayer, checkpoint: Checkpoint) -> None:
        self._layer = layer
        self._checkpoint = checkpoint
        names = OUTPUT_LAYERS if layer.kind == "logits" else layer.names
        self._name = next((n for n in names if f"{n}.weight" in checkpoint.tensors), names[0])

    def matrix(self, name: str | None = None) -> torch.Tensor:
        shape = (self._layer.out_features, self._layer.in_features)
        return self._read(f"{self._name if name is None else name}.weight", shape)

    def vector(self, part: str) -> torch.Tensor:
        return self._read(f"{self._name}.{part}", (self._layer.out_features,))

    def bias(self) -> torch.Tensor | None:
        has = self._layer.bias
        if has is None:
            has = f"{self._name}.bias" in self._checkpoint.tensors
        return self.vector("bias") if has else None

    def rows(self, ids: list[int]) -> torch.Tensor:
        """Rows of the output layer, [len(ids), in_features]."""
        name, width = f"{self._name}.weight", self._layer.in_features
        stored = self._find(name)
        if len(stored.shape) != 2 or stored.shape[1] != width:
            raise ModelError(
                f"{name} in {stored.file} is {list(stored.shape)}, must be [*, {width}]"
            )
        most = stored.shape[0] - 1
        wrong = [token for token in ids if not 0 <= token <= most]
        if wrong:
            raise ModelError(
                f"{self._checkpoint.root} scores by the token {wrong[0]}, and its ids are 0..{most}"
            )
        rows = torch.empty(len(ids), width)
        for row, token in zip(rows, ids, strict=True):
            self._checkpoint.read(name, token * width, row)
        return rows

    def _find(self, name: str) -> StoredTensor:
        if name not in self._checkpoint.tensors:
            raise ModelError(
                f"{self._checkpoint.root} has no tensor {name}, which its results need: it has no "
                "weights for this task, or they are incomplete"
            )
        return self._checkpoint.tensors[name]

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        stored = self._find(name)
        if stored.shape != shape:
            raise ModelError(
                f"{name} in {stored.file} is {list(stored.shape)}, must be {list(shape)} by the "
                "configuration"
            )
        out = torch.empty(shape)
        if out.numel():
            self._checkpoint.read(name, 0, out)
        return out
