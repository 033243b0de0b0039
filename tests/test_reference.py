"""reference.py: quantize and dequantize, against the design's rules in NumPy and in Fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import E2M1, HEAD_DIMS, one_thread, quantize, randn, row_nbytes  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sglang_quantkv import formats
from sglang_quantkv import reference as ref

FORMATS = {"int8": formats.INT8, "mxfp4": formats.MXFP4, "fp4_g32": formats.FP4_G32}
FLOAT_MAX = torch.finfo(torch.float32).max
NAN, INF = math.nan, math.inf
ODD_NAN = torch.tensor([-0x3FEDCB], dtype=torch.int32).view(torch.float32).item()  # negative, with a payload


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """What packed nibbles stand for, low nibble first."""
    nibbles = torch.stack((codes % 16, codes // 16), -1).flatten(-2).numpy()
    return torch.from_numpy(np.where(nibbles < 8, E2M1[nibbles % 8], -E2M1[nibbles % 8]))


# ---- codes and scales, every one of them ------------------------------------------------------------


def test_every_e8m0_byte():
    values = ref.e8m0_value(torch.arange(256, dtype=torch.uint8))
    assert values.dtype == torch.float32
    assert [Fraction(v) for v in values[:255].tolist()] == [Fraction(2) ** (byte - 127) for byte in range(255)]
    assert values[255].isnan()


@pytest.mark.parametrize("name, one", [("mxfp4", torch.tensor([127], dtype=torch.uint8)), ("fp4_g32", torch.ones(1))])
def test_every_e2m1_code(name, one):
    """All 256 bytes: the low nibble is the earlier element, bit 3 of a nibble the sign."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    nibble = magnitudes + [-m for m in magnitudes]
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)  # 16 rows of 32 elements
    expected = torch.tensor([v for byte in range(256) for v in (nibble[byte & 15], nibble[byte >> 4])]).view(16, 32)
    assert torch.equal(bits(ref.dequantize(codes, one.expand(16, 1), FORMATS[name])), bits(expected))


def test_int8_ties_go_to_even_and_both_signs_mirror():
    x = torch.zeros(1, 32)
    ties = torch.tensor([0.5, 1.5, 2.5, 63.5, 64.5, 125.5, 126.5])
    x[0, :8] = torch.cat((torch.tensor([127.0]), ties))  # amax 127: the scale is 1
    x[0, 8:16] = -x[0, :8]
    codes, scales = ref.quantize(x, formats.INT8)
    assert codes.dtype == torch.int8 and scales.tolist() == [[1.0]]
    assert codes[0, :8].tolist() == [127, 0, 2, 2, 64, 64, 126, 126]
    assert codes[0, 8:16].tolist() == [-127, 0, -2, -2, -64, -64, -126, -126]


def test_int8_never_uses_minus_128():
    """Where amax / 127 is a few units of the least subnormal, its rounding makes x / scale as large as 190."""
    units = torch.arange(1, 2000).float()
    x = torch.stack((-units, units, -units / 2), dim=-1).repeat(1, 11)[:, :32] * 2.0**-149
    codes, scales = ref.quantize(torch.cat((x, randn(4096, 32), randn(64, 32) * 2.0**100)), formats.INT8)
    assert codes.min() == -127 and codes.max() == 127
    assert torch.equal(codes[:63], torch.zeros_like(codes[:63])) and not scales[:63].any()  # amax / 127 rounds to 0


