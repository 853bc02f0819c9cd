"""What is launched again on other tensors: their pointers, at the places of the first ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from kernels import triton as bodies
from kernels.triton import invariant, norm
from kernels.triton.launch import Launch
from kernels.triton.repeated import again
from tools.device_gate import DEVICES, compiling_for

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels have no pointers"
)


class Launches:
    """Launches that were built, and arguments of those that were run again."""

    def __init__(self) -> None:
        self.built: list[Launch] = []
        self.values: list[tuple[Any, ...]] = []

    def run(self, launch: Launch) -> Any:
        self.built.append(launch)

        def launcher(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
            assert (x, y, z)[: len(launch.grid)] == launch.grid
            self.values.append(rest[5:])

        return SimpleNamespace(function=1, packed_metadata=(), run=launcher)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    found = Launches()
    monkeypatch.setattr(Launch, "run", lambda launch: found.run(launch))
    norm.FORMS.clear()
    with compiling_for(DEVICES["sm_90"]):
        yield found
    norm.FORMS.clear()  # of launchers that are none


def a_norm(rows: int = 3, offset: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs of a norm with a sum, and its outputs."""
    wide = [torch.zeros(rows * 64 + 8).half()[offset:][: rows * 64] for _ in range(2)]
    inputs = [one.view(rows, 64) for one in wide] + [torch.zeros(64).half()]
    return inputs, list(bodies.add_rms_norm(*inputs, 1e-6))


def pointers(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def test_tensors_of_the_same_form_take_the_places_of_the_first(launches: Launches) -> None:
    a_norm()
    inputs, outputs = a_norm()
    (values,) = launches.values
    assert values[:5] == pointers([*inputs, *outputs])
    assert len(launches.built) == 1
    assert values[5:] == tuple(launches.built[0].args.values())[5:]


def test_another_form_or_alignment_is_bound_anew(launches: Launches) -> None:
    a_norm()
    a_norm(rows=4)
    a_norm(offset=1)
    assert len(launches.built) == 3
    assert not launches.values
    assert launches.built[2].args["x"].data_ptr() % 16


def test_a_profiler_hears_of_every_launch(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_norm()
    hook = SimpleNamespace(calls=[print])
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    inputs, _ = a_norm()
    assert launches.built[1].args["x"].data_ptr() == inputs[0].data_ptr()


def test_parts_move_with_their_tensor_and_what_is_of_the_step_stays(launches: Launches) -> None:
    kernel = norm.norm_kernel
    names = [one.name for one in kernel.params]

    def run(x: torch.Tensor, own: torch.Tensor, known: dict[Any, Any]) -> None:
        def build() -> list[Launch]:
            args = dict.fromkeys(names) | {"x": x[2:], "weight": own}
            alone = dict.fromkeys(names) | {"weight": own}
            return [Launch(kernel, (1,), alone, 1, 1), Launch(kernel, (1,), args, 1, 1)]

        again(known, ("key",), [x], build)

    known: dict[Any, Any] = {}
    first, own = torch.zeros(4, 8), torch.zeros(8)
    run(first, own, known)
    other = torch.zeros(4, 8)
    run(other, torch.zeros(8), known)
    (values,) = launches.values  # the launch that touches none of x was run once
    assert values[0] == other[2:].data_ptr()
    assert values[names.index("weight")] == own.data_ptr()


def test_tensors_that_share_memory_are_bound_each_time(launches: Launches) -> None:
    x, weight = torch.zeros(2, 64).half(), torch.zeros(64).half()
    for _ in range(2):
        bodies.add_rms_norm(x, x, weight, 1e-6)
    assert len(launches.built) == 2


def test_weights_and_biases_of_another_type_are_bound_anew(launches: Launches) -> None:
    """One program reads what the first of its tensors were."""
    invariant.FORMS.clear()
    x, weight, bias = torch.zeros(2, 64).half(), torch.zeros(8, 64).half(), torch.zeros(8)
    for own in (None, bias, bias.half()):
        bodies.invariant_linear(x, weight, own)
    assert len(launches.built) == 3 and not launches.values
    with pytest.raises(ValueError, match="of one dtype"):
        bodies.invariant_linear(x, weight.bfloat16(), None)
    invariant.FORMS.clear()
