"""Tiny random models as sentence-transformers saves them, in the form of version 6 and before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ("[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    "the",
    "cat",
    "sits",
    "on",
    "a",
    "mat",
    "dog",
    "runs",
    "fast",
    "stock",
    "prices",
    "fell",
    "today",
    "query",
    "passage",
    ":",
    "yes",
    "no",
    ",",
    ".",
    "Cat",
    "I",
    "you",
)
VOCAB = len(SPECIAL) + len(WORDS)
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 66,
    "pad_token_id": 1,  # always so in MPNet
    "initializer_range": 0.1,
}
DECODER = {**BASE, "num_key_value_heads": 1, "head_dim": 16, "eos_token_id": 3}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertConfig", BASE),
    "Roberta": ("RobertaConfig", {**BASE, "type_vocab_size": 2}),
    "XLMRoberta": ("XLMRobertaConfig", {**BASE, "type_vocab_size": 2}),
    "MPNet": ("MPNetConfig", BASE),
    "Gte": ("GteConfig", {**BASE, "type_vocab_size": 2}),
    "NomicBert": ("NomicBertConfig", BASE),
    "Gemma3Text": (
        "Gemma3TextConfig",
        {**DECODER, "use_bidirectional_attention": True, "sliding_window": 20, "eos_token_id": 3},
    ),
    "ModernBert": ("ModernBertConfig", {**BASE, "cls_token_id": 2, "sep_token_id": 3}),
    "Qwen3": ("Qwen3Config", DECODER),
    "Llama": ("LlamaConfig", DECODER),
}
"""Tiny sizes of each family."""


def random_model(family: str, ending: str = "Model", **options: Any) -> PreTrainedModel:
    """A random model of a family: ``BertForSequenceClassification`` with that ending. Its biases
    and norms are random too."""
    config_name, sizes = CONFIGS[family]
    torch.manual_seed(len(family + ending))
    config = getattr(transformers, config_name)(**{**sizes, **options})
    model: PreTrainedModel = getattr(transformers, f"{family}{ending}")(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.1)
    return model


def tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words with BERT's template."""
    ids = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    rust = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]",
        "[CLS] $A [SEP] $B:1 [SEP]:1",
        [("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    types = ["input_ids", "token_type_ids", "attention_mask"]
    values = {**names, "model_max_length": 64, "model_input_names": types, **options}
    return PreTrainedTokenizerFast(tokenizer_object=rust, **values)


def save_base(root: Path, model: PreTrainedModel, **options: Any) -> Path:
    """Save a model and its tokenizer as transformers does."""
    model.save_pretrained(str(root))
    tokenizer(**options).save_pretrained(str(root))
    return root


def save_sentences(
    root: Path,
    family: str,
    modules: Sequence[torch.nn.Module],
    *,
    transformer: dict[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Save a random model with modules after it as sentence-transformers 6 does. transformer:
    arguments of ``Transformer``; options: of ``SentenceTransformer``."""
    base = save_base(root / "base", random_model(family))
    first = Transformer(str(base), **(transformer or {}))
    with torch.no_grad():
        for module in modules:
            for value in module.parameters():
                value.add_(torch.randn_like(value) * 0.1)
    SentenceTransformer(modules=[first, *modules], **options).save_pretrained(str(root / "saved"))
    return root / "saved"


FORMER_MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def as_version_3(root: Path, *, max_seq_length: int, do_lower_case: bool = False) -> None:
    """Rewrite a directory of version 6 in the form of version 3."""
    modules = json.loads((root / "modules.json").read_text())
    for module in modules:
        name = module["type"].rpartition(".")[2]
        module["type"] = f"sentence_transformers.models.{name}"
        file = root / module["path"] / "config.json"
        if name == "Transformer":
            continue
        config = json.loads(file.read_text()) if file.exists() else {}
        if name == "Pooling":
            modes = {key: config["pooling_mode"] == mode for mode, key in FORMER_MODES.items()}
            config = {"word_embedding_dimension": config["embedding_dimension"], **modes}
        for key in ("module_input_name", "module_output_name"):
            config.pop(key, None)
        file.write_text(json.dumps(config))
        if name == "Normalize":
            file.unlink()
    (root / "modules.json").write_text(json.dumps(modules))
    texts = {"max_seq_length": max_seq_length, "do_lower_case": do_lower_case}
    (root / "sentence_bert_config.json").write_text(json.dumps(texts))
    file = root / "config_sentence_transformers.json"
    settings = json.loads(file.read_text())
    kept = ("prompts", "default_prompt_name", "similarity_fn_name")
    file.write_text(json.dumps({key: settings[key] for key in kept}))


def as_colbert(root: Path, dense: Dense) -> Path:
    """The weights in the form of Stanford's ColBERT: the linear layer with the model's tensors."""
    model = random_model("Bert")
    colbert = root / "colbert"
    tensors = {f"bert.{name}": value for name, value in model.state_dict().items()}
    tensors["linear.weight"] = dense.linear.weight.detach()
    save_base(colbert, model)
    save_file(tensors, str(colbert / "model.safetensors"))
    config = json.loads((colbert / "config.json").read_text())
    config |= {"architectures": ["HF_ColBERT"], "dim": 12}
    (colbert / "config.json").write_text(json.dumps(config))
    return colbert
