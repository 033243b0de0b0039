"""Names, byte counts, and the place of every byte of a page: formats.py, and the records that reference.py writes."""

import copy
import math
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import (
    HEAD_DIMS,
    K_TOKENS,
    LAYOUTS,
    PAGE_SIZES,
    RECIPES,
    head_block,
    one_thread,  # noqa: F401
    padding_nbytes,
    quantize,
    randn,
    row_nbytes,
)

from sglang_quantkv import formats
from sglang_quantkv import reference as ref
from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import HeadBlock, Operand, find_recipe, is_recipe

SHAPES = [(name, op, dim, page) for name, op in LAYOUTS for dim in HEAD_DIMS for page in PAGE_SIZES]
FORMATS = {"int8": formats.INT8, "mxfp4": formats.MXFP4, "fp4_g32": formats.FP4_G32}


def make_block(name, operand, dim, page):
    return HeadBlock(FORMATS[name], Operand(operand), dim, page)


# ---- names and errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("prefix", ("", "quantkv_"))
def test_recipe_names(name, prefix):
    recipe = find_recipe(prefix + name)
    assert is_recipe(prefix + name)
    assert (recipe.name, recipe.k.name, recipe.v.name) == (name, *RECIPES[name])
    assert recipe.block(Operand.K, 64, 32).format is recipe.k
    assert recipe.block(Operand.V, 64, 32).format is recipe.v


def test_there_are_no_other_recipes():
    assert set(formats.RECIPES) == set(RECIPES)
    assert set(formats.DTYPE_NAMES) == {prefix + name for prefix in ("", "quantkv_") for name in RECIPES}


@pytest.mark.parametrize(
    "name",
    ("auto", "fp8_e4m3", "int4_g32", "e3m0_g32", "INT8", "Int8", " int8", "int8 ", "", "quantkv_", "quantkv_INT8")
    + ("QUANTKV_int8", "quantkv_fp8_e4m3", "quantkv_quantkv_int8", "int8quantkv_", None),
)
def test_unknown_names_are_refused(name):
    """Names are exact: SGLang's own flag is case sensitive too, and comparison formats have no records."""
    assert not is_recipe(name)
    with pytest.raises(UnsupportedConfig) as e:
        find_recipe(name)
    assert f"--kv-cache-dtype {name!r}" in e.value.asked
    assert all(known in e.value.supported for known in RECIPES)


@pytest.mark.parametrize("page", (-64, 0, 1, 16, 31, 48, 63, 96, 256))
def test_other_page_sizes_are_refused(page):
    with pytest.raises(UnsupportedConfig) as e:
        find_recipe("int8").nbytes_per_token(8, 128, page_size=page)
    assert f"--page-size {page} " in e.value.asked
    assert "32, 64, 128" in e.value.supported
    assert "--page-size 64" in e.value.advice


@pytest.mark.parametrize("dim", (-32, 16, 48, 63, 80, 100, 120, 288, 512))
@pytest.mark.parametrize("dims", ("k", "v"))
def test_other_head_dims_are_refused(dim, dims):
    with pytest.raises(UnsupportedConfig) as e:
        find_recipe("int8").nbytes_per_token(8, *((dim,) if dims == "k" else (128, dim)))
    assert f"head_dim {dim} " in e.value.asked
    assert all(str(known) in e.value.supported for known in HEAD_DIMS)
    assert "--kv-cache-dtype" in e.value.advice


def test_error_says_asked_supported_and_what_to_do():
    error = UnsupportedConfig("--flag 1 is odd", "2, 4", "Use --flag 2")
    assert isinstance(error, ValueError)
    assert str(error) == "sglang_quantkv: --flag 1 is odd. Supported: 2, 4. Use --flag 2."


def test_formats_do_not_import_torch():
    """``--help`` and the planner answer without loading it."""
    code = "import sys, sglang_quantkv.formats; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", range(8))
