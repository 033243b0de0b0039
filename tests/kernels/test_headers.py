"""formats.h against formats.py, and quantize.h against reference.quantize: small modules around the headers."""

from __future__ import annotations

import pytest
import torch
from helpers import HEAD_DIMS, LAYOUTS, PAGE_SIZES, one_thread  # noqa: F401
from machines import Machine, machines, patched_sources, same_bits

from sglang_quantkv import formats
from sglang_quantkv import reference as ref
from sglang_quantkv.formats import HeadBlock, Operand
from sglang_quantkv.kernels.build import Unit, load
from sglang_quantkv.kernels.targets import Target

FORMATS = {"int8": formats.INT8, "mxfp4": formats.MXFP4, "fp4_g32": formats.FP4_G32}
UNIT = Unit("store", "int8", 128, 64)  # whose binding the modules below replace


def load_binding(folder, target: Target, binding: str):
    """A module with these functions, built where the store kernel's would be."""
    return load(UNIT, target, patched_sources(folder, "src/store_binding.h", lambda _: binding))


# ---- formats.h --------------------------------------------------------------------------------------

TABLES = """
#pragma once
#include <utility>
#include "quantkv/formats.h"
#include "src/binding.h"

namespace quantkv {

constexpr int kHeadDims = 8, kPageSizes = 3;

template <class Block>
void fill(int64_t* out) {
  for (int size : {Block::kBytes, Block::kPayloadBytes, Block::kRowBytes, Block::kCodeBytes, Block::kScales,
                   Block::kScaleBytes})
    *out++ = size;
  for (int token = 0; token < Block::kPageSize; token++) {
    for (int byte = 0; byte < Block::kCodeBytes; byte++) *out++ = Block::code_offset(token, byte);
    for (int index = 0; index < Block::kScales; index++) *out++ = Block::scale_offset(token, index);
  }
}

template <int... i>
void fill_one(int index, int64_t* out, std::integer_sequence<int, i...>) {
  ((i == index ? fill<HeadBlock<static_cast<Format>(i / kPageSizes / kHeadDims / 2),
                                static_cast<Operand>(i / kPageSizes / kHeadDims % 2),
                                32 * (i / kPageSizes % kHeadDims + 1), 32 << i % kPageSizes>>(out)
               : void()), ...);
}

void table(int64_t index, TensorView out) {
  fill_one(static_cast<int>(index), data_of<int64_t>(out), std::make_integer_sequence<int, 3 * 2 * kHeadDims * kPageSizes>());
}

}  // namespace quantkv
#define QUANTKV_BIND_STORE(...) TVM_FFI_DLL_EXPORT_TYPED_FUNC(table, quantkv::table)
"""


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return load_binding(tmp_path_factory.mktemp("tables"), Target("emulated_mma"), TABLES)


@pytest.mark.parametrize(("name", "operand"), LAYOUTS)
def test_formats_h_says_what_formats_py_says(name, operand, tables):
    fmt = FORMATS[name]
    for i, head_dim in enumerate(HEAD_DIMS):
        for j, page_size in enumerate(PAGE_SIZES):
            block = HeadBlock(fmt, Operand(operand), head_dim, page_size)
            codes, scales = fmt.code_nbytes(head_dim), fmt.num_scales(head_dim)
            expected = [block.nbytes, block.payload_nbytes, fmt.row_nbytes(head_dim), codes, scales]
            expected.append(formats.SCALE_NBYTES[fmt.scale_dtype])
            for token in range(page_size):
                expected += [block.code_offset(token, byte) for byte in range(codes)]
                expected += [block.scale_offset(token, index) for index in range(scales)]
            got = torch.full((len(expected) + 1,), -1)
            tables.table(LAYOUTS.index((name, operand)) * 24 + 3 * i + j, got)
            assert got[:-1].tolist() == expected and got[-1] == -1, block


# ---- quantize.h -------------------------------------------------------------------------------------

