"""What a model directory says about pooling: how hidden states become embeddings or scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.config.pooler import Activation, PoolingMode

PooledTask = Literal["embed", "classify", "token_embed", "token_classify"]
LayerKind = Literal["linear", "layer_norm", "normalize", "logits"]
ACTIVATIONS = {
    "identity": "identity",
    "tanh": "tanh",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
}
"""Functions after a linear layer, by their names in configurations, in lower case."""


@dataclass(frozen=True, kw_only=True)
class HeadLayer:
    """A layer between hidden states and results."""

    kind: LayerKind
    """``logits``: scores from the rows of the output layer that belong to ``tokens``."""
    folder: str = ""
    """Folder of its weights in the model's directory; empty: the model's own weights."""
    names: tuple[str, ...] = ()
    """Names that the module has in checkpoints; the first one that is stored is read."""
    in_features: int
    """Numbers of a vector that it takes."""
    out_features: int
    """Numbers of a vector that it returns."""
    bias: bool | None = None
    """Whether it has a bias; ``None``: if one is stored."""
    function: str = "identity"
    """Applied to its output: a value of ``ACTIVATIONS``."""
    eps: float = 1e-5
    """Added to the variance by ``layer_norm``."""
    residual: Literal["", "input", "projected"] = ""
    """What a linear layer adds to its output: nothing, its input, or a product of its input."""
    tokens: tuple[str | int, ...] = ()
    """Tokens, or their ids, of the scores."""
    is_difference: bool = False
    """The only score is the logit of the second token less that of the first."""


@dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """How a model's hidden states become the results of pooled requests."""

    task: PooledTask
    """The task of requests that name none."""
    mode: PoolingMode
    """How one vector is made of the hidden states of a text. Tasks by token do not pool."""
    layers: tuple[HeadLayer, ...] = ()
    """Applied in this order to each pooled vector, or to each hidden state."""
    hidden_size: int
    """Numbers of a hidden state."""
    activation: Activation
    """The last operation, if a request or ``is_activated`` wants it."""
    is_activated: bool
    """Whether requests that leave it open get the last operation."""
    logit_mean: float = 0.0
    """Subtracted from scores before the activation."""
    logit_sigma: float = 1.0
    """Scores less ``logit_mean`` are divided by it."""
    dimensions: int | None = None
    """Numbers of an embedding for requests that leave it open; ``None``: all."""
    is_matryoshka: bool = False
    """Whether a request may have fewer dimensions."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """Dimensions that a request may have; empty: any up to the width."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts to put in front of an input, by name."""
    default_prompt_name: str | None = None
    """The prompt of requests that name none."""
    max_seq_length: int | None = None
    """Tokens after which an input is cut, special tokens included; ``None``: never."""
    lower_case: bool = False
    """Inputs are converted to lower case."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    skipped_tokens: tuple[str, ...] = ()
    """Tokens of documents, such as punctuation, that late interaction leaves out of scores."""
    similarity: str | None = None
    """How embeddings are compared: cosine, dot, euclidean, manhattan, maxsim or meanmaxsim."""

    @property
    def width(self) -> int:
        """Numbers of a result, before a request's ``dimensions``."""
        return self.layers[-1].out_features if self.layers else self.hidden_size

    @property
    def is_by_token(self) -> bool:
        """True if the layers are made for the hidden state of each token."""
        return self.task in ("token_embed", "token_classify")

    @property
    def tasks(self) -> tuple[PooledTask, ...]:
        """All tasks of the model, the default one first."""
        other: dict[PooledTask, tuple[PooledTask, ...]] = {
            "embed": ("embed", "token_embed"),
            "classify": ("classify", "token_classify"),
        }
        return other.get(self.task, (self.task,))
