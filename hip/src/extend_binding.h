// extend as a tvm-ffi function. Shapes and dtypes were checked by the caller, sglang_quantkv.kernels.extend.
#pragma once
#include "src/attention_binding.h"
#include "src/extend.h"

namespace quantkv {

template <class Config>
int64_t bind_extend_stages(int64_t device) {
  return extend_stages<Config>(static_cast<int>(device));
}

// q, out: [query tokens, Hq, D]; query_starts: int32 [requests + 1]; stages as bind_extend_stages returned them.
template <class Config>
void bind_extend(TensorView q, TensorView out, TensorView k_records, TensorView v_records, TensorView page_table,
                 TensorView seq_lens, TensorView query_starts, Optional<TensorView> sinks, double scale, double softcap,
                 int64_t window_left, int64_t stages) {
  ExtendParams p{};
  p.attention = attention_params(q, out, k_records, v_records, page_table, seq_lens, sinks, scale, softcap, window_left);
  p.query_starts = data_of<int>(query_starts);
  p.stages = static_cast<int>(stages);
  check(extend<Config>(p, q.size(0), stream_of(q)));
}

}  // namespace quantkv

#define QUANTKV_BIND_EXTEND(...)                                                                  \
  using QuantkvExtendConfig = __VA_ARGS__;                                                        \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(extend_stages, quantkv::bind_extend_stages<QuantkvExtendConfig>); \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(extend, quantkv::bind_extend<QuantkvExtendConfig>)
