// Extend: a chunk of each request's queries attends to its packed pages, cached prefix and the chunk itself alike.
//
// A block takes 128 query rows of one KV head (64 where heads are large), and its waves share every tile of K and V.
// One online softmax runs over all tokens that a row sees.
#pragma once
#include "quantkv/attend.h"
#include "quantkv/params.h"
#include "quantkv/ring.h"

namespace quantkv {

struct ExtendParams {
  AttentionParams attention;
  const int* query_starts;  // [requests + 1] first query token of each request
  int stages;
};

template <class Config>
struct ExtendShape {
  // The outputs of 16 rows of a large head do not fit in the registers of 32 lanes, nor of eight waves of 64.
  static constexpr bool kIsLarge = Config::kHeadDim > 128;
  static constexpr int kColumns = kWave == 32 && kIsLarge ? 8 : 16, kWaves = kWave == 64 && kIsLarge ? 4 : 8;
  static constexpr int kThreads = kWaves * kWave, kRows = kWaves * kColumns;
  using Attention = WaveAttention<Config, kColumns, false>;
  using Slot = RingSlot<Config>;
  using Ring = TileRing<BlockScope<kThreads>, Slot>;
};

// Hands a request's ring slots [slot, end) to the ring, K before V, and looks one slot's pages up ahead.
template <class Config>
class ExtendSource {
 public:
  using Shape = ExtendShape<Config>;
  QUANTKV_DEVICE ExtendSource(const AttentionParams& a, int request, int slot, int end, int first_token, int length)
      : a_(a), request_(request), next_(2 * slot), end_(end), first_token_(first_token), length_(length) {
    look_up();
  }
  QUANTKV_DEVICE bool next(TileCopy& tile) {
    const bool is_value = next_ & 1;
    if (next_ >> 1 >= end_) return false;
    const uint8_t* records = is_value ? a_.v_records : a_.k_records;
    tile.page_bytes = is_value ? Config::V::kBytes : Config::K::kBytes;
    for (int i = 0; i < Shape::Slot::kPages; i++)
      tile.page[i] = Shape::Slot::kPages > 1 && block_[i] < 0 ? nullptr : records + int64_t{block_[i]} * tile.page_bytes;
    next_++;
    if (is_value && next_ >> 1 < end_) look_up();
    return true;
  }

 private:
  QUANTKV_DEVICE void look_up() {
#pragma unroll
    for (int i = 0; i < Shape::Slot::kPages; i++) {
      const int entry = (next_ >> 1) * Shape::Slot::kPages + i, token = entry * Config::kPageSize;
      // A slot has a page that is used; where it has two, the other may not be.
      const bool used = Shape::Slot::kPages == 1 || (token < length_ && token + Config::kPageSize > first_token_);
      block_[i] = used ? a_.page_table[request_ * a_.table_stride + entry] * a_.kv_heads + block_index_y() : -1;
    }
  }

