"""A stand-in for the package flashinfer: notes each call, computes in plain torch from what it was
told and from nothing else, and asserts what FlashInfer's documentation asks of the arguments.

Parameters have the names, and where that matters the places, of FlashInfer 0.2 to 0.7; optional
ones of ``plan`` are keywords, as the newest wants them.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

MOST_CORES_GROUP = {1, 2, 3, 4, 6, 8, 16}  # group sizes with a decode kernel without tensor cores
HEAD_DIMS = {64, 128, 256, 512}


class Call(NamedTuple):
    wrapper: str  # "decode" or "prefill"
    name: str  # "init", "plan" or "run"
    args: dict[str, Any]  # tensors as they were


class FakeFlashInfer(ModuleType):
    def __init__(self) -> None:
        super().__init__("flashinfer")
        self.calls: list[Call] = []
        self.BatchDecodeWithPagedKVCacheWrapper = type("Decode", (_Decode,), {"package": self})
        self.BatchPrefillWithPagedKVCacheWrapper = type("Prefill", (_Prefill,), {"package": self})

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]


def install(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    """As the package that an import finds."""
    fake = FakeFlashInfer()
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    return fake


class _Wrapper:
    package: FakeFlashInfer
    kind = ""

    def _note(self, name: str, args: dict[str, Any]) -> None:
        held = {
            key: value.clone() if isinstance(value, torch.Tensor) and value.numel() < 999 else value
            for key, value in args.items()
            if key not in ("self", "__class__")
        }
        self.package.calls.append(Call(self.kind, name, held))

    def _init(self, workspace: torch.Tensor, kv_layout: str, use_cuda_graph: bool) -> None:
        assert workspace.dtype is torch.uint8 and not workspace.any()
        assert kv_layout in ("HND", "NHD") and not use_cuda_graph
        self._layout = kv_layout
        self._plan: dict[str, Any] | None = None

    def _check_pages(
        self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, page_size: int
    ) -> None:
        assert {t.dtype for t in (indptr, indices, last)} == {torch.int32}
        assert indptr.is_cpu and last.is_cpu, "plan() would wait for the device"
        assert len(last) == len(indptr) - 1 and indptr[0] == 0 and indptr[-1] == len(indices)
        assert (indptr.diff() >= 1).all() and last.min() >= 1 and last.max() <= page_size

    def _run(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        plan = self._plan
        assert plan is not None, "run() before plan()"
        if self._layout == "NHD":
            kv = kv.transpose(2, 3)
        heads, kv_heads, head_dim = plan["num_qo_heads"], plan["num_kv_heads"], plan["head_dim"]
        assert q.dtype == plan["q_data_type"] and kv.dtype == plan["kv_data_type"]
        assert q.dtype in (torch.float16, torch.bfloat16) and head_dim in HEAD_DIMS
        assert q.shape == out.shape == (int(plan["qo_indptr"][-1]), heads, head_dim)
        assert q.is_contiguous() and out.is_contiguous() and out.dtype == q.dtype
        assert kv.shape[1:] == (2, kv_heads, plan["page_size"], head_dim)
        for s, last in enumerate(plan["last_page_len"].tolist()):
            begin, end = plan["indptr"][s : s + 2].tolist()
            first, behind = plan["qo_indptr"][s : s + 2].tolist()
            length = (end - begin - 1) * plan["page_size"] + last
            pages = kv[plan["indices"][begin:end].long()].transpose(0, 1).transpose(1, 2)
            keys, values = pages.flatten(2, 3)[:, :, :length].float()  # [Hkv, length, D]
            out[first:behind] = _attend(q[first:behind].float(), keys, values, plan).to(out.dtype)
        return out


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: dict[str, Any]
) -> torch.Tensor:
    """q [T, Hq, D], the last T of the keys' positions if causal; a value times zero counts."""
    group, num, length = q.shape[1] // len(keys), len(q), keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
    sm_scale = plan["sm_scale"] or q.shape[2] ** -0.5
    scores = torch.einsum("thd,hkd->htk", q, keys) * sm_scale
    if plan["logits_soft_cap"]:
        scores = plan["logits_soft_cap"] * torch.tanh(scores / plan["logits_soft_cap"])
    query = torch.arange(length - num, length)[:, None]
    key = torch.arange(length)[None]
    hidden = key > query if plan["causal"] else torch.zeros(num, length, dtype=torch.bool)
    if plan["window_left"] >= 0:
        hidden = hidden | (key < query - plan["window_left"])
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("htk,hkd->thd", weights, values)


class _Decode(_Wrapper):
    kind = "decode"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:
        self._note("init", locals())
        self._init(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._has_cores = use_tensor_cores

    def plan(  # noqa: PLR0913 - as the library has it
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
    ) -> None:
        told = locals()
        self._note("plan", told)
        self._check_pages(indptr, indices, last_page_len, page_size)
        assert pos_encoding_mode == "NONE"
        assert self._has_cores or num_qo_heads // num_kv_heads in MOST_CORES_GROUP
        # One query a sequence, and it is the last key.
        self._plan = told | {"qo_indptr": torch.arange(len(indptr)), "causal": True}

    def run(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._note("run", locals())
        return self._run(q, paged_kv_cache, torch.empty_like(q) if out is None else out)


class _Prefill(_Wrapper):
    kind = "prefill"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
    ) -> None:
        self._note("init", locals())
        self._init(float_workspace_buffer, kv_layout, use_cuda_graph)

    def plan(  # noqa: PLR0913 - as the library has it
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
    ) -> None:
        told = locals()
        self._note("plan", told)
        kv = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._check_pages(*kv, page_size)
        assert qo_indptr.dtype is torch.int32 and qo_indptr.is_cpu
        assert len(qo_indptr) == len(paged_kv_indptr) and pos_encoding_mode == "NONE"
        names = ("indptr", "indices", "last_page_len")
        self._plan = told | dict(zip(names, kv, strict=True)) | {"head_dim": head_dim_qk}

    def run(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._note("run", locals())
        return self._run(q, paged_kv_cache, torch.empty_like(q) if out is None else out)
