// store as a tvm-ffi function. Shapes and dtypes were checked by the caller, sglang_quantkv.kernels.store.
#pragma once
#include "src/binding.h"
#include "src/store.h"

namespace quantkv {

inline Rows rows_of(const Optional<TensorView>& tensor) {
  if (!tensor.has_value()) return Rows{};
  const TensorView& t = *tensor;
  const bool aligned = (reinterpret_cast<uintptr_t>(t.data_ptr()) | t.stride(0) * 2 | t.stride(1) * 2) % 16 == 0;
  return Rows{data_of<uint16_t>(t), t.stride(0), t.stride(1), static_cast<int>(t.size(1)), aligned};
}

// k, v, q, q_out, k_out: bf16 or fp16 [tokens, heads, D]; the rest as in StoreParams.
template <class Config>
void bind_store(TensorView k_records, TensorView v_records, TensorView slots, TensorView k, TensorView v,
                Optional<TensorView> q, Optional<TensorView> positions, Optional<TensorView> cos_sin, bool interleaved,
                Optional<TensorView> q_weight, Optional<TensorView> k_weight, double weight_offset,
                double eps, Optional<TensorView> q_out,
                Optional<TensorView> k_out, Optional<TensorView> q_codes, Optional<TensorView> q_scales) {
  StoreParams p{};
  p.q = rows_of(q), p.k = rows_of(k), p.v = rows_of(v), p.q_out = rows_of(q_out), p.k_out = rows_of(k_out);
  p.q_codes = data_of<uint8_t>(q_codes);
  p.q_scales = data_of<float>(q_scales);
  p.k_records = data_of<uint8_t>(k_records);
  p.v_records = data_of<uint8_t>(v_records);
  p.slots = data_of<int64_t>(slots);
  p.positions = data_of<int64_t>(positions);
  p.cos_sin = data_of<float>(cos_sin);
  p.q_weight = data_of<uint16_t>(q_weight);
  p.k_weight = data_of<uint16_t>(k_weight);
  p.weight_offset = static_cast<float>(weight_offset);
  p.eps = static_cast<float>(eps);
  p.tokens = static_cast<int>(k.size(0));
  p.rotary_dim = cos_sin.has_value() ? static_cast<int>((*cos_sin).size(1)) : 0;
  p.interleaved = interleaved;
  const Element element = k.dtype().code == kDLBfloat ? Element::kBf16 : Element::kFp16;
  check(store<Config>(p, element, stream_of(k)));
}

}  // namespace quantkv

#define QUANTKV_BIND_STORE(...)             \
  using QuantkvStoreConfig = __VA_ARGS__;   \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(store, quantkv::bind_store<QuantkvStoreConfig>)
