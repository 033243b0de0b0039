// The arguments that extend and decode share, from tensors.
#pragma once
#include "quantkv/params.h"
#include "src/binding.h"

namespace quantkv {

inline AttentionParams attention_params(const TensorView& q, const TensorView& out, const TensorView& k_records,
                                        const TensorView& v_records, const TensorView& page_table,
                                        const TensorView& seq_lens, const Optional<TensorView>& sinks, double scale,
                                        double softcap, int64_t window_left) {
  AttentionParams a{};
  a.q = data_of<uint16_t>(q);
  a.q_token_stride = q.stride(0);
  a.q_head_stride = q.stride(1);
  a.out = data_of<uint16_t>(out);
  a.out_token_stride = out.stride(0);
  a.out_head_stride = out.stride(1);
  a.k_records = data_of<uint8_t>(k_records);
  a.v_records = data_of<uint8_t>(v_records);
  a.page_table = data_of<int>(page_table);
  a.table_stride = page_table.stride(0);
  a.seq_lens = data_of<int>(seq_lens);
  a.sinks = data_of<float>(sinks);
  a.requests = static_cast<int>(seq_lens.size(0));
  a.kv_heads = static_cast<int>(k_records.size(1));
  a.group = static_cast<int>(q.size(1) / k_records.size(1));
  a.window_left = static_cast<int>(window_left);
  a.scale_log2 = static_cast<float>(scale) * kLog2e;
  a.softcap_log2 = static_cast<float>(softcap) * kLog2e;
  a.element = q.dtype().code == kDLBfloat ? Element::kBf16 : Element::kFp16;
  return a;
}

}  // namespace quantkv
