// gather and scatter as tvm-ffi functions. Shapes and dtypes were checked by the caller, sglang_quantkv.kernels.slots.
#pragma once
#include "src/binding.h"
#include "src/slots.h"

namespace quantkv {

// records: uint8 [pages, heads, block bytes]; slots: int64 [tokens]; rows: uint8 [tokens, heads, row bytes].
template <class Config, Direction kDirection>
void bind_slots(TensorView k_records, TensorView v_records, TensorView slots, TensorView k_rows, TensorView v_rows) {
  const auto params = [&](const TensorView& records, const TensorView& rows) {
    return SlotsParams{data_of<uint8_t>(records), data_of<uint8_t>(rows), data_of<int64_t>(slots), slots.size(0),
                       static_cast<int>(records.size(1))};
  };
  const Stream stream = stream_of(k_records);
  check(copy_slots<typename Config::K, kDirection>(params(k_records, k_rows), stream));
  check(copy_slots<typename Config::V, kDirection>(params(v_records, v_rows), stream));
}

}  // namespace quantkv

#define QUANTKV_BIND_SLOTS(...)                                                                                  \
  using QuantkvSlotsConfig = __VA_ARGS__;                                                                        \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, (quantkv::bind_slots<QuantkvSlotsConfig, quantkv::Direction::kGather>))  \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(scatter, (quantkv::bind_slots<QuantkvSlotsConfig, quantkv::Direction::kScatter>))
