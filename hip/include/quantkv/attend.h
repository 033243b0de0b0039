// One wave's attention: quantized queries, scores, online softmax and outputs, tile by tile.
//
// int8 K and 4-bit K are both multiplied by int8 queries; int8 V by int8 probabilities, 4-bit V by bf16 ones. With
// kTwoTerm half of the query columns hold the rounding residuals of the other half, times 254: queries (and
// probabilities) then carry 16 bits at the cost of columns that were idle.
#pragma once
#include "quantkv/element.h"
#include "quantkv/fragments.h"
#include "quantkv/ring.h"

namespace quantkv {

// Above every rounding of a score and below every score: what a maximum is before the first token.
constexpr float kLowest = -3.0e38f;

template <class Config, int kColumns, bool kTwoTerm>
struct WaveAttention {
  using K = typename Config::K;
  using V = typename Config::V;
  // Against 4-bit keys a query has a scale per 32 dims as they do, unless its residuals make one exact enough.
  using F = Fragments<Config, kColumns, K::kIsInt8 || kTwoTerm ? 1 : Config::kHeadDim / kGroup>;
  static constexpr int kSlots = F::kSlots, kTokens = F::kTokens, kHeadDim = Config::kHeadDim;
  static constexpr int kRows = kTwoTerm ? kColumns / 2 : kColumns;  // query rows of a wave
  static constexpr float kResidual = 254.0f;
  static_assert(!kTwoTerm || kColumns == F::kMatrixColumns, "both terms lie in one matrix tile");

  typename F::Query query;
  typename F::Output output;
  float maximum[kSlots], sum[kSlots];  // sum: of this lane's tokens

  QUANTKV_DEVICE static int row_of(int column) { return kTwoTerm ? column % kRows : column; }
  QUANTKV_DEVICE static bool is_residual(int column) { return kTwoTerm && column >= kRows; }
  QUANTKV_DEVICE static int row(int slot) { return row_of(F::column(slot)); }

  // Begins with no token seen. row_pointer(r) is query row r, 16-bit elements `[D]`, or nullptr where there is none;
  // scale_log2 multiplies scores, log2(e) included.
  template <class RowPointer>
  QUANTKV_DEVICE void start(const RowPointer& row_pointer, Element type, float scale_log2) {
    constexpr int kScales = F::kQueryScales, kWordsPerScale = F::kQueryWords / kScales;
    float scale[kScales][F::kColumnTiles];
    F::prepare(query);
#pragma unroll
    for (int tile = 0; tile < F::kColumnTiles; tile++) {
      const int column = F::query_column(tile);
      const uint16_t* q = row_pointer(row_of(column));
      float x[F::kQueryWords][4];
      F::load_query_words(
          [&](int dim, float(&dims)[4]) {
            Bytes8 elements = {};
            if (q) elements = load8(q + dim);
#pragma unroll
            for (int i = 0; i < 4; i++) dims[i] = element_to_float(elements.w[i >> 1] >> 16 * (i & 1), type);
          },
          x);
#pragma unroll
      for (int g = 0; g < kScales; g++) {
        uint32_t largest = 0;  // as bits, in which NaN and Inf are the largest
#pragma unroll
        for (int w = g * kWordsPerScale; w < (g + 1) * kWordsPerScale; w++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const uint32_t bits = as_bits(x[w][i]) & 0x7FFFFFFFu;
            largest = bits > largest ? bits : largest;
          }
        const float amax = as_float(F::max_over_query(largest));
        const float inverse = amax > 1e-36f && is_finite(amax) ? divide_approx(kInt8Max, amax) : 0.0f;
        scale[g][tile] = is_finite(amax) ? amax * (scale_log2 * F::kQueryScaleFactor / kInt8Max) : as_float(kNanBits);
        if (is_residual(column)) scale[g][tile] *= 1.0f / kResidual;
#pragma unroll
        for (int w = g * kWordsPerScale; w < (g + 1) * kWordsPerScale; w++) {
          int codes[4];
#pragma unroll
          for (int i = 0; i < 4; i++) codes[i] = code(x[w][i], inverse, is_residual(column));
          F::set_codes(query, tile, w, codes);
        }
      }
    }
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
#pragma unroll
      for (int g = 0; g < kScales; g++) query.scale[slot][g] = F::of_column(scale[g], slot);
      maximum[slot] = kLowest;
      sum[slot] = 0;
#pragma unroll
      for (int j = 0; j < F::kDims; j++) output.at(slot, j) = 0;
    }
  }

