"""The model in the box as plain PyTorch, for training: the Llama architecture and nothing else.

Parameter names are those of a Hugging Face checkpoint, so `state_dict()` is the checkpoint.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOSS_CHUNK = 1024  # rows of logits alive at a time


class Shape(NamedTuple):
    """Sizes of the network; the defaults are the model in the box."""

    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 6
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    max_position: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02


def llama_config(shape: Shape, eos_token_id: int, pad_token_id: int) -> dict[str, object]:
    """`config.json` of a network of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "initializer_range": shape.initializer_range,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": "bfloat16",
    }


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape  # x: [batch, length, hidden_size]
        q, k, v = (
            proj(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = self.shape.num_heads // self.shape.num_kv_heads
        q, k = rotate(q.float(), cos, sin), rotate(k.float(), cos, sin)
        k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v.float()))
        with torch.autocast("cpu", enabled=False):  # float32 is the faster one for narrow heads
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Gated SiLU feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Network(nn.Module):
    """The language model with tied embeddings; calling it gives the mean next-token loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Decoder(shape)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.arange(shape.max_position)[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)  # [max_position, head_dim]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialize(shape)

    def _initialize(self, shape: Shape) -> None:
        """Normal weights; those that write to the residual stream start small."""
        for name, weight in self.named_parameters():
            if "embed_tokens" in name:
                nn.init.normal_(weight, std=shape.initializer_range)
            elif weight.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.5 * (2 * shape.num_layers) ** -0.5 if residual else 0.5
                nn.init.normal_(weight, std=scale * weight.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean cross entropy of `ids[:, 1:]` given what precedes; `ids` is [batch, length + 1]."""
        length = ids.shape[1] - 1
        hidden = self.model(ids[:, :-1], self.cos[:length], self.sin[:length])
        targets = ids[:, 1:].flatten()
        losses = [
            F.cross_entropy(self._logits(part), wanted, reduction="sum")
            for part, wanted in zip(
                hidden.flatten(0, 1).split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True
            )
        ]
        return torch.stack(losses).sum() / targets.numel()

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` [..., length, head_dim], halves paired as in Hugging Face Llama."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos + turned * sin
