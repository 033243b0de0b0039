// Fragments of NVIDIA's mma.sync: 32 lanes, m16n8k32 for int8 and m16n8k16 for bf16.
//
// Tokens (and dims) are on M, query columns on N: half the instructions of the other way round when few heads share a
// KV head, and per-token scales are one value per row. With g = lane / 4 and t = lane % 4 an accumulator of a lane
// belongs to rows g and g + 8 and to columns 2t and 2t + 1, in scores and in outputs alike, so a lane's softmax state
// serves both.
//
// Row g of a 16-token step is token 2g + flip(g) and row g + 8 its neighbour: one movmatrix then turns a lane's pair of
// probabilities into the operand of PV. flip is chosen so that ldmatrix reads K without bank conflicts.
#pragma once
#include "quantkv/tile.h"

namespace quantkv {

// kQueryScales: scales of a query row, 1 or one per 32 dims. kColumns: query columns of a wave's tile, a multiple of 8.
template <class Config, int kColumns_, int kQueryScales_>
struct Fragments {
  using K = typename Config::K;
  using V = typename Config::V;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kColumns = kColumns_;
  static constexpr int kQueryScales = kQueryScales_;
  static constexpr int kColumnTiles = kColumns / 8;
  static constexpr int kSlots = 2 * kColumnTiles;         // query columns of a lane
  static constexpr int kTokens = 8;                       // tokens of a tile that a lane holds, of each slot
  static constexpr int kDims = kHeadDim / 8;              // dims of the output that a lane holds, of each slot
  static constexpr int kProbabilityBlocks = 2;            // one integer step of PV contracts 32 tokens
  static constexpr int kMatrixColumns = 8;                // a residual column is half of this away from its column
  static constexpr int kQueryWords = kHeadDim / 16;       // of four dims each, per column tile
  static constexpr int kOutputTiles = kHeadDim / 16;
  static_assert(kColumns % 8 == 0);

  static constexpr bool kInt8K = K::kIsInt8, kInt8V = V::kIsInt8;
  // Probabilities times 2^kProbabilityExponent, so that an E8M0 byte is added to the exponent of a bf16 without
  // overflow; 4-bit codes enter the matrix unit as value * 2^-126.
  static constexpr int kProbabilityExponent = kInt8V ? 0 : -40;
  static constexpr int kOutputExponent = kInt8V ? 0 : kProbabilityExponent + 127 - 126;

  QUANTKV_DEVICE static int group() { return lane_index() >> 2; }
  QUANTKV_DEVICE static int member() { return lane_index() & 3; }
  QUANTKV_DEVICE static int flip(int row) { return kInt8K ? row & 1 : row >> 2; }
  // Token of row `row` (0..7) of the upper or lower half of a 16-token step.
  QUANTKV_DEVICE static int step_token(int row, int half) { return 2 * row + (flip(row) ^ half); }

  QUANTKV_DEVICE static int column(int slot) { return 8 * (slot >> 1) + 2 * member() + (slot & 1); }
  QUANTKV_DEVICE static int token(int i) { return 16 * (i >> 1) + step_token(group(), i & 1); }
  QUANTKV_DEVICE static int dim(int j) {
    return kInt8V ? 8 * j + group() : 32 * (j >> 2) + 4 * group() + (j & 3);
  }

  // One lane of those that share a lane's columns.
  QUANTKV_DEVICE static bool is_first_of_column() { return group() == 0; }
  // Over the lanes that share a lane's columns.
  QUANTKV_DEVICE static float max_over_tokens(float x) {
#pragma unroll
    for (int mask = 4; mask < 32; mask <<= 1) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
  }
  QUANTKV_DEVICE static float sum_over_tokens(float x) {
#pragma unroll
    for (int mask = 4; mask < 32; mask <<= 1) x += shuffle_xor(x, mask);
    return x;
  }
  // The same value's residual column, or of a residual column its main one.
  QUANTKV_DEVICE static float other_term(float x) { return shuffle_xor(x, kMatrixColumns / 2 / 2); }

  // ---- the query operand: lane g, t holds dims of column g --------------------------------------------

