"""The small model of the engine's package as a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFWriter, SpecialVocab
from tokenizers import Tokenizer

from engine.assets import BOX_MODEL
from support.gguf_tokenizers import texts_and_types
from support.made_gguf import MadeGguf


def box_as_gguf(
    file: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.BF16,
    others: Mapping[str, GGMLQuantizationType] | None = None,
) -> bytes:
    """Write the small model of the engine's package as a GGUF file; returns its bytes.

    kind: the type of matrices; others: types of tensors by the end of their name."""
    made = MadeGguf(BOX_MODEL, kind, others or {})
    writer = GGUFWriter(file, made.architecture)
    made.add_metadata(writer)
    tokenizer = Tokenizer.from_file(str(BOX_MODEL / "tokenizer.json"))
    texts, types = texts_and_types(tokenizer, is_spaced=False, vocab_size=0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    special = SpecialVocab(BOX_MODEL, load_merges=True, n_vocab=len(texts))
    writer.add_token_merges(special.merges)
    writer.add_chat_template(str(special.chat_template))
    for name, (packed, kind) in made.tensors.items():
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()
