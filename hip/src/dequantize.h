// Reads a range of tokens of each request out of packed pages into bf16 or fp16 rows, K and V in one launch, so that
// attention in high precision can run over a short cached prefix. reference.decode_rows says what must come out.
//
// A lane loads 16 bytes at a time and stores 16: 8 dims of a token. What it loads is not what it stores, since an atom
// is 16 or 32 dims of one token (K, and 4-bit V) or 16 tokens of one dim (int8 V). So four neighbouring lanes exchange
// words until each holds the codes of 8 dims of 4 tokens, in every format.
#pragma once
#include "quantkv/element.h"
#include "quantkv/tile.h"

namespace quantkv {

constexpr int kDequantizeThreads = 256;
constexpr int kDequantizeBlocks = 4;   // that a unit should hold at a time
constexpr int kDequantizeWindow = 32;  // tokens of one page that a block works on; D lanes take those of one head

struct DequantizeParams {
  const uint8_t* k_records;  // [pages, heads, K::kBytes]
  const uint8_t* v_records;  // [pages, heads, V::kBytes]
  const int* page_table;     // [requests, table_stride]
  int64_t table_stride;
  const int* begins;         // [requests]: the first token that is read
  const int* ends;           // [requests]: one past the last
  const int* row_starts;     // [requests]: the row of the first token
  uint16_t* k_out;           // [rows, heads, D]
  uint16_t* v_out;           // [rows, heads, D]
  int rows, heads, requests;
  int max_tokens;            // of a request; what it has beyond, or beyond the last row, is left out
  int windows;               // that max_tokens may touch
  int groups;                // blocks that the heads of K take, and those of V
};

// Four neighbouring lanes hold a row each of a 4 x 4 matrix of kWords words; afterwards each holds a column.
template <int kWords>
QUANTKV_DEVICE void transpose(uint32_t (&x)[4][kWords]) {
  for (int mask = 1; mask < 4; mask *= 2) {
    const bool is_upper = lane_index() & mask;
    for (int i = 0; i < 4; i++) {
      if (i & mask) continue;
      for (int w = 0; w < kWords; w++) {
        uint32_t &low = x[i][w], &high = x[i + mask][w];
        const uint32_t received = shuffle_xor(is_upper ? low : high, mask);
        low = is_upper ? received : low;
        high = is_upper ? high : received;
      }
    }
  }
}

// The codes of 4 tokens and 8 dims, as `transpose` leaves them: by token, or for token atoms by dim modulo 4.
template <class Block>
struct Codes4x8 {
  static constexpr int kWords = Block::kIsInt8 ? 2 : 1;
  uint32_t words[4][kWords];

  // Token `token`, a multiple of 4, and dim `dim`, a multiple of 8, name the lane's codes. Its neighbours are 8 dims
  // apart, up to a multiple of 32, or for token atoms 4 tokens, up to a multiple of 16.
  QUANTKV_DEVICE void load(const uint8_t* block, int token, int dim) {
    const int quarter = lane_index() % 4;
    Bytes16 atoms[kWords];
    for (int i = 0; i < kWords; i++)
      atoms[i] = load16(block + (Block::kIsTokenAtom
                                     ? Block::atom_offset(token, dim + 4 * i + quarter)
                                     : Block::atom_offset(token + quarter, (dim & ~31) / 2 * kWords + kAtomBytes * i)));
    for (int i = 0; i < 4; i++)
      for (int w = 0; w < kWords; w++)
        words[i][w] = Block::kIsTokenAtom ? atoms[w].w[i] : atoms[(i * kWords + w) / 4].w[(i * kWords + w) % 4];
    transpose(words);
  }