  const AttentionParams& a_;
  int request_;
  int next_;  // twice the slot, and one more for its V
  int end_, first_token_, length_;
  int block_[Shape::Slot::kPages];  // head block in the records; -1: the page is left out
};

// Rows' positions in their request, and the tokens that they see. Read again where they are needed: held, they would
// cost registers throughout.
struct RowPositions {
  const ExtendParams& p;
  int request;
  QUANTKV_DEVICE int queries() const { return p.query_starts[request + 1] - p.query_starts[request]; }
  QUANTKV_DEVICE int rows() const { return queries() * p.attention.group; }
  QUANTKV_DEVICE int of(int row) const {
    return p.attention.seq_lens[request] - queries() + min_of(row, rows() - 1) / p.attention.group;
  }
  QUANTKV_DEVICE int first_seen(int position) const {
    return p.attention.window_left < 0 ? 0 : max_of(0, position - p.attention.window_left);
  }
};

template <class Attention>
struct RangeMask {
  const RowPositions& positions;
  int wave_row;
  QUANTKV_DEVICE bool visible(int slot, int token) const {
    const int last = positions.of(wave_row + Attention::row(slot));
    return token >= positions.first_seen(last) && token <= last;
  }
};

// Which request a tile of query rows belongs to, and which of its tiles it is; false behind the last tile. Every lane
// looks at one request at a time.
QUANTKV_DEVICE bool find_rows(const int* query_starts, int requests, int group, int rows_per_tile, int& tile, int& request) {
  const int lane = lane_index();
  for (int base = 0; base < requests; base += kWave) {
    const int i = base + lane;
    int tiles = 0;
    if (i < requests) tiles = ((query_starts[i + 1] - query_starts[i]) * group + rows_per_tile - 1) / rows_per_tile;
    int end = tiles;
    for (int step = 1; step < kWave; step *= 2) {
      const int below = shuffle(end, max_of(lane - step, 0));
      if (lane >= step) end += below;
    }
    const int total = shuffle(end, kWave - 1);
    if (tile < total) {
      int passed = end <= tile;  // how many requests end before the tile
      for (int mask = 1; mask < kWave; mask *= 2) passed += shuffle_xor(passed, mask);
      request = base + passed;
      tile -= shuffle(end - tiles, passed);
      return true;
    }
    tile -= total;
  }
  return false;
}

template <class Config>
QUANTKV_KERNEL(ExtendShape<Config>::kThreads, 1)
extend_kernel(ExtendParams p) {
  using Shape = ExtendShape<Config>;
  using Attention = typename Shape::Attention;
  const AttentionParams& a = p.attention;
  int tile = block_index(), request = 0;
  if (!find_rows(p.query_starts, a.requests, a.group, Shape::kRows, tile, request)) return;
  // Positions of the block's and of the wave's first and last rows say which tokens are needed.
  const RowPositions positions{p, request};
  const int block_row = tile * Shape::kRows, wave_row = block_row + wave_index() * Shape::kColumns;
  const int wave_first = positions.of(wave_row);
  const int wave_last = positions.of(wave_row + Shape::kColumns - 1);
  const int block_from = positions.first_seen(positions.of(block_row));
  const int block_to = positions.of(block_row + Shape::kRows - 1) + 1;
  const int first_slot = block_from / Shape::Slot::kTokens, end_slot = (block_to + Shape::Slot::kTokens - 1) / Shape::Slot::kTokens;

  typename Shape::Ring ring(shared_memory(), p.stages);
  ExtendSource<Config> source(a, request, first_slot, end_slot, block_from, a.seq_lens[request]);
  ring.fill(source);

  Attention attention;
  // Reads its request's start again, which costs less than to keep it.
  const auto element_offset = [&](int row, int64_t token_stride, int64_t head_stride) {
    const int64_t token = p.query_starts[request] + row / a.group;
    return row_offset(token, block_index_y() * a.group + row % a.group, token_stride, head_stride);
  };
  attention.start(
      [&](int r) -> const uint16_t* {
        const int row = wave_row + r;
        return row < positions.rows() ? a.q + element_offset(row, a.q_token_stride, a.q_head_stride) : nullptr;
      },
      a.element, a.scale_log2);
  const RangeMask<Attention> mask{positions, wave_row};

  // A wave whose rows see nothing of a tile computes it too, all masked: to skip it would cost registers.
  const SeenByAll seen{positions.first_seen(wave_last), wave_first + 1};
  for (int i = first_slot; i < end_slot; i++)
    attend_slot<Config>(attention, ring, source, i * Shape::Slot::kTokens, seen, mask, a.softcap_log2);

  attention.finish();
#pragma unroll
  for (int slot = 0; slot < Attention::kSlots; slot++) {
    const int row = wave_row + Attention::row(slot);
    if (row >= positions.rows()) continue;
    float sum = attention.sum[slot], factor = 1;
    if (a.sinks) {
      const float sink = a.sinks[block_index_y() * a.group + row % a.group] * kLog2e, larger = fmaxf(attention.maximum[slot], sink);
      factor = exp2_approx(attention.maximum[slot] - larger);
      sum = sum * factor + exp2_approx(sink - larger);
    }
    factor = sum == 0 ? 0.0f : divide(factor, sum);  // a request without tokens: zeros
    uint16_t* out = a.out + element_offset(row, a.out_token_stride, a.out_head_stride);
#pragma unroll
    for (int j = 0; j < Attention::F::kDims; j++)
      out[Attention::F::dim(j)] = static_cast<uint16_t>(pack_elements(attention.output.at(slot, j) * factor, 0, a.element));
  }
}

#ifndef QUANTKV_DEVICE_ONLY

// How many tiles a device's shared memory holds under way; 0: not even the fewest that are needed.
template <class Config>
int extend_stages(int device) {
  const DeviceLimits limits = device_limits(device);
  int stages = kMaxStages;
  while (stages >= kMinStages && ring_bytes<RingSlot<Config>>(stages) > limits.shared_bytes) stages--;
  return stages >= kMinStages ? stages : 0;
}

// `tokens`: query tokens of all requests together.
template <class Config>
const char* extend(const ExtendParams& p, int64_t tokens, Stream stream) {
  using Shape = ExtendShape<Config>;
  if (p.attention.requests == 0 || tokens == 0) return nullptr;
  // A request's last tile may be short: at most one more tile each than all rows together fill.
  const int64_t tiles = tokens * p.attention.group / Shape::kRows + p.attention.requests;
  return launch(extend_kernel<Config>, dim3(static_cast<int>(tiles), p.attention.kv_heads), Shape::kThreads,
                ring_bytes<RingSlot<Config>>(p.stages), stream, p);
}

#endif

}  // namespace quantkv

// For device-only compiles.
#define QUANTKV_INSTANTIATE_EXTEND(...) \
  template QUANTKV_GLOBAL quantkv::extend_kernel<__VA_ARGS__>(quantkv::ExtendParams);
