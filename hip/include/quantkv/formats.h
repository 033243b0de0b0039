// The cache formats byte by byte: what sglang_quantkv/formats.py says, for kernels. A test holds the two together.
#pragma once
#include "quantkv/arch.h"

namespace quantkv {

enum class Format { kInt8, kMxfp4, kFp4G32 };
enum class Operand { kK, kV };

constexpr int kAtomBytes = 16;
constexpr int kGroup = 32;  // elements along D that share a scale in the 4-bit formats
constexpr int kHeadBlockAlignment = 128;
constexpr int kInt8Max = 127;
constexpr float kE2m1Max = 6.0f;

constexpr int kE8m0Bias = 127;
constexpr int kE8m0Nan = 255;
constexpr int kE8m0ZeroBlock = 127;
constexpr int kE8m0Min = kE8m0Bias - 66;
constexpr int kE8m0Max = kE8m0Bias + 40;
// A block's scale is the smallest power of two s with amax <= 7.5 s; 7.5 = 1.875 * 2^2, and 1.875 has this mantissa.
constexpr uint32_t kE8m0LimitMantissa = 0x700000u;
constexpr int kE8m0LimitExponent = 2;

constexpr uint32_t kNanBits = 0x7FC00000u;  // the scale of a row that holds NaN or Inf

// Row of the int8 K tile that holds a token of the page.
QUANTKV_HOST_DEVICE constexpr int int8_k_row(int token) {
  return (token & ~15) + 8 * (token >> 1 & 1) + 2 * (token >> 2 & 3) + (token & 1);
}

// Bytes of one page of one KV head of K (or of V): the payload tile, then the scales.
template <Format kFormat_, Operand kOperand_, int kHeadDim_, int kPageSize_>
struct HeadBlock {
  static constexpr Format kFormat = kFormat_;
  static constexpr Operand kOperand = kOperand_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kPageSize = kPageSize_;
  static constexpr bool kIsInt8 = kFormat == Format::kInt8;
  static constexpr bool kIsTokenAtom = kIsInt8 && kOperand == Operand::kV;
  static constexpr int kCodeBytes = kIsInt8 ? kHeadDim : kHeadDim / 2;         // of one row
  static constexpr int kScales = kIsInt8 ? 1 : kHeadDim / kGroup;              // of one row
  static constexpr int kScaleBytes = kFormat == Format::kMxfp4 ? 1 : 4;        // of one scale
  static constexpr int kRowBytes = kCodeBytes + kScales * kScaleBytes;
  static constexpr int kPayloadBytes = kPageSize * kCodeBytes;
  static constexpr int kUsedBytes = kPageSize * kRowBytes;
  static constexpr int kBytes = (kUsedBytes + kHeadBlockAlignment - 1) / kHeadBlockAlignment * kHeadBlockAlignment;

  static_assert(kPageSize == 32 || kPageSize == 64 || kPageSize == 128, "pages hold 32, 64 or 128 tokens");
  static_assert(kHeadDim % kGroup == 0 && kHeadDim <= 256, "rows are whole blocks of 32 elements, up to 256");

  // Offset of the atom that holds byte `byte` of the codes of `token`; for token atoms, of that dim's 16 tokens.
  QUANTKV_HOST_DEVICE static constexpr int atom_offset(int token, int byte) {
    return kIsTokenAtom ? ((token >> 4) * kHeadDim + byte) * kAtomBytes
                        : ((byte >> 4) * kPageSize + (kIsInt8 ? int8_k_row(token) : token)) * kAtomBytes;
  }
  QUANTKV_HOST_DEVICE static constexpr int code_offset(int token, int byte) {
    return atom_offset(token, byte) + (kIsTokenAtom ? token & 15 : byte & 15);
  }
  QUANTKV_HOST_DEVICE static constexpr int scale_offset(int token, int index) {
    return kPayloadBytes + (index * kPageSize + token) * kScaleBytes;
  }
};

static_assert(HeadBlock<Format::kInt8, Operand::kK, 128, 64>::kBytes == 64 * (128 + 4));
static_assert(HeadBlock<Format::kMxfp4, Operand::kV, 128, 64>::kBytes == 64 * (64 + 4));
static_assert(HeadBlock<Format::kFp4G32, Operand::kK, 128, 64>::kBytes == 64 * (64 + 16));
static_assert(HeadBlock<Format::kMxfp4, Operand::kK, 64, 32>::kBytes == 1152, "1088 bytes, padded to 128");

template <Format kK, Format kV, int kHeadDim_, int kPageSize_>
struct CacheConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kPageSize = kPageSize_;
  using K = HeadBlock<kK, Operand::kK, kHeadDim, kPageSize>;
  using V = HeadBlock<kV, Operand::kV, kHeadDim, kPageSize>;
};

}  // namespace quantkv