QUANTIZE = """
#pragma once
#include "quantkv/quantize.h"
#include "src/binding.h"

namespace quantkv {

struct QuantizeParams {
  const float* x;    // [rows, D]
  uint32_t* words;   // [rows, D / 8, kWords]
  uint32_t* scales;  // [rows, D / 8]
  int rows;
};

template <Format kFormat, int kHeadDim>
QUANTKV_KERNEL(kWave, 1)
quantize_kernel(QuantizeParams p) {
  using Row = Codes<kFormat>;
  const int64_t i = block_index() * kWave + thread_index(), last = p.rows * (kHeadDim / 8) - 1;
  const int64_t from = i < last ? i : last;
  float x[8];
  for (int j = 0; j < 8; j++) x[j] = p.x[from * 8 + j];
  const Row row = quantize<kFormat, kHeadDim>(x);
  if (i > last) return;
  for (int j = 0; j < Row::kWords; j++) p.words[i * Row::kWords + j] = row.words[j];
  p.scales[i] = row.scale;
}

template <Format kFormat, int kHeadDim>
void bind_quantize(TensorView x, TensorView words, TensorView scales) {
  const QuantizeParams p{data_of<float>(x), data_of<uint32_t>(words), data_of<uint32_t>(scales),
                         static_cast<int>(x.size(0))};
  const dim3 grid(ceil_div(p.rows * (kHeadDim / 8), kWave));
  check(launch(quantize_kernel<kFormat, kHeadDim>, grid, kWave, 0, stream_of(x), p));
}

}  // namespace quantkv
"""
HEAD_DIMS_OF_LANES = (64, 128, 256)
CPP_NAMES = {"int8": "kInt8", "mxfp4": "kMxfp4", "fp4_g32": "kFp4G32"}
QUANTIZE += "#define QUANTKV_BIND_STORE(...)" + "".join(
    f" \\\n  TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}_{d}, (quantkv::bind_quantize<quantkv::Format::{cpp}, {d}>))"
    for name, cpp in CPP_NAMES.items()
    for d in HEAD_DIMS_OF_LANES
)


@pytest.fixture(scope="module")
def quantizers(tmp_path_factory):
    """``quantizers(machine)``: its module, built once."""
    return lambda machine: load_binding(tmp_path_factory.mktemp("quantize"), machine.target, QUANTIZE + "\n")


def float32_rows(head_dim: int) -> torch.Tensor:
    """Rows of any bits, of every exponent, of least subnormals, and of every tie and its neighbours."""
    generator = torch.Generator().manual_seed(head_dim)
    bits = torch.randint(-(2**31), 2**31, (40, head_dim), generator=generator, dtype=torch.int64).to(torch.int32)
    rows = [bits.view(torch.float32)]
    rows.append(torch.randn(600, head_dim, generator=generator) * 2.0 ** torch.arange(-149, 127).repeat(3)[:600, None])
    units = torch.randint(-300, 300, (300, head_dim), generator=generator) % torch.arange(1, 301)[:, None]
    rows.append(units * 2.0**-149)  # amax / 127 rounds to few units of the least subnormal, or to 0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.5, 0.5, 1.5, 63.5, 126.5, 127.0, -0.0, 0.0])
    for power in (-70, -66, -3, 0, 39, 45):
        near = torch.stack((ties, ties.nextafter(torch.tensor(9e9)), ties.nextafter(torch.tensor(-9e9))))
        rows.append(near.flatten().repeat(6)[:head_dim].expand(1, -1) * 2.0**power)
        small = torch.where(near.abs() < 7.6, near, 0.0).flatten()
        rows.append(-small.repeat(6)[:head_dim].expand(1, -1) * 2.0**power)
    special = torch.randn(6, head_dim, generator=generator)
    special[0], special[1], special[2, 9], special[3, 33] = 0.0, -0.0, torch.inf, torch.nan
    special[4, 63], special[5, ::2] = -torch.inf, torch.finfo(torch.float32).max
    return torch.cat((*rows, special)).contiguous()


@pytest.mark.parametrize("machine", machines("emulated_mma", "emulated_mfma"), ids=str)
def test_quantize_h_is_the_references_for_any_float32(machine: Machine, quantizers):
    module = quantizers(machine)
    for head_dim in HEAD_DIMS_OF_LANES:
        x = float32_rows(head_dim)
        for name, fmt in FORMATS.items():
            codes, scales = ref.quantize(x, fmt)
            words = torch.zeros(len(x), fmt.code_nbytes(head_dim), dtype=torch.uint8, device=machine.device)
            got = torch.zeros(len(x), head_dim // 8, dtype=torch.int32, device=machine.device)
            module[f"{name}_{head_dim}"](x.to(machine.device), words.view(torch.int32), got)
            assert torch.equal(words.cpu(), codes.view(torch.uint8)), (name, head_dim)
            lanes = scales.repeat_interleave(head_dim // 8 // scales.shape[1], dim=1)
            if fmt.scale_dtype == "e8m0":
                assert torch.equal(got.cpu(), lanes.int())
            else:
                assert torch.equal(got.cpu()[lanes.isnan()], torch.full_like(got.cpu()[lanes.isnan()], 0x7FC00000))
                assert same_bits(got.cpu().view(torch.float32), lanes)