  QUANTKV_DEVICE static int query_column(int tile) { return 8 * tile + group(); }
  QUANTKV_DEVICE static int query_dim(int word) {
    return 32 * (word >> 1) + (kInt8K ? 16 * (word & 1) + 4 * member() : 8 * member() + 4 * (word & 1));
  }
  // Loads the four dims of a word, in the order of its bytes.
  template <class Load>
  QUANTKV_DEVICE static void load_query_words(const Load& load4_dims, float (&x)[kQueryWords][4]) {
#pragma unroll
    for (int w = 0; w < kQueryWords; w++) load4_dims(query_dim(w), x[w]);
  }
  QUANTKV_DEVICE static uint32_t max_over_query(uint32_t x) {
#pragma unroll
    for (int mask = 1; mask < 4; mask <<= 1) {
      const uint32_t y = shuffle_xor(x, mask);
      x = x > y ? x : y;
    }
    return x;
  }
  // What the lane that holds a slot's column in the query operand holds in `x`.
  QUANTKV_DEVICE static float of_column(const float (&x)[kColumnTiles], int slot) {
    return shuffle(x[slot >> 1], (2 * member() + (slot & 1)) * 4);
  }

  struct Query {
    uint32_t codes[kColumnTiles][kQueryWords];
    uint32_t negated[kInt8K ? 1 : kColumnTiles][kInt8K ? 1 : kQueryWords];
    float scale[kSlots][kQueryScales];
    int start[4];    // accumulators begin with it
    uint32_t table;  // of e2m1_integers
  };
  // Sets what does not depend on the query. Uniform constants would be copied to vector registers at every use.
  QUANTKV_DEVICE static void prepare(Query& q) {
#pragma unroll
    for (int c = 0; c < 4; c++) q.start[c] = static_cast<int>(in_vector_register(kMagic));
    q.table = in_vector_register(0x03020100u);
  }
  QUANTKV_DEVICE static void set_codes(Query& q, int tile, int word, const int (&c)[4]) {
    q.codes[tile][word] = pack_bytes(c[0], c[1], c[2], c[3]);
    if constexpr (!kInt8K) q.negated[tile][word] = pack_bytes(-c[0], -c[1], -c[2], -c[3]);
  }
  // Codes of the e2m1 table are twice the values.
  static constexpr float kQueryScaleFactor = kInt8K ? 1.0f : 0.5f;

  // ---- scores: s[slot][i] = (q . k) * scales, for the tile's tokens ------------------------------------

  QUANTKV_DEVICE static void scores(const Tile<K>& k, const Query& q, float (&s)[kSlots][kTokens]) {
    const int lane = lane_index(), half = lane >> 3 & 1, chunk = lane >> 4;
#pragma unroll
    for (int step = 0; step < 4; step++) {
      const int row = 16 * step + step_token(lane & 7, half);  // of the matrix row whose address this lane gives
      if constexpr (kInt8K) {
        int acc[kColumnTiles][4];
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
          for (int c = 0; c < 4; c++) acc[n][c] = q.start[c];
#pragma unroll
        for (int kk = 0; kk < kHeadDim / 32; kk++) {
          uint32_t a[4];
          ldmatrix(a, k.atom(row, 32 * kk + 16 * chunk));
#pragma unroll
          for (int n = 0; n < kColumnTiles; n++) mma_s8(acc[n], a, {q.codes[n][2 * kk], q.codes[n][2 * kk + 1]}, acc[n]);
        }
        const float scales[2] = {load_scale<K>(k.scale(token(2 * step), 0)), load_scale<K>(k.scale(token(2 * step + 1), 0))};
#pragma unroll
        for (int slot = 0; slot < kSlots; slot++)
#pragma unroll
          for (int h = 0; h < 2; h++)
            s[slot][2 * step + h] = to_float(acc[slot >> 1][2 * h + (slot & 1)]) * (scales[h] * q.scale[slot][0]);
      } else {
#pragma unroll
        for (int slot = 0; slot < kSlots; slot++) s[slot][2 * step] = s[slot][2 * step + 1] = 0;
#pragma unroll
        for (int pair = 0; pair < kHeadDim / 64; pair++) {
          uint32_t words[4];  // upper, lower half of the tokens in the first block, then in the second
          ldmatrix(words, k.atom(row, 16 * (2 * pair + chunk)));
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int block = 2 * pair + e;
            uint32_t positive[4], negative[4];
            e2m1_integers(words[2 * e], words[2 * e + 1], q.table, positive, negative);
            const float scales[2] = {load_scale<K>(k.scale(token(2 * step), block)),
                                     load_scale<K>(k.scale(token(2 * step + 1), block))};
#pragma unroll
            for (int n = 0; n < kColumnTiles; n++) {
              int acc[4];
              mma_s8(acc, positive, {q.codes[n][2 * block], q.codes[n][2 * block + 1]}, q.start);
              mma_s8(acc, negative, {q.negated[n][2 * block], q.negated[n][2 * block + 1]}, acc);
#pragma unroll
              for (int c = 0; c < 4; c++) {
                const int slot = 2 * n + (c & 1), h = c >> 1;
                s[slot][2 * step + h] = fmaf(to_float(acc[c]), scales[h] * block_scale(q, slot, block), s[slot][2 * step + h]);
              }
            }
          }
        }
        if constexpr (kQueryScales == 1)
#pragma unroll
          for (int slot = 0; slot < kSlots; slot++) {
            s[slot][2 * step] *= q.scale[slot][0];
            s[slot][2 * step + 1] *= q.scale[slot][0];
          }
      }
    }
  }