@pytest.mark.parametrize("power", (-66, -1, 0, 40))
@pytest.mark.parametrize("name, largest", [("mxfp4", 6.0), ("mxfp4", 7.5), ("fp4_g32", 6.0)])
def test_e2m1_ties_go_to_even(name, largest, power):
    """Midpoints, and the nearest float32 on either side of each; what lies in (6, 7.5] becomes 6."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below, above = ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(INF))
    x = torch.cat((torch.tensor([largest]), ties, below, above, torch.tensor([6.0, 4.0, 0.1]))).view(1, -1)
    x = torch.cat((x, -x, torch.zeros(1, 14)), dim=-1) * 2.0**power
    codes, scales = ref.quantize(x, FORMATS[name])
    half = [6, *(0, 1, 1, 2, 2, 4, 4), *(0, 0.5, 1, 1.5, 2, 3, 4), *(0.5, 1, 1.5, 2, 3, 4, 6), *(6, 4, 0)]
    assert e2m1_values(codes)[0, :50].tolist() == half + [-value for value in half]
    first = scales[0, 0].item()
    assert first == (127 + power if name == "mxfp4" else 2.0**power)


# ---- scales -----------------------------------------------------------------------------------------


def test_e8m0_is_the_smallest_power_of_two_that_fits():
    """amax <= 7.5 s in exact fractions, for mantissas on both sides of 1.875 and every exponent float32 has."""
    just_above = float(np.nextafter(np.float32(1.875), np.float32(2)))
    mantissas = [1, 1.2, 1.25, 1.35, 1.375, 1.5, 1.75, 1.875, just_above, 1.999]
    amax = torch.tensor([m * 2.0**e for e in range(-140, 128) for m in mantissas], dtype=torch.float32)
    assert amax.isfinite().all() and amax.all()
    x = amax[:, None] * torch.linspace(0, 0.9, 32)
    row = torch.arange(len(x))
    x[row, row % 32] = amax * (1 - row % 2 * 2)
    powers = [Fraction(2) ** p for p in range(-66, 41)]

    def smallest(a):
        return next((p for p, s in enumerate(powers) if Fraction(a) <= Fraction(15, 2) * s), len(powers) - 1)

    expected = [127 - 66 + smallest(a) for a in amax.tolist()]
    codes, scales = ref.quantize(x, formats.MXFP4)
    assert scales.dtype == torch.uint8 and scales[:, 0].tolist() == expected
    assert (min(expected), max(expected)) == (61, 167)
    # The largest element saturates beyond 7.5 * 2**40, and vanishes below a quarter of 2**-66.
    largest = e2m1_values(codes)[row, row % 32].abs()
    assert (largest[amax > 6 * 2.0**40] == 6).all() and not largest[amax <= 2.0**-68].any()


@pytest.mark.parametrize("name", FORMATS)
def test_zero_rows_of_either_sign(name):
    x = torch.zeros(2, 96)
    x[1] = -0.0
    codes, scales = ref.quantize(x, FORMATS[name])
    assert not codes.any()
    expected = torch.full_like(scales, 127) if name == "mxfp4" else torch.zeros_like(scales)
    assert torch.equal(scales.view(torch.uint8), expected.view(torch.uint8))  # so that -0.0 gives +0.0
    assert torch.equal(bits(ref.dequantize(codes, scales, FORMATS[name])), bits(torch.zeros(2, 96)))


@pytest.mark.parametrize("constant", (1.0, -3.0, 1e-18, 7.25, -1e12))
def test_constant_rows(constant):
    """Their only value is on the grid of a float32 scale, up to two roundings; mxfp4 has it within half a step."""
    x = torch.full((1, 64), constant)
    assert (ref.quantize(x, formats.INT8)[0] == math.copysign(127, constant)).all()
    for name, rtol in (("int8", 2**-22), ("fp4_g32", 2**-22), ("mxfp4", 1 / 5)):
        torch.testing.assert_close(ref.fake_quantize(x, FORMATS[name]), x, rtol=rtol, atol=0)


@pytest.mark.parametrize("bad", (NAN, ODD_NAN, INF, -INF), ids=("nan", "odd-nan", "inf", "-inf"))
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_that_is_not_finite_spoils_only_its_own_group(name, bad):
    group = 96 if name == "int8" else 32
    clean = randn(3, 2, 96)
    x = clean.clone()
    x[1, 1, 40] = bad
    x[1, 1, 41] = -1e30  # what else stands there does not matter
    fmt, hit = FORMATS[name], slice(40 // group * group, 40 // group * group + group)
    codes, scales = ref.quantize(x, fmt)
    spoilt = torch.zeros(3, 2, 96, dtype=torch.bool)
    spoilt[1, 1, hit] = True
    groups, halves = spoilt[..., ::group], spoilt if name == "int8" else spoilt[..., ::2]
    clean_codes, clean_scales = ref.quantize(clean, fmt)
    assert torch.equal(codes, clean_codes.masked_fill(halves, 0))
    nan_scale = 255 if name == "mxfp4" else 0x7FC00000  # one bit pattern, whatever came in
    as_int = scales.to(torch.int32) if name == "mxfp4" else bits(scales)
    clean_int = clean_scales.to(torch.int32) if name == "mxfp4" else bits(clean_scales)
    assert torch.equal(as_int, clean_int.masked_fill(groups, nan_scale))
    values = ref.dequantize(codes, scales, fmt)
    assert torch.equal(values.isnan(), spoilt) and values[~spoilt].isfinite().all()


# ---- whole rows against the second derivation -------------------------------------------------------


def rows_of_every_size(dim: int) -> torch.Tensor:
    """Ordinary rows, rows with one outlier, rows of mixed exponents, subnormal, huge, rare zeros, NaN and Inf."""
    x = randn(9, 8, dim)
    x[1, :, 7] *= 300
    x[2] *= torch.logspace(-30, 30, dim)
    x[3] *= 2.0**-140
    x[4] *= 2.0 ** torch.arange(-149, -117, 4).view(8, 1)
    x[5] = x[5].clamp(-1, 1) * FLOAT_MAX
    x[6] = x[6].relu() * -0.0
    x[7, ::2, 3] = torch.tensor([INF, -INF, NAN, ODD_NAN])
    x[8] = x[8].bfloat16() * 8  # few distinct values, hence ties
    return x


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_byte_for_byte(name, dim):
    x = rows_of_every_size(dim)
    before = x.clone()
    fmt, expected = FORMATS[name], quantize(name, x)
    codes, scales = ref.quantize(x, fmt)
    assert codes.dtype == (torch.int8 if name == "int8" else torch.uint8)
    assert scales.dtype == (torch.uint8 if name == "mxfp4" else torch.float32)
    assert scales.shape == (9, 8, row_nbytes(name, dim)[1])
    assert torch.equal(codes.view(torch.uint8), expected.codes)
    rows = ref.encode(x, fmt)
    assert torch.equal(rows, expected.bytes)
    for values in (ref.dequantize(codes, scales, fmt), ref.decode_rows(rows, fmt, dim), ref.fake_quantize(x, fmt)):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(bits(x), bits(before))


VIEWS = {
    "bfloat16": lambda x: x.bfloat16(),
    "float16, transposed": lambda x: x[:96, :5].T.half(),
    "every other row": lambda x: x[::2],
    "columns of a wider row": lambda x: x[:, 32:96],
    "every other element": lambda x: x[:, ::2],
    "transposed": lambda x: x[:96, :5].T,
    "one row of a transposed": lambda x: x[:96, :1].T,
    "heads first": lambda x: x.view(12, 8, 192).transpose(0, 1),
    "expanded": lambda x: x[:1].expand(7, -1),
    "one head of a fused qkv": lambda x: x.view(12, 8, 192)[:, 3],
    "no rows": lambda x: x[:0],
    "no rows, transposed": lambda x: x[:96, :0].T,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", FORMATS)
def test_strides_and_dtypes_do_not_matter(name, view):
    """Half precision is computed on in float32, and no row at all is a batch too."""
    x = VIEWS[view](randn(96, 192))
    assert torch.equal(ref.encode(x, FORMATS[name]), quantize(name, x.float().contiguous()).bytes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_gives_the_same_bytes(name):
    """Byte-identical on every architecture: on a GPU, torch divides by a Python number by its reciprocal."""
    x = torch.cat((rows_of_every_size(128).flatten(0, 1), randn(4096, 128)))
    assert torch.equal(ref.encode(x.cuda(), FORMATS[name]).cpu(), quantize(name, x).bytes)
    assert torch.equal(ref.e8m0_value(torch.arange(255).cuda()).cpu(), ref.e8m0_value(torch.arange(255)))


# ---- what each format promises about any row --------------------------------------------------------

# Ordinary floats, and integers times a power of two, which meet ties and the edges of binades more often.
ANY_ROW = st.one_of(
    arrays(np.float32, 64, elements=st.floats(-(2.0**126), 2.0**126, width=32)),
    st.builds(
        lambda m, e: np.ldexp(m.astype(np.float32), e),
        arrays(np.int32, 64, elements=st.integers(-(2**24), 2**24)),
        st.integers(-149, 102),
    ),
).map(torch.from_numpy)


def in_units(x: torch.Tensor, fmt) -> tuple[torch.Tensor, ...]:
    """float64, exact: the elements' magnitudes, their errors after a round trip, and each one's scale."""
    codes, scales = ref.quantize(x, fmt)
    error = (ref.dequantize(codes, scales, fmt).double() - x.double()).abs()
    unit = ref.e8m0_value(scales) if fmt is formats.MXFP4 else scales
    return x.double().abs(), error, unit.double().repeat_interleave(len(x) // len(unit))


def half_step(y: torch.Tensor) -> torch.Tensor:
    """Half the distance between the two e2m1 magnitudes around y, y <= 6."""
    return torch.where(y <= 2, 0.25, torch.where(y <= 4, 0.5, 1.0))


# A quotient and a product round once each, by 2**-24 of their values; a scale that is subnormal is off by up to
# 2**-150, and the code multiplies that by up to 127.
ROUNDINGS, UNDERFLOW = 2.0**-22, 128 * 2.0**-150


@given(ANY_ROW)
@settings(deadline=None)
def test_int8_error_is_half_a_step(x):
    size, error, unit = in_units(x, formats.INT8)
    assert (error <= unit / 2 + size * ROUNDINGS + UNDERFLOW).all()
    assert (unit * 127 - size.max()).abs().max() <= size.max() * ROUNDINGS + UNDERFLOW


@given(ANY_ROW)
@settings(deadline=None)
def test_fp4_g32_error_is_half_a_step_and_nothing_clips(x):
    size, error, unit = in_units(x, formats.FP4_G32)
    steps = half_step(size / unit.clamp(min=2.0**-149)) * unit
    assert (error <= steps + size * ROUNDINGS + UNDERFLOW).all()


@given(ANY_ROW)
@settings(deadline=None)
def test_mxfp4_error_is_half_a_step_or_what_lies_beyond_6(x):
    """No slack: scales are powers of two, so nothing rounds but the code."""
    size, error, unit = in_units(x, formats.MXFP4)
    y = size / unit
    assert (error <= torch.where(y <= 6, half_step(y), y - 6) * unit).all()
    amax, unit = y.view(2, 32).amax(1), unit[::32]
    assert ((amax <= 7.5) | (unit == 2.0**40)).all()
    assert ((amax > 3.75) | (unit == 2.0**-66) | (amax == 0)).all()


@given(ANY_ROW)
@settings(deadline=None)
def test_quantizing_again_changes_nothing(x):
    """What was read and is stored again reads the same.

    mxfp4: a block's largest code is 4 or 6, and both need the scale they have; a block below the least scale reads
    back as zeros, whose byte is another, hence values. Float32 scales: (127 s) / 127 and (6 s) / 6 round back to any
    s that is itself such a quotient, unless it is subnormal.
    """
    once = ref.fake_quantize(x, formats.MXFP4)
    assert torch.equal(ref.fake_quantize(once, formats.MXFP4), once)
    for fmt in (formats.INT8, formats.FP4_G32):
        codes, scales = ref.quantize(x, fmt)
        again = ref.quantize(ref.dequantize(codes, scales, fmt), fmt)
        normal = scales >= 2.0**-125
        assert torch.equal(again[1][normal], scales[normal])
        assert torch.equal(again[0].view(len(scales), -1)[normal], codes.view(len(scales), -1)[normal])


# ---- formats to compare with ------------------------------------------------------------------------


def nearest(x: np.ndarray, grid: list[float]) -> np.ndarray:
    """Nearest of an ascending grid of magnitudes; ties to the even index."""
    distance = abs(abs(x)[..., None].astype(np.float64) - grid)
    index = np.array([min(range(len(grid)), key=lambda i: (d[i], i % 2)) for d in distance.reshape(-1, len(grid))])
    return np.copysign(np.array(grid)[index].reshape(x.shape), x)


@pytest.mark.parametrize("fmt", formats.COMPARISON_FORMATS, ids=lambda fmt: fmt.name)
def test_comparison_formats(fmt):
    grids = {
        "fp8_e4m3": [m / 8 * 2.0**-6 for m in range(8)]
        + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)],
        "int4_g32": [float(i) for i in range(8)],
        "e3m0_g32": [0, 0.25, 0.5, 1, 2, 4, 8, 16],
    }
    x = randn(64, 64) * torch.logspace(-3, 3, 64)[:, None]
    x[0, :9] = torch.tensor([0, -0.0, 1.0625, 1.1875, 447, 449, -1e6, 2.0**-10, 3 * 2.0**-10])
    grid, scale = grids[fmt.name], np.float32(1)
    if fmt.name == "fp8_e4m3":
        grid = grid[:-1]  # the last pattern is NaN
    else:
        scale = abs(x.view(64, 2, 32)).amax(-1, keepdim=True).numpy() / np.float32(grid[-1])
    y = x.view(64, 2, 32).numpy() / scale
    expected = torch.from_numpy(nearest(y, grid).astype(np.float32) * scale).view(64, 64)
    assert torch.equal(ref.fake_quantize(x, fmt), expected)
    x[3, 5] = NAN
    assert ref.fake_quantize(x, fmt)[3].isnan().any()
