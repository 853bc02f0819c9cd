"""Weight-only products, and rows made 8-bit floats, against plain torch in float64."""

import pytest
import torch
from support.made_quantized import KINDS, Kind, make

from kernels.quant_tuning import QuantTile, most_fused_rows
from kernels.quantized import can_pack, pack, unpack
from kernels.reference import quant as reference
from kernels.triton import quant
from kernels.triton.launch import Launch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Groups that pieces of 64 inputs do not divide, or of one piece; inputs that fill no step.
ODD_KINDS = (
    Kind(4, 16, has_zeros=True),
    Kind(4, 96),
    Kind(4, 192, has_zeros=True),
    Kind(8, 32, has_zeros=True),
    Kind(8, 192, is_float=True),
)


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every launch of the test, in order."""
    found: list[Launch] = []
    run = Launch.run

    def keep(launch: Launch) -> None:
        found.append(launch)
        run(launch)

    monkeypatch.setattr(Launch, "run", keep)
    return found


def wanted_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "dtype", "has_bias"),
    [(1, torch.float32, True), (19, torch.bfloat16, False), (5, torch.float16, True)],
)
def test_products(kind: Kind, num_rows: int, dtype: torch.dtype, has_bias: bool) -> None:
    """Outputs and inputs that fill no tile; what lies between rows of x is not read."""
    matrix = make(kind, num_outputs=70, num_inputs=448)
    packed = pack(matrix)
    x = torch.full((num_rows, 500), torch.nan, dtype=dtype)
    x[:, :448] = torch.randn(num_rows, 448)
    x = x[:, :448]
    bias = torch.randn(70).to(dtype) if has_bias else None
    got = quant.weight_only_product(x, packed, bias)
    weight = reference.dequantize(matrix, torch.float32)
    wanted = wanted_of(x, weight, bias)
    assert got.dtype is dtype
    tolerance = TOLERANCE[dtype] * wanted.abs().max()
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=float(tolerance))
    plain = reference.weight_only_product(x, packed, bias)
    torch.testing.assert_close(plain.double(), wanted, rtol=0, atol=float(tolerance))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packing_keeps_every_number(kind: Kind) -> None:
    matrix = make(kind, num_outputs=24, num_inputs=448)
    assert can_pack(matrix)
    weight = reference.dequantize(matrix, torch.float32)
    back = unpack(pack(matrix))
    assert torch.equal(reference.dequantize(back, torch.float32), weight)
    ids = torch.tensor([3, 23, 3])
    some = unpack(pack(matrix).of_outputs(ids))
    assert torch.equal(reference.dequantize(some, torch.float32), weight[ids])


@pytest.mark.parametrize("kind", [*KINDS, *ODD_KINDS], ids=str)
@pytest.mark.parametrize("num_rows", [16, 64, 65, 130, 300])
def test_rows_of_a_batch_read_packed_weights(
    kind: Kind, num_rows: int, launched: list[Launch]
) -> None:
    """The sums are those of float64, rounded once; nothing as large as the weight is written."""
    matrix = make(kind, num_outputs=136, num_inputs=576)
    packed, dtype = pack(matrix), torch.bfloat16 if num_rows % 2 else torch.float16
    x = torch.randn(num_rows, 576).to(dtype)
    got = quant.weight_only_product(x, packed)
    wanted = wanted_of(x, reference.dequantize(matrix, torch.float32), None)
    tolerance = torch.finfo(dtype).eps * wanted.abs().max()
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=float(tolerance))
    kernels = [launch.kernel.fn.__name__ for launch in launched]
    assert kernels in (
        ["packed_product_kernel"],
        ["packed_product_kernel", "sum_kernel"],
    )
    assert launched[0].args["values"] is packed.values


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_very_many_rows_take_the_dequantised_weight(kind: Kind) -> None:
    matrix = make(kind, num_outputs=40, num_inputs=256)
    x = torch.randn(most_fused_rows(4) + 1, 256)
    got = quant.weight_only_product(x, pack(matrix))
    wanted = wanted_of(x, reference.dequantize(matrix, torch.float32), None)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_parts_of_the_inputs_add_up(splits: int) -> None:
    """Also where the last parts are left with nothing."""
    packed = pack(make(KINDS[0], num_outputs=70, num_inputs=448))
    x, bias = torch.randn(3, 448), torch.randn(70)
    steps = -(-packed.values.shape[1] // packed.piece)
    parts = torch.full((splits, 3, 70), torch.nan)
    quant.product_launch((x, packed, None, parts), QuantTile(16, 32, 4, 2), steps, splits).run()
    out = torch.full((3, 70), torch.nan)
    quant.sum_launch(parts, bias, out).run()
    wanted = reference.weight_only_product(x, packed, bias)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_its_company() -> None:
    packed = pack(make(KINDS[1], num_outputs=40, num_inputs=256))
    x = torch.randn(9, 256)
    together = quant.weight_only_product(x, packed)
    assert torch.equal(quant.weight_only_product(x[4:5], packed)[0], together[4])
    assert quant.weight_only_product(x[:0], packed).shape == (0, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 3000])
def test_rows_become_8_bit_floats(dtype: torch.dtype, width: int) -> None:
    x = (torch.randn(5, width) * 30).to(dtype)
    x[2] = 0
    got, scales = quant.quantize_rows(x)
    wanted, wanted_scales = reference.quantize_rows(x)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(got.float(), wanted.float())
    given = torch.tensor([0.05])
    got, scales = quant.quantize_rows(x, given)
    wanted, wanted_scales = reference.quantize_rows(x, given)
    assert torch.equal(got.float(), wanted.float()) and torch.equal(scales, wanted_scales)
    assert got.float().abs().max() == 448


@pytest.mark.parametrize("given", [None, 0.05])
def test_a_row_that_is_no_number_stays_none(given: float | None) -> None:
    """And no other row is hurt."""
    x = torch.randn(3, 40)
    scale = None if given is None else torch.tensor([given])
    sound, _ = quant.quantize_rows(x, scale)
    x[1, 7] = float("nan")
    got, _ = quant.quantize_rows(x, scale)
    assert got[1, 7].float().isnan()
    assert torch.equal(got[::2].float(), sound[::2].float())