def test_magnitudes(code):
    """OCP MX v1.0, table 5: e2m1 has bias 1 and a subnormal; e3m0, by analogy, bias 3 and a zero."""
    exponent, mantissa = code >> 1, code & 1
    e2m1 = mantissa / 2 if exponent == 0 else math.ldexp(1 + mantissa / 2, exponent - 1)
    assert formats.E2M1_MAGNITUDES[code] == e2m1
    assert formats.E3M0_MAGNITUDES[code] == (math.ldexp(1, code - 3) if code else 0)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_row_nbytes(name, dim):
    codes, scales, width = row_nbytes(name, dim)
    fmt = FORMATS[name]
    assert (fmt.code_nbytes(dim), fmt.num_scales(dim), fmt.scale_nbytes(dim)) == (codes, scales, scales * width)
    assert fmt.row_nbytes(dim) == codes + scales * width


@pytest.mark.parametrize(
    "name, k_bytes, v_bytes, against_bf16",
    [("int8", 132, 132, 1.94), ("mxfp4", 68, 68, 3.76), ("fp4_g32", 80, 80, 3.2), ("k8v4", 132, 68, 2.56)],
)
@pytest.mark.parametrize("page", PAGE_SIZES)
def test_bytes_per_token_of_the_design_table(name, k_bytes, v_bytes, against_bf16, page):
    per_token = find_recipe(name).nbytes_per_token(1, 128, page_size=page)
    assert per_token == k_bytes + v_bytes
    assert round(2 * 2 * 128 / per_token, 2) == against_bf16


@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_heads", (1, 3, 8))
def test_int8_bytes_per_token_have_no_overhead(kv_heads, dim, page):
    assert find_recipe("int8").nbytes_per_token(kv_heads, dim, page_size=page) == 2 * kv_heads * (dim + 4)


def test_bytes_per_token_of_qwen3_5_27b():
    """64 layers, every fourth with a KV cache; 4 KV heads of 256. In bf16 a token takes 64 KiB."""
    layers, kv_heads, dim = 64 // 4, 4, 256
    assert layers * kv_heads * 2 * dim * 2 == 65536
    assert layers * find_recipe("int8").nbytes_per_token(kv_heads, dim) == 33280


@pytest.mark.parametrize(
    "name, dims, page, expected",
    [
        ("int8", (192, 128), 64, 3 * (196 + 132)),
        ("mxfp4", (192, 128), 64, 3 * (102 + 68)),
        ("k8v4", (192, 128), 64, 3 * (196 + 68)),
        ("mxfp4", (96,), 64, 3 * 2 * 52),  # 64 * 51 bytes are 25.5 times 128
        ("mxfp4", (64, 128), 32, 3 * (36 + 68)),  # 32 * 34 bytes are 8.5 times 128
    ],
)
def test_bytes_per_token_with_two_head_dims_and_padding(name, dims, page, expected):
    assert find_recipe(name).nbytes_per_token(3, *dims, page_size=page) == expected


def test_bytes_per_token_defaults_to_pages_of_64():
    assert find_recipe("mxfp4").nbytes_per_token(1, 96) == find_recipe("mxfp4").nbytes_per_token(1, 96, page_size=64)
    assert formats.DEFAULT_PAGE_SIZE == 64


# ---- the place of every byte ------------------------------------------------------------------------


