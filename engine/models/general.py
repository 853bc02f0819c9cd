"""Runs decoder-only models of transformers with our attention over the paged cache.

Weights and forward pass are those of transformers; only the attention function is replaced.
Whether a model works that way is checked by inspection and a trial run, not by a list of names:

    general_support    checks of config and class before weights are loaded
    general_attention  the paged attention function, and a recording one for the trial
    general_states     recurrent states, for which modules run sequence by sequence
    general_trial      runs a few tokens and checks that only attention relates them
    general_rope       makes rotary frequencies independent of the batch

Importing this module imports transformers, which takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as hf_logging

from engine.config.model import ModelConfig, ModelInfo
from engine.errors import ModelError
from engine.gguf.link import gguf_file
from engine.kv.layout import LayerCache, SharedKV
from engine.layers.batch import ForwardBatch, Hidden
from engine.layers.linear import is_cpu
from engine.layers.packed_modules import PACKED, pack_module
from engine.models.assemble import activation_dtype, compute_dtype
from engine.models.checkpoint import Checkpoint
from engine.models.general_attention import PAGED, STATE, TRIAL, PagedState, cache_arguments
from engine.models.general_mxfp4 import load_mxfp4
from engine.models.general_rope import fix_frequencies
from engine.models.general_states import parts_of
from engine.models.general_stored import load_stored
from engine.models.general_support import (
    Misfit,
    check_class,
    check_support,
    read_hf_config,
    refusal,
)
from engine.models.general_trial import Findings, is_close, run_trial
from engine.models.model import LayerCaches
from engine.models.quant import format_of
from kernels.meta import AttentionMeta, StateMeta

logger = logging.getLogger("engine.models")


class GeneralModel:
    """A causal model of transformers with our paged attention; see
    ``engine.models.model.Model``."""

    can_be_recorded = False
    has_largest = False
    is_causal = True

    def __init__(
        self,
        causal: PreTrainedModel,
        findings: Findings,
        dtype: torch.dtype,
        has_own_products: bool,
    ) -> None:
        self.dtype = dtype
        self.has_own_products = has_own_products
        self.vocab_size = findings.logits.shape[-1]
        self.cache_spec: tuple[LayerCache, ...] = tuple(
            replace(layer.cache, dtype_bytes=dtype.itemsize)
            if layer.source is None
            else SharedKV(source=layer.source)
            for layer in findings.layers
        )
        self._held = findings.states
        if self._held is not None:  # after all layers with attention
            self.cache_spec += tuple(mixer.cache for mixer in self._held.mixers)
        self._causal = causal
        self._backbone = findings.backbone
        self._embed: Any = causal.get_input_embeddings()
        self._output_type = findings.output_type
        self._state = PagedState(findings.layers)
        causal.set_attn_implementation(PAGED)
        for layer in findings.layers:
            setattr(layer.module, STATE, self._state)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: LayerCaches) -> Hidden:
        """Compute hidden states [R, H] of the wanted rows with the module's backbone."""
        tokens: dict[str, Any] = {"input_ids": batch.input_ids[None]}
        if batch.embeds is not None:
            vectors = self._embed(batch.input_ids)
            vectors[batch.embeds.rows] = batch.embeds.values.to(vectors.dtype)
            tokens = {"inputs_embeds": vectors[None]}
        positions = batch.positions
        with self._step(batch, kv) as arguments:
            output = self._backbone(
                **tokens,
                **arguments,
                position_ids=positions[None] if positions.dim() == 1 else positions[:, None],
                output_hidden_states=bool(batch.aux_layers),
            )
        # Entry 0 of hidden_states is the input of the first layer.
        aux = tuple(output.hidden_states[layer + 1][0] for layer in batch.aux_layers)
        hidden = output[0][0]
        return Hidden(hidden if batch.wanted is None else hidden[batch.wanted.rows], aux)

    @contextmanager
    def _step(self, batch: ForwardBatch, kv: LayerCaches) -> Iterator[dict[str, Any]]:
        """Context in which the module runs a step, with the arguments that it needs."""
        num_layers = len(self._state.layers)
        attn = cast(tuple[AttentionMeta, ...], batch.attn[:num_layers])
        with self._state.during(attn, kv[:num_layers]):
            if self._held is None:
                yield {"use_cache": False} | cache_arguments(self._causal, batch.positions)
                return
            parts = parts_of(cast(StateMeta, batch.attn[-1]))
            with self._held.during(parts, kv[num_layers:], len(batch.input_ids)):
                yield self._held.arguments

    def lower_layers(self, batch: ForwardBatch, kv: LayerCaches) -> torch.Tensor:
        raise NotImplementedError("graphs of transformers modules are not supported")

    def last_layer(
        self, stream: torch.Tensor, batch: ForwardBatch, kv: LayerCaches
    ) -> torch.Tensor:
        raise NotImplementedError("graphs of transformers modules are not supported")

    def largest(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Always ``None``: such a model cannot find the largest logit without storing the
        logits."""
        return None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, V] float32 of hidden states [R, H], including all that the module does after
        its backbone."""
        assert out is None, "graphs of transformers modules are not supported"
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        with self._backbone_returns(self._output_type(last_hidden_state=hidden[None])):
            return self._causal(input_ids=ids, use_cache=False).logits[0].float()

    @contextmanager
    def _backbone_returns(self, output: Any) -> Iterator[None]:
        """Context in which the module's backbone returns ``output`` without computing anything."""
        self._backbone.forward = lambda *_, **__: output
        try:
            yield
        finally:
            del self._backbone.forward


def load_general(
    config: ModelConfig, info: ModelInfo, *, device: str, max_model_len: int
) -> GeneralModel:
    """Load a model with transformers and our attention. Raises ``ModelError`` with the architecture
    and the reason if that is not possible."""
    hf = read_hf_config(config, info)
    check_support(config, info, hf)
    dtype = compute_dtype(config, info, device, _main_dtype(info))
    try:
        if config.load_format == "dummy":
            causal = _random(config, info, hf, dtype)
        else:
            causal = _stored(config, info, hf, dtype, device)
    except ModelError:
        raise
    except Exception as error:
        if TRIAL in str(error):
            raise refusal(info, "a part of it works only with transformers' attention") from error
        raise ModelError(f"transformers cannot load {info.path}: {error}") from error
    causal.eval().requires_grad_(False).to(device)
    activations = activation_dtype(dtype, device)
    try:
        check_class(type(causal), hf)
        fix_frequencies(causal, max_model_len)
        is_packed = dtype in PACKED and is_cpu(torch.device(device))
        if is_packed:
            head = causal.get_output_embeddings()
            pack_module(causal, activations, head=head, transposed=Conv1D)
        model = _tried(causal, max_model_len, activations, is_packed)
    except Misfit as reason:
        raise refusal(info, reason) from reason.__cause__
    logger.info("%s is computed by transformers' module (%s)", type(causal).__name__, dtype)
    return model


def _random(
    config: ModelConfig, info: ModelInfo, hf: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Create the module with seeded random weights, as its class initialises them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return AutoModelForCausalLM.from_config(
            hf,
            dtype=dtype,
            attn_implementation=TRIAL,
            trust_remote_code=config.trust_remote_code,
        )


def _main_dtype(info: ModelInfo) -> torch.dtype | None:
    """The dtype of most plain numbers of a quantised directory; ``None`` for other models."""
    if format_of(info) is None:
        return None
    with Checkpoint(info.path) as checkpoint:
        return checkpoint.main_dtype()


def _stored(
    config: ModelConfig, info: ModelInfo, hf: PreTrainedConfig, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    """Load the module with the weights of the directory. Raises ``ModelError`` if some are
    missing, or of another model."""
    options: dict[str, Any] = {
        "config": hf,
        "dtype": dtype,
        "attn_implementation": TRIAL,
        "output_loading_info": True,
    }
    form = format_of(info)
    with _no_progress_bar():
        if form is not None or gguf_file(info.path) is not None:
            load = load_mxfp4 if form is not None and form.name == "mxfp4" else load_stored
            causal, report = load(
                info, hf, device, options, quantize_activations=config.quantize_activations
            )
        else:
            causal, report = AutoModelForCausalLM.from_pretrained(
                info.path,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=config.trust_remote_code,
                **options,
            )
    missing = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if missing:
        raise ModelError(
            f"{info.path} lacks weights of {type(causal).__name__}: {', '.join(missing[:5])}"
            f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}"
        )
    return causal


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


@torch.inference_mode()
def _tried(
    causal: PreTrainedModel, max_model_len: int, dtype: torch.dtype, is_packed: bool
) -> GeneralModel:
    """Make a model from a module of transformers. Raises ``Misfit`` if a trial with a few tokens
    fails."""
    text = causal.config.get_text_config(decoder=True)
    try:
        findings = run_trial(causal, text.vocab_size, max_model_len)
    except Misfit:
        raise
    except Exception as error:
        raise Misfit(f"a trial of a few tokens failed with {error!r}") from error
    num_layers = text.num_hidden_layers
    if findings.states is not None:
        num_layers = findings.states.num_attention_layers
    if len(findings.layers) < num_layers:
        raise Misfit(f"it calls attention {len(findings.layers)} times in {num_layers} layers")
    model = GeneralModel(causal, findings, dtype, is_packed)
    if not is_close(model.logits(findings.hidden), findings.logits.float()):
        raise Misfit("its logits depend on more than the output of its backbone")
    return model