  // ---- outputs -----------------------------------------------------------------------------------------

  struct Output {
    float v[kOutputTiles][kColumnTiles][4];
    QUANTKV_DEVICE float& at(int slot, int j) { return v[j >> 1][slot >> 1][2 * (j & 1) + (slot & 1)]; }
  };

  // o += codes * scale over probability block `block` of the tile; the low byte of biased[slot][i] is the code.
  QUANTKV_DEVICE static void accumulate_int8(const Tile<V>& v, const Query& q, int block,
                                             const uint32_t (&biased)[kSlots][kTokens / kProbabilityBlocks],
                                             const float (&scale)[kSlots], Output& o) {
    const int lane = lane_index();
    const uint32_t order = flip(group()) ? 0x1504u : 0x5140u;  // the even token first
    uint32_t p[kColumnTiles][2];
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int u = 0; u < 2; u++) {
        const uint32_t upper = prmt(biased[2 * n][2 * u], biased[2 * n + 1][2 * u], 0x0040u);
        const uint32_t lower = prmt(biased[2 * n][2 * u + 1], biased[2 * n + 1][2 * u + 1], 0x0040u);
        p[n][u] = movmatrix(prmt(upper, lower, order));
      }
#pragma unroll
    for (int f = 0; f < kOutputTiles; f++) {
      uint32_t a[4];
      ldmatrix(a, v.atom(32 * block + 16 * (lane >> 4), 16 * f + (lane & 15)));
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++) {
        int acc[4];
        mma_s8(acc, a, p[n], q.start);
#pragma unroll
        for (int c = 0; c < 4; c++) o.v[f][n][c] = fmaf(to_float(acc[c]), scale[2 * n + (c & 1)], o.v[f][n][c]);
      }
    }
  }

  // o += p * v over the tile, v in 4-bit codes; p carries 2^kProbabilityExponent. kExact multiplies each probability
  // by its scale in float32 and leaves zeros alone, whatever bytes their tokens hold.
  template <bool kExact>
  QUANTKV_DEVICE static void accumulate_fp4(const Tile<V>& v, const float (&p)[kSlots][kTokens], Output& o) {
    const int lane = lane_index(), half = lane >> 3 & 1, chunk = lane >> 4;
    const bool late = kInt8K ? false : member() >= 2;
    // Of four consecutive tokens' scale bytes, those of a lane's upper and of its lower tokens, each in a half word.
    const uint32_t upper = kInt8K ? 0x4340u : late ? 0x4341u : 0x4240u;
    const uint32_t lower = kInt8K ? 0x4241u : late ? 0x4240u : 0x4341u;
#pragma unroll
    for (int step = 0; step < 4; step++) {
      const int row = 16 * step + step_token(lane & 7, half);
      uint32_t unscaled[kColumnTiles][2];
      if constexpr (!kExact)
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
          for (int h = 0; h < 2; h++)
            unscaled[n][h] = movmatrix(pack_bf16(p[2 * n][2 * step + h], p[2 * n + 1][2 * step + h]));
#pragma unroll
      for (int pair = 0; pair < kHeadDim / 64; pair++) {
        uint32_t words[4];
        ldmatrix_transposed(words, v.atom(row, 16 * (2 * pair + chunk)));
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int block = 2 * pair + e;
          uint32_t x[4], y[4];  // of the upper and of the lower tokens: four dims' pairs
          e2m1_pairs(words[2 * e], x);
          e2m1_pairs(words[2 * e + 1], y);
          uint32_t bytes = 0;
          float scales[2] = {};
          if constexpr (kExact)
#pragma unroll
            for (int h = 0; h < 2; h++) scales[h] = load_scale<V>(v.scale(token(2 * step + h), block));
          else
            bytes = load4(v.scale(16 * step + 4 * member(), block));
#pragma unroll
          for (int n = 0; n < kColumnTiles; n++) {
            uint32_t b[2];
            if constexpr (kExact) {
#pragma unroll
              for (int h = 0; h < 2; h++)
                b[h] = movmatrix(pack_bf16(scaled(p[2 * n][2 * step + h], scales[h]), scaled(p[2 * n + 1][2 * step + h], scales[h])));
            } else {
              b[0] = prmt(bytes, 0, upper) * 128u + unscaled[n][0];
              b[1] = prmt(bytes, 0, lower) * 128u + unscaled[n][1];
            }
            mma_bf16(o.v[2 * block][n], {x[0], x[1], y[0], y[1]}, b);
            mma_bf16(o.v[2 * block + 1][n], {x[2], x[3], y[2], y[3]}, b);
          }
        }
      }
    }
  }

 private:
  // What a block of 32 dims multiplies its part of a score by; a scale of the whole row comes last instead.
  QUANTKV_DEVICE static float block_scale(const Query& q, int slot, int block) {
    return kQueryScales == 1 ? 1.0f : q.scale[slot][block];
  }

  // Integers of up to 22 bits become floats by being added to this float's bits: exact, and no conversion.
  static constexpr int kMagic = 0x4B400000;
  QUANTKV_DEVICE static float to_float(int biased) { return as_float(biased) - 12582912.0f; }

  QUANTKV_DEVICE static uint32_t pack_bytes(int a, int b, int c, int d) {
    return prmt(prmt(a, b, 0x0040u), prmt(c, d, 0x0040u), 0x5410u);
  }

  // p times 2^127 is within range, and so is its product with any scale that the store writes.
  QUANTKV_DEVICE static float scaled(float p, float scale) { return p > 0 ? p * 0x1p127f * scale : 0.0f; }

  // Eight codes of each of two tokens -> the A operand of twice their values, positive ones and magnitudes of negative
  // ones apart. prmt is the table: its selector's sign bit replicates the sign of a table entry, which is 0 here.
  QUANTKV_DEVICE static void e2m1_integers(uint32_t upper, uint32_t lower, uint32_t lo, uint32_t (&positive)[4],
                                           uint32_t (&negative)[4]) {
    const uint32_t hi = 0x0C080604u;
    const uint32_t u = upper ^ 0x88888888u, w = lower ^ 0x88888888u;
    positive[0] = prmt(lo, hi, upper), positive[2] = prmt(lo, hi, upper >> 16);
    positive[1] = prmt(lo, hi, lower), positive[3] = prmt(lo, hi, lower >> 16);
    negative[0] = prmt(lo, hi, u), negative[2] = prmt(lo, hi, u >> 16);
    negative[1] = prmt(lo, hi, w), negative[3] = prmt(lo, hi, w >> 16);
  }

  // Half words of four codes of two tokens -> four bf16 pairs, each code's bits at the places of a bf16's sign, low
  // exponent and first mantissa bits: its value times 2^-126.
  QUANTKV_DEVICE static void e2m1_pairs(uint32_t words, uint32_t (&pairs)[4]) {
    const uint32_t right = words >> 6, left = words << 6;
    pairs[3] = (words & 0x80008000u) | (right & 0x01C001C0u);
    pairs[2] = ((words & 0x08000800u) | (right & 0x001C001Cu)) << 4;
    pairs[1] = ((words & 0x00700070u) | (left & 0x20002000u)) << 2;
    pairs[0] = ((words & 0x00070007u) | (left & 0x02000200u)) << 6;
  }
};

}  // namespace quantkv