def test_int8_k_rows():
    """Spelled out, by the formula of the design, and the same in every group of 16 tokens."""
    rows = [formats.int8_k_row(token) for token in range(128)]
    assert [rows.index(row) for row in range(16)] == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15] == K_TOKENS
    assert rows[:16] == [8 * (u // 2 % 2) + 2 * (u // 4) + u % 2 for u in range(16)]
    assert rows == [16 * (token // 16) + rows[token % 16] for token in range(128)]


@pytest.mark.parametrize("name, operand, dim, page", SHAPES)
def test_every_byte_lies_where_the_design_puts_it(name, operand, dim, page):
    """Number the bytes of all rows, permute the numbers into a block, and find each number again."""
    codes, scales, width = row_nbytes(name, dim)
    per_row = codes + scales * width
    numbers = torch.arange(page * per_row).view(page, per_row)
    padding = torch.full((padding_nbytes(name, dim, page),), -1)
    expected = head_block(
        name, operand, numbers[:, :codes], numbers[:, codes:].reshape(page, scales, width), padding
    ).tolist()

    block = make_block(name, operand, dim, page)
    offsets = [block.row_offsets(token) for token in range(page)]
    assert len(expected) == block.nbytes
    assert [[expected[at] for at in row] for row in offsets] == numbers.tolist()
    assert block.payload_nbytes == page * codes


@pytest.mark.parametrize("name, operand, dim, page", SHAPES)
def test_block_stride(name, operand, dim, page):
    """The next multiple of 128, and a whole number of bytes per slot, which the pool's size is counted in."""
    block = make_block(name, operand, dim, page)
    codes, scales, width = row_nbytes(name, dim)
    used = page * (codes + scales * width)
    assert block.nbytes % 128 == 0 and used <= block.nbytes < used + 128
    assert block.nbytes_per_token * page == block.nbytes


def test_which_blocks_are_padded():
    """The design's list of measured shapes, and the rule behind it: 17 D / 32 bytes a row, and 17 is odd."""
    padded = {s for s in SHAPES if make_block(*s).nbytes != s[3] * FORMATS[s[0]].row_nbytes(s[2])}
    listed = {(dim, 64) for dim in (96, 160, 224)} | {(dim, 32) for dim in (64, 96, 192)}
    assert padded >= {("mxfp4", op, *shape) for op in "kv" for shape in listed}
    assert padded == {s for s in SHAPES if s[0] == "mxfp4" and s[2] * s[3] % (32 * 128)}


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda block: pickle.loads(pickle.dumps(block)),
    "plain str": lambda block: replace(block, operand=block.operand.value),
}


@pytest.mark.parametrize("name, operand", LAYOUTS)
@pytest.mark.parametrize("how", COPIES)
def test_an_equal_block_has_the_same_layout(how, name, operand):
    """SGLang spawns its workers, so a block may be a copy; and equal blocks share reference.py's cached offsets."""
    block = make_block(name, operand, 64, 32)
    copied = COPIES[how](block)
    assert copied == block
    assert [copied.row_offsets(t) for t in range(32)] == [block.row_offsets(t) for t in range(32)]


# ---- records ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name, operand", LAYOUTS)
def test_records_byte_for_byte(name, operand, dim, page):
    """Rows go where permutes put them, padding and other slots keep their bytes, and what was written comes back."""
    pages, heads, block = 3, 2, make_block(name, operand, dim, page)
    generator = torch.Generator().manual_seed(1)
    # A quarter of two pages' slots, in any order, and a whole page.
    some = torch.randperm(2 * page, generator=generator)[: page // 2]
    slots = torch.cat((some, torch.arange(2 * page, 3 * page)))
    x = randn(len(slots), heads, dim)
    x[5, 1, 3] = math.nan
    rows, encoded = quantize(name, x), ref.encode(x, block.format)
    for least in (0xFF, 0):  # poison: all 0xFF, which reads as NaN; and random bytes, which show any move
        codes, scales, padding = (
            torch.randint(least, 256, (pages, heads, *shape), dtype=torch.uint8, generator=generator)
            for shape in (
                (page, *rows.codes.shape[2:]),
                (page, *rows.scales.shape[2:]),
                (padding_nbytes(name, dim, page),),
            )
        )
        records = head_block(name, operand, codes, scales, padding)
        ref.write_rows(records, block, slots, encoded)
        codes[slots // page, :, slots % page] = rows.codes
        scales[slots // page, :, slots % page] = rows.scales
        assert torch.equal(records, head_block(name, operand, codes, scales, padding))
        back = ref.read_rows(records, block, slots)
        assert torch.equal(back, rows.bytes)
        values = ref.decode_rows(back, block.format, dim)
        torch.testing.assert_close(values, rows.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name, operand", LAYOUTS)
def test_the_next_owner_of_a_slot_sees_nothing_of_a_row_of_nan(name, operand):
    block = make_block(name, operand, 64, 32)
    slots, x = torch.arange(32), randn(32, 1, 64)
    fresh, reused = torch.zeros(2, 1, 1, block.nbytes, dtype=torch.uint8)
    ref.write_rows(reused, block, slots, ref.encode(torch.full_like(x, math.nan), block.format))
    for records in (fresh, reused):
        ref.write_rows(records, block, slots, ref.encode(x, block.format))
    assert torch.equal(fresh, reused)