  // Scores of a tile and its probabilities relative to the running maximum, times 2^kProbabilityExponent. `position`
  // is the tile's first token; if `masked`, a token that mask.visible(slot, position) denies has probability 0.
  template <class Mask>
  QUANTKV_DEVICE void scores(const Tile<K>& k, int position, bool masked, const Mask& mask, float softcap_log2,
                             float (&p)[kSlots][kTokens]) {
    F::scores(k, query, p);
    float largest[kSlots];
    bool moved = false;
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
      if constexpr (kTwoTerm)
#pragma unroll
        for (int i = 0; i < kTokens; i++) p[slot][i] += F::other_term(p[slot][i]);
      if (softcap_log2 > 0) {
        const float factor = divide_approx(2.0f * kLog2e, softcap_log2);
#pragma unroll
        for (int i = 0; i < kTokens; i++) p[slot][i] = softcap_log2 * tanh_of_half(p[slot][i] * factor);
      }
      if (masked)
#pragma unroll
        for (int i = 0; i < kTokens; i++)
          if (!mask.visible(slot, position + F::token(i))) p[slot][i] = -kInfinity;
      float m = p[slot][0];
#pragma unroll
      for (int i = 1; i < kTokens; i++) m = fmaxf(m, p[slot][i]);
      largest[slot] = fmaxf(F::max_over_tokens(m), maximum[slot]);
      moved |= largest[slot] > maximum[slot];
    }
    if (any(moved)) {
#pragma unroll
      for (int slot = 0; slot < kSlots; slot++) {
        const float factor = exp2_approx(maximum[slot] - largest[slot]);
        maximum[slot] = largest[slot];
        sum[slot] *= factor;
#pragma unroll
        for (int j = 0; j < F::kDims; j++) output.at(slot, j) *= factor;
      }
    }
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
      const float reference = maximum[slot] - F::kProbabilityExponent;
#pragma unroll
      for (int i = 0; i < kTokens; i++) {
        p[slot][i] = exp2_approx(p[slot][i] - reference);
        sum[slot] += p[slot][i];
      }
    }
  }

  // output += p * v.
  template <class Mask>
  QUANTKV_DEVICE void values(const Tile<V>& v, int position, bool masked, const Mask& mask,
                             const float (&p)[kSlots][kTokens]) {
    mark_non_finite(v, position, masked, mask);
    if constexpr (V::kFormat == Format::kMxfp4) {
      if (masked)
        F::template accumulate_fp4<true>(v, p, output);
      else
        F::template accumulate_fp4<false>(v, p, output);
    } else if constexpr (!F::kInt8V) {
      F::template accumulate_fp4<true>(v, p, output);
    } else {
      constexpr int kBlock = kTokens / F::kProbabilityBlocks;
#pragma unroll
      for (int block = 0; block < F::kProbabilityBlocks; block++) {
        float scales[kBlock], factor[kSlots];
        uint32_t biased[kSlots][kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; i++) scales[i] = load_scale<V>(v.scale(F::token(kBlock * block + i), 0));
#pragma unroll
        for (int slot = 0; slot < kSlots; slot++) {
          float weighted[kBlock], amax = 1e-36f;
#pragma unroll
          for (int i = 0; i < kBlock; i++) weighted[i] = p[slot][kBlock * block + i] * scales[i];
          if (masked)  // the scale of a token that nobody sees may be anything
#pragma unroll
            for (int i = 0; i < kBlock; i++) weighted[i] = p[slot][kBlock * block + i] > 0 ? weighted[i] : 0.0f;
#pragma unroll
          for (int i = 0; i < kBlock; i++) amax = fmaxf(amax, weighted[i]);
          amax = F::max_over_tokens(amax);
          const float inverse = divide_approx(kInt8Max, amax);
          const bool residual = is_residual(F::column(slot));
          factor[slot] = amax * (residual ? 1.0f / (kInt8Max * kResidual) : 1.0f / kInt8Max);
#pragma unroll
          for (int i = 0; i < kBlock; i++) biased[slot][i] = biased_code(weighted[i], inverse, residual);
        }
        F::accumulate_int8(v, query, block, biased, factor, output);
      }
    }
  }

  // After the last tile: `sum` becomes the row's, both terms' outputs are added, powers of two taken out again. The
  // maximum, the sum and the outputs are then those of flash attention's merge: o = output / sum.
  QUANTKV_DEVICE void finish() {
#pragma unroll
    for (int slot = 0; slot < kSlots; slot++) {
      sum[slot] = F::sum_over_tokens(sum[slot]) * power_of_two(-F::kProbabilityExponent);
#pragma unroll
      for (int j = 0; j < F::kDims; j++) {
        float& o = output.at(slot, j);
        if constexpr (kTwoTerm && F::kInt8V) o += F::other_term(o);
        if constexpr (!F::kInt8V) o *= power_of_two(-F::kOutputExponent);
      }
    }
  }

 private:
  static constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: a float added to it has its rounded integer in its low bits

  QUANTKV_HOST_DEVICE static constexpr float power_of_two(int e) {
    float x = 1;
    for (; e > 0; e--) x *= 2;
    for (; e < 0; e++) x /= 2;
    return x;
  }
  // Bits whose low byte is the int8 code of x * inverse, or of what that code leaves over.
  QUANTKV_DEVICE static uint32_t biased_code(float x, float inverse, bool residual) {
    float biased = fmaf(x, inverse, kMagic);
    if constexpr (kTwoTerm) {
      const float rest = fmaf(x, inverse, kMagic - biased);
      biased = residual ? fmaf(rest, kResidual, kMagic) : biased;
    }
    return as_bits(biased);
  }
  QUANTKV_DEVICE static int code(float x, float inverse, bool residual) {
    return static_cast<int8_t>(biased_code(x, inverse, residual) & 0xFFu);
  }
  // tanh(x * ln(2) / 2): with x = s * 2 * log2(e) / cap that is tanh(s / cap).
  QUANTKV_DEVICE static float tanh_of_half(float x) { return 1.0f - divide_approx(2.0f, 1.0f + exp2_approx(x)); }

  // A V row that is not finite must show in the rows that see it: their sums become NaN.
  template <class Mask>
  QUANTKV_DEVICE void mark_non_finite(const Tile<V>& v, int position, bool masked, const Mask& mask) {
    constexpr int kTokensPerWord = 4 / V::kScaleBytes, kWordsPerScale = kTileTokens / kTokensPerWord;
    bool found = false;
#pragma unroll
    for (int first = 0; first < V::kScales * kWordsPerScale; first += kWave) {
      const int w = first + lane_index();
      if (V::kScales * kWordsPerScale % kWave == 0 || w < V::kScales * kWordsPerScale)
        found |= marks_non_finite<V>(load4(v.scale(w % kWordsPerScale * kTokensPerWord, w / kWordsPerScale)));
    }
    if (!any(found)) return;
    // Rare: small code matters here, not speed.
#pragma unroll 1
    for (int i = 0; i < kTokens * V::kScales; i++) {
      const int token = F::token(i % kTokens);
      if (is_finite(load_scale<V>(v.scale(token, i / kTokens)))) continue;
#pragma unroll
      for (int slot = 0; slot < kSlots; slot++)
        if (!masked || mask.visible(slot, position + token)) sum[slot] = as_float(kNanBits);
    }
  }
};

