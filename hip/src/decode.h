// Decode and verify: the last 1 to 8 query tokens of each request attend to its packed pages.
//
// Every wave is a worker of its own: a private ring of tiles (K, V, K, V, ...), a contiguous range of the plan's
// positions, no barrier with other waves. A combine kernel merges the workers' partial results.
#pragma once
#include "quantkv/attend.h"
#include "quantkv/params.h"
#include "quantkv/ring.h"
#include "src/decode_plan.h"

namespace quantkv {

constexpr int kMaxQueryTokens = 8;

struct DecodeParams {
  AttentionParams attention;
  DecodePlan plan;
  const uint8_t* tree_mask;  // [requests, q_len] bit j: query token i sees query token j; nullptr: causal
  float* partial_out;        // [workers + segments, rows, D]
  float* partial_state;      // [workers + segments, rows, 2] maximum in log2 units, and sum
  int q_len;
  int row_blocks;            // blocks of rows that a KV head's group * q_len rows fill
  int stages;
};

// A kernel's query tile: more rows take the next wider one, and then more blocks of rows.
template <class Config, int kColumns_, bool kTwoTerm_>
struct DecodeShape {
  static constexpr int kColumns = kColumns_;
  static constexpr bool kTwoTerm = kTwoTerm_;
  using Attention = WaveAttention<Config, kColumns, kTwoTerm>;
  using K = typename Config::K;
  static constexpr int kRows = Attention::kRows;
  using Slot = RingSlot<Config>;
  // Registers decide: 4-bit decoding needs more waves in flight, large heads and wide tiles leave room for fewer.
  static constexpr bool kIsLarge = Config::kHeadDim > 128, kIsWide = kColumns > 8;
  static constexpr int kMaxWaves = kWave == 64 ? 4 : K::kIsInt8 ? (kIsLarge ? 4 : 8)
                                   : kIsLarge || kIsWide || K::kFormat != Format::kMxfp4 ? 8 : 12;
  using Ring = TileRing<WaveScope, Slot>;
};

// Hands a worker's tiles to its ring. Each lane looks up where the pages of one slot are, for as many slots at once.
template <class Config, class Shape>
class DecodeSource {
 public:
  QUANTKV_DEVICE DecodeSource(const DecodeParams& p, int begin, int end, int request)
      : p_(p), next_(2 * begin), end_(end), request_(request), looked_up_to_(begin) {}

  QUANTKV_DEVICE bool next(TileCopy& tile) {
    const int position = next_ >> 1;
    const bool is_value = next_ & 1;
    if (position >= end_) return false;
    if (position == looked_up_to_) look_up(position);
    const uint8_t* records = is_value ? p_.attention.v_records : p_.attention.k_records;
    tile.page_bytes = is_value ? Config::V::kBytes : Config::K::kBytes;
#pragma unroll
    for (int i = 0; i < Shape::Slot::kPages; i++) {
      const int block = shuffle(block_[i], position - looked_up_to_ + kWave);
      tile.page[i] = Shape::Slot::kPages > 1 && block < 0 ? nullptr : records + int64_t{block} * tile.page_bytes;
    }
    next_++;
    return true;
  }

 private:
  QUANTKV_DEVICE void look_up(int first) {
    looked_up_to_ = first + kWave;
    const int position = first + lane_index();
    if (position >= end_) return;
    const AttentionParams& a = p_.attention;
    request_ = p_.plan.request_at(position, request_);
    const int count = p_.plan.slots[request_], local = position - p_.plan.start[request_], segment = local / count;
    const int slot = p_.plan.first_slot[request_] + local - segment * count, head = segment / p_.row_blocks;
    const int length = a.seq_lens[request_];
    const int unseen = a.window_left < 0 ? 0 : max_of(0, length - p_.q_len - a.window_left);
#pragma unroll
    for (int i = 0; i < Shape::Slot::kPages; i++) {
      const int entry = slot * Shape::Slot::kPages + i, token = entry * Config::kPageSize;
      // A slot has a page that is used; where it has two, the other may not be.
      const bool used = Shape::Slot::kPages == 1 || (token < length && token + Config::kPageSize > unseen);
      block_[i] = used ? a.page_table[request_ * a.table_stride + entry] * a.kv_heads + head : -1;
    }
  }

