// dequantize as a tvm-ffi function. Shapes and dtypes were checked by the caller, sglang_quantkv.kernels.dequantize.
#pragma once
#include "src/binding.h"
#include "src/dequantize.h"

namespace quantkv {

// k_out, v_out: bf16 or fp16 [rows, heads, D]; the rest as in DequantizeParams.
template <class Config>
void bind_dequantize(TensorView k_records, TensorView v_records, TensorView page_table, TensorView begins,
                     TensorView ends, TensorView row_starts, TensorView k_out, TensorView v_out, int64_t max_tokens) {
  DequantizeParams p{};
  p.k_records = data_of<uint8_t>(k_records);
  p.v_records = data_of<uint8_t>(v_records);
  p.page_table = data_of<int>(page_table);
  p.table_stride = page_table.stride(0);
  p.begins = data_of<int>(begins);
  p.ends = data_of<int>(ends);
  p.row_starts = data_of<int>(row_starts);
  p.k_out = data_of<uint16_t>(k_out);
  p.v_out = data_of<uint16_t>(v_out);
  p.rows = static_cast<int>(k_out.size(0));
  p.heads = static_cast<int>(k_out.size(1));
  p.requests = static_cast<int>(begins.size(0));
  p.max_tokens = static_cast<int>(max_tokens < p.rows ? max_tokens : p.rows);
  const Element element = k_out.dtype().code == kDLBfloat ? Element::kBf16 : Element::kFp16;
  check(dequantize<Config>(p, element, stream_of(k_records)));
}

}  // namespace quantkv

#define QUANTKV_BIND_DEQUANTIZE(...)           \
  using QuantkvDequantizeConfig = __VA_ARGS__; \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(dequantize, quantkv::bind_dequantize<QuantkvDequantizeConfig>)
