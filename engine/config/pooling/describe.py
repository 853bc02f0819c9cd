"""Says in words what a ``PoolingSpec`` has, for the log."""

from __future__ import annotations

from engine.config.pooling.spec import HeadLayer, PoolingSpec


def describe(spec: PoolingSpec, assumed: list[str]) -> str:
    """A spec in words. assumed: what no file states."""
    parts = [f"task {spec.task}"]
    if not spec.is_by_token:
        parts.append(f"{spec.mode} pooling")
    parts += [_layer(layer) for layer in spec.layers]
    parts.append(f"then {spec.activation if spec.is_activated else 'nothing'}")
    if spec.labels:
        parts.append(f"{len(spec.labels)} labels")
    if spec.dimensions is not None:
        parts.append(f"{spec.dimensions} dimensions")
    if spec.similarity is not None:
        parts.append(f"compared by {spec.similarity}")
    if spec.skipped_tokens:
        parts.append(f"scores skip {len(spec.skipped_tokens)} tokens of documents")
    parts += _texts(spec)
    if assumed:
        parts.append(f"assumed: {'; '.join(assumed)}")
    return ", ".join(parts)


def _layer(layer: HeadLayer) -> str:
    size = f" {layer.in_features} x {layer.out_features}" if layer.kind == "linear" else ""
    tokens = f" of {', '.join(map(repr, layer.tokens))}" if layer.tokens else ""
    function = "" if layer.function == "identity" else f" {layer.function}"
    return f"{layer.kind}{size}{tokens}{function}"


def _texts(spec: PoolingSpec) -> list[str]:
    parts = []
    if spec.prompts:
        default = spec.default_prompt_name or "none"
        parts.append(f"prompts {', '.join(spec.prompts)} (default {default})")
    if spec.max_seq_length is not None:
        parts.append(f"texts are cut at {spec.max_seq_length} tokens")
    if spec.lower_case:
        parts.append("texts in lower case")
    return parts
