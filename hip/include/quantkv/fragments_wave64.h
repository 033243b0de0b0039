// Fragments of AMD's MFMA and Hygon's MMAC: 64 lanes, 16x16 tiles, 32 (gfx950: 64) bytes of int8 or 16 bf16 a step.
//
// Either operand gives a lane 16-index l % 16 and the contraction of quarter l / 16. MFMA returns to a lane column
// l % 16 of rows 4 (l / 16) + r, MMAC row l % 16 of columns l / 16 + 4 r. So tokens (or dims) are the rows of MFMA's
// product and the columns of MMAC's, and on both a lane ends up with one query column l % 16, in scores and in outputs.
//
// Which token a row stands for is only the address it is loaded from: a lane of quarter u gets tokens 16u .. 16u + 15
// of a 64-token tile, whose codes, packed to bytes, are its own part of the operand of PV. V atoms hold just those 16.
#pragma once
#include "quantkv/tile.h"

namespace quantkv {

// kQueryScales: scales of a query row, 1 or one per 32 dims. kColumns: query columns of a wave's tile, a multiple of 16.
template <class Config, int kColumns_, int kQueryScales_>
struct Fragments {
  using K = typename Config::K;
  using V = typename Config::V;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kColumns = kColumns_;
  static constexpr int kQueryScales = kQueryScales_;
  static constexpr int kColumnTiles = kColumns / 16;
  static constexpr int kSlots = kColumnTiles;
  static constexpr int kTokens = 16;
  static constexpr int kDims = kHeadDim / 4;
  static constexpr int kProbabilityBlocks = 1;  // both steps of 32 tokens (or the one of 64) share a scale
  static constexpr int kMatrixColumns = 16;
  static constexpr int kQueryWords = kHeadDim / 16;
  static constexpr int kOutputTiles = kHeadDim / 16;
  static_assert(kColumns % 16 == 0);

  static constexpr bool kInt8K = K::kIsInt8, kInt8V = V::kIsInt8;
  // As in fragments_mma.h: the sum of exponents also makes of a probability of 0 one of 2^-37 (there 2^-87), which no
  // result shows. 4-bit codes enter as their values, since gfx90a flushes subnormal bf16, so the products
  // need the smaller factor.
  static constexpr int kProbabilityExponent = kInt8V ? 0 : -90;
  static constexpr int kOutputExponent = kInt8V ? 0 : kProbabilityExponent + 127;

  QUANTKV_DEVICE static int quarter() { return lane_index() >> 4; }
  QUANTKV_DEVICE static int index16() { return lane_index() & 15; }
  static constexpr bool kQueriesOnRows = QUANTKV_MAP == QUANTKV_MAP_MMAC;
  // Index on the token (or dim) side of a lane's accumulator r.
  QUANTKV_DEVICE static int side_index(int r) { return kQueriesOnRows ? quarter() + 4 * r : 4 * quarter() + r; }
  // Of 4 x 4 tokens, the one that a side index loads: quarter (in steps of 16) and place.
  QUANTKV_DEVICE static int side_token(int index) {
    return kQueriesOnRows ? 16 * (index & 3) + (index >> 2) : 16 * (index >> 2) + (index & 3);
  }

  QUANTKV_DEVICE static int column(int slot) { return 16 * slot + index16(); }
  QUANTKV_DEVICE static int token(int i) { return 16 * quarter() + i; }
  QUANTKV_DEVICE static int dim(int j) {
    const int tile = j >> 2, index = side_index(j & 3);
    return kInt8V ? 16 * tile + index : 32 * (tile >> 1) + 2 * index + (tile & 1);
  }

  QUANTKV_DEVICE static bool is_first_of_column() { return quarter() == 0; }
  QUANTKV_DEVICE static float max_over_tokens(float x) {
    x = fmaxf(x, shuffle_xor(x, 16));
    return fmaxf(x, shuffle_xor(x, 32));
  }
  QUANTKV_DEVICE static float sum_over_tokens(float x) {
    x += shuffle_xor(x, 16);
    return x + shuffle_xor(x, 32);
  }
  QUANTKV_DEVICE static float other_term(float x) { return shuffle_xor(x, kMatrixColumns / 2); }

  // ---- the query operand: a lane holds dims of its own column -----------------------------------------