  const DecodeParams& p_;
  int next_;  // twice the position, and one more for its V
  int end_, request_, looked_up_to_;
  int block_[Shape::Slot::kPages];  // head block in the records; -1: the page is left out
};

// Which tokens the slots of a lane see: those of the prefix inside their windows, and of the query tokens those that
// their bits name. Computed where a tile needs it: held for every slot, it would cost registers throughout.
template <class Attention>
struct StepMask {
  const DecodeParams& p;
  int request, first_row, prefix;
  QUANTKV_DEVICE bool visible(int slot, int token) const {
    const AttentionParams& a = p.attention;
    const int query = min_of((first_row + Attention::row(slot)) / a.group, p.q_len - 1);
    const uint32_t seen = p.tree_mask ? p.tree_mask[request * p.q_len + query] : (2u << query) - 1;
    // A query token stands one position after the last of the query tokens that it descends from.
    const int first = a.window_left < 0 ? 0 : prefix + count_bits(seen) - 1 - a.window_left;
    return token >= first && (token < prefix || (token < prefix + kMaxQueryTokens && (seen >> (token - prefix) & 1)));
  }
};

template <class Config, class Shape>
QUANTKV_KERNEL(Shape::kMaxWaves* kWave, 1)
decode_kernel(DecodeParams p) {
  using Attention = typename Shape::Attention;
  const AttentionParams& a = p.attention;
  allow_next_kernel();  // combine, which waits for our results
  const int worker = block_index() * (block_size() / kWave) + wave_index();
  int position = p.plan.worker_start[worker];
  const int end = p.plan.worker_start[worker + 1];
  if (position >= end) return;
  int request = p.plan.worker_request[worker];

  typename Shape::Ring ring(shared_memory() + wave_index() * ring_bytes<typename Shape::Slot>(p.stages), p.stages);
  DecodeSource<Config, Shape> source(p, position, end, request);
  ring.fill(source);

  Attention attention;
  const int rows = p.q_len * a.group;
  while (position < end) {
    request = p.plan.request_at(position, request);
    const int count = p.plan.slots[request], local = position - p.plan.start[request], segment = local / count;
    const int first = local - segment * count, last = min_of(count, first + end - position);
    const int head = segment / p.row_blocks, first_row = segment % p.row_blocks * Attention::kRows;
    const int length = a.seq_lens[request], prefix = length - p.q_len;

    attention.start(
        [&](int r) -> const uint16_t* {
          const int row = first_row + r;
          if (row >= rows) return nullptr;
          const int64_t token = int64_t{request} * p.q_len + row / a.group;
          return a.q + row_offset(token, head * a.group + row % a.group, a.q_token_stride, a.q_head_stride);
        },
        a.element, a.scale_log2);
    const StepMask<Attention> mask{p, request, first_row, prefix};
    // Of a tree's tokens, perhaps none is seen by all.
    const SeenByAll seen{a.window_left < 0 ? 0 : max_of(0, length - 1 - a.window_left), prefix + (p.tree_mask ? 0 : 1)};

    for (int i = first; i < last; i++)
      attend_slot<Config>(attention, ring, source, (p.plan.first_slot[request] + i) * Shape::Slot::kTokens, seen, mask,
                          a.softcap_log2);
    position += last - first;

    attention.finish();
    const int64_t place = worker + int64_t{request} * p.plan.segments_per_request + segment;
#pragma unroll
    for (int slot = 0; slot < Attention::kSlots; slot++) {
      const int column = Attention::F::column(slot), row = Attention::row_of(column);
      if (Attention::is_residual(column) || first_row + row >= rows) continue;
      const int64_t partial = place * Attention::kRows + row;
      if (Attention::F::is_first_of_column()) {
        p.partial_state[2 * partial] = attention.maximum[slot];
        p.partial_state[2 * partial + 1] = attention.sum[slot];
      }
#pragma unroll
      for (int j = 0; j < Attention::F::kDims; j++)
        p.partial_out[partial * Config::kHeadDim + Attention::F::dim(j)] = attention.output.at(slot, j);
    }
  }
}

// ---- combine --------------------------------------------------------------------------------------

constexpr int kMinCombineThreads = 64, kMaxCombineThreads = 512;
constexpr int kCombineLoads = 4;  // partials that a thread has under way

// Adds another partial result of four dims to this one, both relative to their own maximum.
QUANTKV_DEVICE void merge(float& maximum, float& sum, float (&out)[4], float other_maximum, float other_sum, const float* other) {
  const float larger = fmaxf(maximum, other_maximum);
  const float old = exp2_approx(maximum - larger), young = exp2_approx(other_maximum - larger);
  maximum = larger;
  sum = sum * old + other_sum * young;
#pragma unroll
  for (int d = 0; d < 4; d++) out[d] = out[d] * old + other[d] * young;
}

// One block per (segment, row): threads hold four dims each, and the groups of D / 4 threads take turns at partials.
template <class Config, class Shape>
QUANTKV_KERNEL(kMaxCombineThreads, 1)
combine_kernel(DecodeParams p) {
  constexpr int kDimThreads = Config::kHeadDim / 4;
  const AttentionParams& a = p.attention;
  const int turns = block_size() / kDimThreads;
  const int segment = block_index(), row = block_index_y();
  const int request = segment / p.plan.segments_per_request, local = segment % p.plan.segments_per_request;
  const int head = local / p.row_blocks, query_row = local % p.row_blocks * Shape::kRows + row;
  const int turn = thread_index() / kDimThreads, dim = thread_index() % kDimThreads * 4;
  if (query_row >= p.q_len * a.group) return;  // all threads alike
  const int first = p.plan.partials[2 * segment], count = p.plan.partials[2 * segment + 1];

  wait_for_previous_kernel();
  float maximum = kLowest, sum = 0, out[4] = {};
  for (int i = turn; i < count; i += kCombineLoads * turns) {
    float m[kCombineLoads], s[kCombineLoads];
    Bytes16 o[kCombineLoads];
#pragma unroll
    for (int u = 0; u < kCombineLoads; u++) {
      const bool present = i + u * turns < count;
      const int64_t partial = int64_t{first + (present ? i + u * turns : i)} * Shape::kRows + row;
      m[u] = present ? p.partial_state[2 * partial] : kLowest;
      s[u] = present ? p.partial_state[2 * partial + 1] : 0;
      o[u] = load16(p.partial_out + partial * Config::kHeadDim + dim);
    }
#pragma unroll
    for (int u = 0; u < kCombineLoads; u++) merge(maximum, sum, out, m[u], s[u], reinterpret_cast<const float*>(o[u].w));
  }
  // Turn 0 adds the others' results, in order.
  float* shared = reinterpret_cast<float*>(shared_memory());
  float* mine = shared + thread_index() * 6;
  mine[0] = maximum, mine[1] = sum;
  for (int d = 0; d < 4; d++) mine[2 + d] = out[d];
  sync_block();
  if (turn != 0) return;
  for (int t = 1; t < turns; t++) {
    const float* other = shared + (t * kDimThreads + thread_index()) * 6;
    merge(maximum, sum, out, other[0], other[1], other + 2);
  }
  const int query_head = head * a.group + query_row % a.group;
  if (a.sinks) {
    const float sink = a.sinks[query_head] * kLog2e, larger = fmaxf(maximum, sink), old = exp2_approx(maximum - larger);
    sum = sum * old + exp2_approx(sink - larger);
    for (int d = 0; d < 4; d++) out[d] *= old;
  }
  const float inverse = sum == 0 ? 0.0f : divide(1.0f, sum);  // a request without tokens: zeros
  const int64_t token = int64_t{request} * p.q_len + query_row / a.group;
  uint16_t* to = a.out + row_offset(token, query_head, a.out_token_stride, a.out_head_stride) + dim;
  store8(to, {pack_elements(out[0] * inverse, out[1] * inverse, a.element),
              pack_elements(out[2] * inverse, out[3] * inverse, a.element)});
}

// ---- instantiation and launch -----------------------------------------------------------------------

// Calls visit(Shape{}) with the narrowest query tile that holds `rows` rows, two terms where columns stay idle.
#if QUANTKV_MAP == QUANTKV_MAP_MMA
template <class Config, class Visit>
auto with_decode_shape(int rows, const Visit& visit) {
  if (rows <= 4) return visit(DecodeShape<Config, 8, true>{});
  // A wider tile of large heads would not fit in the registers.
  if constexpr (Config::kHeadDim <= 128)
    if (rows > 8) return visit(DecodeShape<Config, 16, false>{});
  return visit(DecodeShape<Config, 8, false>{});
}
#else
template <class Config, class Visit>
auto with_decode_shape(int rows, const Visit& visit) {
  if (rows <= 8) return visit(DecodeShape<Config, 16, true>{});
  return visit(DecodeShape<Config, 16, false>{});
}
#endif

// The kernel for so many rows.
template <class Config>
const void* decode_kernels(int rows, bool combine) {
  return with_decode_shape<Config>(rows, [&](auto shape) -> const void* {
    using Shape = decltype(shape);
    return combine ? reinterpret_cast<const void*>(combine_kernel<Config, Shape>)
                   : reinterpret_cast<const void*>(decode_kernel<Config, Shape>);
  });
}

#ifndef QUANTKV_DEVICE_ONLY

// How a decode launch is laid out on a device; the same for every layer of a model.
struct DecodeLayout {
  int rows;        // query rows of a partial
  int row_blocks;  // of a KV head
  int waves;       // of a block
  int stages;      // of a wave's ring
  int workers;     // of the whole grid
};

template <class Config>
DecodeLayout decode_layout(int rows, int device) {
  const DeviceLimits limits = device_limits(device);
  return with_decode_shape<Config>(rows, [&](auto shape) {
    using Shape = decltype(shape);
    DecodeLayout layout{Shape::kRows, ceil_div(rows, Shape::kRows), Shape::kMaxWaves, kMaxStages, 0};
    while (layout.waves > 0 && layout.waves * ring_bytes<typename Shape::Slot>(layout.stages) > limits.shared_bytes)
      layout.stages > kMinStages ? layout.stages-- : layout.waves--;
    layout.workers = layout.waves * limits.units;
    return layout;
  });
}

inline const char* plan(const PlanParams& p, Stream stream) {
  if (p.plan.requests == 0) return nullptr;
  return launch(plan_kernel, dim3(1), kPlanThreads, kPlanThreads * 4, stream, p);
}

template <class Config>
const char* decode(DecodeParams p, const DecodeLayout& layout, Stream stream) {
  if (p.attention.requests == 0) return nullptr;
  p.stages = layout.stages;
  return with_decode_shape<Config>(p.q_len * p.attention.group, [&](auto shape) {
    using Shape = decltype(shape);
    const char* error = launch(decode_kernel<Config, Shape>, dim3(layout.workers / layout.waves), layout.waves * kWave,
                               layout.waves * ring_bytes<typename Shape::Slot>(layout.stages), stream, p);
    if (error) return error;
    // As many groups of threads as keep each at about one round of partials.
    const int segments = p.attention.requests * p.plan.segments_per_request;
    int threads = kMinCombineThreads;
    while (threads < kMaxCombineThreads && threads / (Config::kHeadDim / 4) * kCombineLoads < layout.workers / segments) threads *= 2;
    return launch_early(combine_kernel<Config, Shape>, dim3(segments, Shape::kRows), threads, threads * 6 * 4, stream, p);
  });
}

#endif

}  // namespace quantkv

// For device-only compiles.
#define QUANTKV_INSTANTIATE_DECODE(...) template const void* quantkv::decode_kernels<__VA_ARGS__>(int, bool);
