// decode as tvm-ffi functions. Shapes and dtypes were checked by the caller, sglang_quantkv.kernels.decode.
#pragma once
#include <tvm/ffi/container/array.h>

#include "src/attention_binding.h"
#include "src/decode.h"

namespace quantkv {

// [rows, row_blocks, waves, stages, workers] of DecodeLayout.
template <class Config>
tvm::ffi::Array<int64_t> bind_decode_layout(int64_t rows, int64_t device) {
  const DecodeLayout l = decode_layout<Config>(static_cast<int>(rows), static_cast<int>(device));
  return {l.rows, l.row_blocks, l.waves, l.stages, l.workers};
}

inline DecodePlan plan_of(const TensorView& workspace, const TensorView& seq_lens, int64_t segments, int64_t workers) {
  return DecodePlan::in(data_of<int>(workspace), static_cast<int>(seq_lens.size(0)), static_cast<int>(segments),
                        static_cast<int>(workers));
}

// Fills the plan's workspace from seq_lens [requests].
template <class Config>
void bind_plan(TensorView workspace, TensorView seq_lens, int64_t q_len, int64_t window_left, int64_t segments,
               int64_t workers) {
  PlanParams p{plan_of(workspace, seq_lens, segments, workers), data_of<int>(seq_lens), static_cast<int>(q_len),
               static_cast<int>(window_left), RingSlot<Config>::kTokens};
  check(plan(p, stream_of(seq_lens)));
}

// q, out: [requests * q_len, Hq, D]; layout as bind_decode_layout returned it for q_len * group rows.
template <class Config>
void bind_decode(TensorView q, TensorView out, TensorView k_records, TensorView v_records, TensorView page_table,
                 TensorView seq_lens, TensorView workspace, TensorView partial_out, TensorView partial_state,
                 Optional<TensorView> sinks, Optional<TensorView> tree_mask, int64_t q_len, double scale, double softcap,
                 int64_t window_left, tvm::ffi::Array<int64_t> layout) {
  DecodeParams p{};
  p.attention = attention_params(q, out, k_records, v_records, page_table, seq_lens, sinks, scale, softcap, window_left);
  const DecodeLayout l{static_cast<int>(layout[0]), static_cast<int>(layout[1]), static_cast<int>(layout[2]),
                       static_cast<int>(layout[3]), static_cast<int>(layout[4])};
  p.plan = plan_of(workspace, seq_lens, int64_t{p.attention.kv_heads} * l.row_blocks, l.workers);
  p.tree_mask = data_of<uint8_t>(tree_mask);
  p.partial_out = data_of<float>(partial_out);
  p.partial_state = data_of<float>(partial_state);
  p.q_len = static_cast<int>(q_len);
  p.row_blocks = l.row_blocks;
  check(decode<Config>(p, l, stream_of(q)));
}

}  // namespace quantkv

#define QUANTKV_BIND_DECODE(...)                                                              \
  using QuantkvDecodeConfig = __VA_ARGS__;                                                    \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_layout, quantkv::bind_decode_layout<QuantkvDecodeConfig>); \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, quantkv::bind_plan<QuantkvDecodeConfig>);               \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, quantkv::bind_decode<QuantkvDecodeConfig>)