// Positions of the tokens that every row of a wave sees: a tile inside needs no mask.
struct SeenByAll {
  int from, to;
  QUANTKV_DEVICE bool holds(int position) const { return position >= from && position + kTileTokens <= to; }
};

// Attends to the next ring slot, whose first token stands at `position`.
template <class Config, class Attention, class Ring, class Source, class Mask>
QUANTKV_DEVICE void attend_slot(Attention& attention, Ring& ring, Source& source, int position, SeenByAll seen,
                                const Mask& mask, float softcap_log2) {
  constexpr int kTiles = RingSlot<Config>::kTiles;
  const uint8_t* k = ring.wait(source);
  const uint8_t* v = nullptr;
#pragma unroll 1
  for (int tile = 0; tile < kTiles; tile++) {
    const int token = position + tile * kTileTokens;
    const bool masked = !seen.holds(token);
    float probabilities[Attention::kSlots][Attention::kTokens];
    attention.scores(Tile<typename Config::K>{k, tile * kTileTokens}, token, masked, mask, softcap_log2, probabilities);
    if (tile == kTiles - 1) ring.release(source);
    if (tile == 0) v = ring.wait(source);
    attention.values(Tile<typename Config::V>{v, tile * kTileTokens}, token, masked, mask, probabilities);
  }
  ring.release(source);
}

}  // namespace quantkv