  QUANTKV_DEVICE float value(int token, int dim) const {
    if constexpr (Block::kIsTokenAtom) {
      return static_cast<int8_t>(words[dim % 4][dim / 4] >> 8 * token);
    } else if constexpr (Block::kIsInt8) {
      return static_cast<int8_t>(words[token][dim / 4] >> dim % 4 * 8);
    } else {
      // Exponent and mantissa of e2m1 at the lower end of a float's: a float that is 2^126 too small.
      const uint32_t code = words[token][0] >> 4 * dim;
      return as_float((code & 7u) << 22 | (code & 8u) << 28) * 0x1p126f;
    }
  }
};

// The tokens of one request that are read.
struct ReadRange {
  int begin, end;
  int64_t row;  // of token `begin`
};

// Writes what one lane takes of a head's tokens [window, window + kDequantizeWindow). All lanes of a wave call it, and
// `part` counts up along them. `out` is the head's part of row 0.
template <class Block, Element kElement>
QUANTKV_DEVICE void dequantize_part(const uint8_t* block, uint16_t* out, int64_t row_stride, const ReadRange& range,
                                    int window, int part) {
  constexpr int kHeadDim = Block::kHeadDim, kColumns = kHeadDim / Block::kScales;
  const int quarter = part % 4, four = part / 4;
  const int token = Block::kIsTokenAtom ? four / (kHeadDim / 8) * 16 + 4 * quarter : four % (kDequantizeWindow / 4) * 4;
  const int dim = Block::kIsTokenAtom ? four % (kHeadDim / 8) * 8 : four / (kDequantizeWindow / 4) * 32 + 8 * quarter;
  const int in_page = window % Block::kPageSize + token, first = window + token;

  float scales[4];
  load_scales<Block>(block + Block::scale_offset(in_page, dim / kColumns), scales);
  Codes4x8<Block> codes;
  codes.load(block, in_page, dim);
  uint16_t* to = out + (range.row + first - range.begin) * row_stride + dim;
  for (int i = 0; i < 4; i++) {
    // E8M0's NaN was loaded as infinity.
    const float scale = Block::kScaleBytes == 1 && !is_finite(scales[i]) ? as_float(kNanBits) : scales[i];
    float x[8];
    for (int d = 0; d < 8; d++) x[d] = codes.value(i, d) * scale;
    if (first + i >= range.begin && first + i < range.end) store16(to + i * row_stride, pack<kElement>(x));
  }
}

// Along x: windows of each request. Along y: the heads of K, then of V, D lanes for each.
template <class Config, Element kElement>
QUANTKV_KERNEL(kDequantizeThreads, kDequantizeBlocks)
dequantize_kernel(DequantizeParams p) {
  using K = typename Config::K;
  using V = typename Config::V;
  constexpr int kHeadDim = Config::kHeadDim;
  static_assert(kHeadDim % kWave == 0 && kDequantizeThreads % kWave == 0, "the lanes of a wave share a head");
  const int request = block_index() / p.windows;
  const int begin = p.begins[request], row = p.row_starts[request];
  const int tokens = min_of(p.ends[request] - begin, min_of(p.max_tokens, p.rows - row));
  const ReadRange range{begin, begin + tokens, row};
  const int window = (begin / kDequantizeWindow + block_index() % p.windows) * kDequantizeWindow;
  if (tokens <= 0 || window >= range.end) return;

  const bool is_v = block_index_y() >= p.groups;
  const int lane = (block_index_y() - (is_v ? p.groups : 0)) * kDequantizeThreads + thread_index();
  const int head = lane / kHeadDim, part = lane % kHeadDim, column = head * kHeadDim;
  if (head >= p.heads) return;
  const int64_t page = p.page_table[request * p.table_stride + window / Config::kPageSize];
  const int64_t block = page * p.heads + head, stride = p.heads * kHeadDim;
  if (is_v)
    dequantize_part<V, kElement>(p.v_records + block * V::kBytes, p.v_out + column, stride, range, window, part);
  else
    dequantize_part<K, kElement>(p.k_records + block * K::kBytes, p.k_out + column, stride, range, window, part);
}

#ifndef QUANTKV_DEVICE_ONLY
// Fills in what the launch decides, windows and groups. nullptr, or what went wrong.
template <class Config>
const char* dequantize(DequantizeParams p, Element element, Stream stream) {
  if (p.requests == 0 || p.max_tokens <= 0) return nullptr;
  p.windows = ceil_div(p.max_tokens + kDequantizeWindow - 1, kDequantizeWindow);
  p.groups = ceil_div(p.heads * Config::kHeadDim, kDequantizeThreads);
  const auto kernel =
      element == Element::kBf16 ? dequantize_kernel<Config, Element::kBf16> : dequantize_kernel<Config, Element::kFp16>;
  return launch(kernel, dim3(p.requests * p.windows, 2 * p.groups), kDequantizeThreads, 0, stream, p);
}
#endif

}  // namespace quantkv

// The kernels of a configuration, for a compile without host code.
#define QUANTKV_INSTANTIATE_DEQUANTIZE(...)                                                        \
  template QUANTKV_KERNEL(quantkv::kDequantizeThreads, quantkv::kDequantizeBlocks)                 \
      quantkv::dequantize_kernel<__VA_ARGS__, quantkv::Element::kBf16>(quantkv::DequantizeParams); \
  template QUANTKV_KERNEL(quantkv::kDequantizeThreads, quantkv::kDequantizeBlocks)                 \
      quantkv::dequantize_kernel<__VA_ARGS__, quantkv::Element::kFp16>(quantkv::DequantizeParams);