  QUANTKV_DEVICE static int query_column(int tile) { return 16 * tile + index16(); }
  template <class Load>
  QUANTKV_DEVICE static void load_query_words(const Load& load4_dims, float (&x)[kQueryWords][4]) {
    if constexpr (kInt8K) {
#pragma unroll
      for (int w = 0; w < kQueryWords; w++) load4_dims(64 * (w >> 2) + 16 * quarter() + 4 * (w & 3), x[w]);
    } else {
#pragma unroll
      for (int block = 0; block < kHeadDim / kGroup; block++) {  // bytes' low nibbles, then their high nibbles
        float dims[2][4];
#pragma unroll
        for (int h = 0; h < 2; h++) load4_dims(32 * block + 8 * quarter() + 4 * h, dims[h]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          x[2 * block][i] = dims[i >> 1][2 * (i & 1)];
          x[2 * block + 1][i] = dims[i >> 1][2 * (i & 1) + 1];
        }
      }
    }
  }
  QUANTKV_DEVICE static uint32_t max_over_query(uint32_t x) {
#pragma unroll
    for (int mask = 16; mask < 64; mask <<= 1) {
      const uint32_t y = shuffle_xor(x, mask);
      x = x > y ? x : y;
    }
    return x;
  }
  QUANTKV_DEVICE static float of_column(const float (&x)[kColumnTiles], int slot) { return x[slot]; }

  struct Query {
    uint32_t codes[kColumnTiles][kQueryWords];
    float scale[kSlots][kQueryScales];
  };
  QUANTKV_DEVICE static void prepare(Query&) {}
  QUANTKV_DEVICE static void set_codes(Query& q, int tile, int word, const int (&c)[4]) {
    q.codes[tile][word] = pack_bytes(c[0], c[1], c[2], c[3]);
  }
  static constexpr float kQueryScaleFactor = kInt8K ? 1.0f : 0.5f;

  // ---- scores -----------------------------------------------------------------------------------------

  QUANTKV_DEVICE static void scores(const Tile<K>& k, const Query& q, float (&s)[kSlots][kTokens]) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
      const int row = side_token(index16()) + 4 * step;
      if constexpr (kInt8K) {
        int acc[kColumnTiles][4] = {};
#pragma unroll
        for (int chunk = 0; chunk < kHeadDim / 64; chunk++) {
          const Bytes16 atom = load16(k.atom(row, 64 * chunk + 16 * quarter()));
#pragma unroll
          for (int n = 0; n < kColumnTiles; n++) contract64(acc[n], atom.w, &q.codes[n][4 * chunk]);
        }
        float scales[4];
        load_scales<K>(k.scale(token(4 * step), 0), scales);
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
          for (int r = 0; r < 4; r++) s[n][4 * step + r] = static_cast<float>(acc[n][r]) * (scales[r] * q.scale[n][0]);
      } else {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
          for (int r = 0; r < 4; r++) s[n][4 * step + r] = 0;
#pragma unroll
        for (int block = 0; block < kHeadDim / kGroup; block++) {
          uint32_t integers[2];
          e2m1_integers(load4(k.atom(row, 16 * block) + 4 * quarter()), integers);
          float scales[4];
          load_scales<K>(k.scale(token(4 * step), block), scales);
#pragma unroll
          for (int n = 0; n < kColumnTiles; n++) {
            int acc[4] = {};
            contract32(acc, integers, &q.codes[n][2 * block]);
#pragma unroll
            for (int r = 0; r < 4; r++)
              s[n][4 * step + r] = fmaf(static_cast<float>(acc[r]), scales[r] * block_scale(q, n, block), s[n][4 * step + r]);
          }
        }
        if constexpr (kQueryScales == 1)
#pragma unroll
          for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
            for (int r = 0; r < 4; r++) s[n][4 * step + r] *= q.scale[n][0];
      }
    }
  }

  // ---- outputs ----------------------------------------------------------------------------------------

  struct Output {
    float v[kOutputTiles][kColumnTiles][4];
    QUANTKV_DEVICE float& at(int slot, int j) { return v[j >> 2][slot][j & 3]; }
  };

  QUANTKV_DEVICE static void accumulate_int8(const Tile<V>& v, const Query&, int,
                                             const uint32_t (&biased)[kSlots][kTokens / kProbabilityBlocks],
                                             const float (&scale)[kSlots], Output& o) {
    uint32_t p[kColumnTiles][4];
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int w = 0; w < 4; w++)
        p[n][w] = pack_bytes(biased[n][4 * w], biased[n][4 * w + 1], biased[n][4 * w + 2], biased[n][4 * w + 3]);
