// What attention kernels are launched with: plain structs, each pointer with its shape.
#pragma once
#include "quantkv/element.h"

namespace quantkv {

// Of extend and decode. Rows are query tokens of the heads that share a KV head: row r of a request and KV head is its
// query token r / group and head kv_head * group + r % group.
struct AttentionParams {
  const uint16_t* q;         // [query tokens, Hq, D], 16-bit elements
  int64_t q_token_stride;    // elements; a multiple of 4, as is the next
  int64_t q_head_stride;
  uint16_t* out;             // [query tokens, Hq, D], the same elements
  int64_t out_token_stride;
  int64_t out_head_stride;
  const uint8_t* k_records;  // [pages, Hkv, K block bytes]
  const uint8_t* v_records;  // [pages, Hkv, V block bytes]
  const int* page_table;     // [requests, table_stride]
  int64_t table_stride;
  const int* seq_lens;       // [requests], query tokens included
  const float* sinks;        // [Hq], or nullptr
  int requests;
  int kv_heads;
  int group;                 // query heads that share a KV head
  int window_left;           // earlier tokens that a query sees, or -1 for all
  float scale_log2;          // softmax scale times log2(e)
  float softcap_log2;        // soft cap times log2(e), or 0
  Element element;
};

// Element address of a query row's head in q or out.
QUANTKV_DEVICE int64_t row_offset(int64_t token, int head, int64_t token_stride, int64_t head_stride) {
  return token * token_stride + head * head_stride;
}

}  // namespace quantkv
