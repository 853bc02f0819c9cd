"""llama.cpp's compiled libraries, as the npm package node-llama-cpp ships them, called by ctypes.

    npm install --omit=optional --ignore-scripts node-llama-cpp@3.21.1 \
        @node-llama-cpp/linux-x64@3.21.1

The package has one library of CPU code for each kind of processor; llama.cpp loads the best one.
The declarations are those of llama.h in node-llama-cpp 3.21.1 (llama.cpp v0.4.0).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path

import numpy as np

VERSION = "llama.cpp v0.4.0 of node-llama-cpp 3.21.1"
LIBRARIES = "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
DEFAULTS = {"n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "type_k": 1, "type_v": 1}


class ModelParams(ctypes.Structure):
    """``llama_model_params``."""

    _fields_ = (
        *((name, c_void_p) for name in ("devices", "tensor_buft_overrides")),
        *((name, c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode")),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        *((name, c_void_p) for name in ("progress_callback", "user_data", "kv_overrides")),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts")),
        *((name, c_bool) for name in ("no_host", "no_alloc", "load_mtp")),
    )


class ContextParams(ctypes.Structure):
    """``llama_context_params``."""

    _fields_ = (
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch")),
        *((name, c_int32) for name in ("ctx_type", "rope_scaling_type", "pooling_type")),
        *((name, c_int32) for name in ("attention_type", "flash_attn_type")),
        *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor")),
        *((name, c_float) for name in ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        *((name, c_void_p) for name in ("cb_eval", "cb_eval_user_data")),
        *((name, c_int32) for name in ("type_k", "type_v")),
        *((name, c_void_p) for name in ("abort_callback", "abort_callback_data")),
        *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload")),
        *((name, c_bool) for name in ("swa_full", "kv_unified")),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


SIGNATURES = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (c_void_p, c_void_p)),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_batch_init": (Batch, (c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
    "llama_print_system_info": (c_char_p, ()),
}


def loaded(directory: Path) -> ctypes.CDLL:
    """Load the libraries below the directory in which the npm package was installed. Raises
    ``ValueError`` if they are missing or of a version with other declarations."""
    place = directory / LIBRARIES
    found = sorted(place.glob("libllama.v*.so"))
    if not found:
        raise ValueError(f"{place} has no libllama: install node-llama-cpp there, see {__file__}")
    ggml = ctypes.CDLL(str(next(place.glob("libggml.v*.so"))), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(found[0]), ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(ctypes.cast(_silent, c_void_p), None)
    library.llama_backend_init()
    ggml.ggml_backend_load_all_from_path(str(place).encode())
    params = library.llama_context_default_params()
    if any(getattr(params, name) != value for name, value in DEFAULTS.items()):
        raise ValueError(f"{found[0]} has other structures than {VERSION}")
    return library


@ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
def _silent(level: int, text: bytes, data: int) -> None:
    """Drop a line of llama.cpp's log."""


def used_body() -> str:
    """The name of the library of CPU code that this process has loaded."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = {Path(line.split()[-1]).name for line in maps if "libggml-cpu-" in line}
    return ", ".join(sorted(names)) or "none"


class LlamaCpp:
    """A model in a context of llama.cpp, with llama.cpp's defaults but for the threads, the number
    of sequences and the length."""

    def __init__(
        self, directory: Path, model: str, *, threads: int, num_seqs: int = 1, max_len: int = 1024
    ) -> None:
        """max_len: tokens of each sequence. Raises ``ValueError`` for a model that llama.cpp does
        not load."""
        self.library = library = loaded(directory)
        self._model = library.llama_model_load_from_file(
            model.encode(), library.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {model}")
        params = library.llama_context_default_params()
        params.n_ctx, params.n_seq_max = max_len * num_seqs, num_seqs
        params.n_threads = params.n_threads_batch = threads
        self._context = library.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp cannot make a context for {model}")
        self.vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self.max_batch = params.n_batch
        self._batch = library.llama_batch_init(self.max_batch, 0, 1)
        self.info = library.llama_print_system_info().decode()

    def clear(self) -> None:
        """Forget all sequences."""
        self.library.llama_memory_clear(self.library.llama_get_memory(self._context), True)

    def remove(self, sequence: int) -> None:
        """Forget one sequence."""
        memory = self.library.llama_get_memory(self._context)
        self.library.llama_memory_seq_rm(memory, sequence, -1, -1)

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Compute tokens together. rows: token id, position, sequence, and whether the logits after
        the token are wanted; at most ``max_batch``."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for place, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = is_wanted
        if (code := self.library.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code} for {len(rows)} tokens")

    def logits(self, place: int) -> np.ndarray:
        """Logits [vocabulary] after row ``place`` of the last ``decode``, valid until the next."""
        pointer = self.library.llama_get_logits_ith(self._context, place)
        return np.ctypeslib.as_array(pointer, shape=(self.vocab_size,))