#pragma unroll
    for (int f = 0; f < kOutputTiles; f++) {
      const Bytes16 atom = load16(v.atom(16 * quarter(), 16 * f + index16()));
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++) {
        int acc[4] = {};
        contract64(acc, atom.w, p[n]);
#pragma unroll
        for (int r = 0; r < 4; r++) o.v[f][n][r] = fmaf(static_cast<float>(acc[r]), scale[n], o.v[f][n][r]);
      }
    }
  }

  template <bool kExact>
  QUANTKV_DEVICE static void accumulate_fp4(const Tile<V>& v, const float (&p)[kSlots][kTokens], Output& o) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
      uint32_t unscaled[kColumnTiles][2];
      if constexpr (!kExact)
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) unscaled[n][h] = pack_bf16(p[n][4 * step + 2 * h], p[n][4 * step + 2 * h + 1]);
#pragma unroll
      for (int block = 0; block < kHeadDim / kGroup; block++) {
        uint32_t codes = 0;  // a byte, two dims, of each of the quarter's four tokens
#pragma unroll
        for (int r = 0; r < 4; r++) codes |= uint32_t{v.atom(token(4 * step + r), 16 * block)[index16()]} << 8 * r;
        uint32_t even[2], odd[2];
        e2m1_bf16(codes, codes << 4, even);
        e2m1_bf16(codes >> 4, codes, odd);
        float scales[4] = {};
        uint32_t exponents[2] = {};
        if constexpr (kExact) {
          load_scales<V>(v.scale(token(4 * step), block), scales);
        } else {
          const uint32_t bytes = load4(v.scale(token(4 * step), block));
          exponents[0] = select_bytes(bytes, 0, 0x04010400u) << 7;
          exponents[1] = select_bytes(bytes, 0, 0x04030402u) << 7;
        }
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
          uint32_t b[2];
#pragma unroll
          for (int h = 0; h < 2; h++)
            if constexpr (kExact)
              b[h] = pack_bf16(scaled(p[n][4 * step + 2 * h], scales[2 * h]), scaled(p[n][4 * step + 2 * h + 1], scales[2 * h + 1]));
            else
              b[h] = unscaled[n][h] + exponents[h];
          multiply_bf16(o.v[2 * block][n], even, b);
          multiply_bf16(o.v[2 * block + 1][n], odd, b);
        }
      }
    }
  }

 private:
  // What a block of 32 dims multiplies its part of a score by; a scale of the whole row comes last instead.
  QUANTKV_DEVICE static float block_scale(const Query& q, int slot, int block) {
    return kQueryScales == 1 ? 1.0f : q.scale[slot][block];
  }

  // d += side * query, where side is K's tokens or V's dims.
  QUANTKV_DEVICE static void contract32(int (&d)[4], const uint32_t* side, const uint32_t* query) {
    if constexpr (kQueriesOnRows)
      matrix_s8(d, query, side);
    else
      matrix_s8(d, side, query);
  }
  QUANTKV_DEVICE static void contract64(int (&d)[4], const uint32_t* side, const uint32_t* query) {
#if QUANTKV_MAP == QUANTKV_MAP_MFMA_WIDE
    matrix_s8_wide(d, side, query);
#else
    contract32(d, side, query);
    contract32(d, side + 2, query + 2);
#endif
  }
  QUANTKV_DEVICE static void multiply_bf16(float (&d)[4], const uint32_t (&side)[2], const uint32_t (&query)[2]) {
    if constexpr (kQueriesOnRows)
      matrix_bf16(d, query, side);
    else
      matrix_bf16(d, side, query);
  }

  QUANTKV_DEVICE static uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return select_bytes(select_bytes(a, b, 0x00000400u), select_bytes(c, d, 0x00000400u), 0x05040100u);
  }

  QUANTKV_DEVICE static float scaled(float p, float scale) { return p > 0 ? p * 0x1p127f * scale : 0.0f; }

  // Eight codes -> twice their values as int8: the low nibbles' word, then the high nibbles'.
  QUANTKV_DEVICE static void e2m1_integers(uint32_t codes, uint32_t (&integers)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t x = codes >> 4 * h, magnitude = x & 0x07070707u, negative = (x >> 3 & 0x01010101u) * 255u;
      const uint32_t plus = select_bytes(0x03020100u, 0x0C080604u, magnitude);
      const uint32_t minus = select_bytes(0xFDFEFF00u, 0xF4F8FAFCu, magnitude);
      integers[h] = (plus & ~negative) | (minus & negative);
    }
  }

  // Four codes, in the low nibbles of `codes` with their signs at the bytes' tops in `signs` -> four bf16.
  QUANTKV_DEVICE static void e2m1_bf16(uint32_t codes, uint32_t signs, uint32_t (&halves)[2]) {
    const uint32_t magnitude = codes & 0x07070707u;
    const uint32_t high = select_bytes(0x3F3F3F00u, 0x40404040u, magnitude) | (signs & 0x80808080u);
    const uint32_t low = select_bytes(0xC0800000u, 0xC0804000u, magnitude);
    halves[0] = select_bytes(low, high, 0x05010400u);
    halves[1] = select_bytes(low, high, 0x07030602u);
  }
};

}  // namespace quantkv
