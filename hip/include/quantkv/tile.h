// The 64 tokens that attention takes in one step, inside a ring slot that holds whole head blocks.
#pragma once
#include "quantkv/formats.h"

namespace quantkv {

constexpr int kTileTokens = 64;

// A ring slot: one page of K or of V, or the two 32-token pages of a tile, one after another.
template <class Config>
struct RingSlot {
  static constexpr int kTokens = Config::kPageSize > kTileTokens ? Config::kPageSize : kTileTokens;
  static constexpr int kPages = kTokens / Config::kPageSize;
  static constexpr int kTiles = kTokens / kTileTokens;
  static constexpr int kPageBytes = Config::K::kBytes > Config::V::kBytes ? Config::K::kBytes : Config::V::kBytes;
  static constexpr int kBytes = kPages * kPageBytes;
};

// Addresses in shared memory; tokens count from the start of the tile.
template <class Block_>
struct Tile {
  using Block = Block_;
  const uint8_t* slot;
  int first;  // token of the slot at which the tile starts

  QUANTKV_DEVICE const uint8_t* atom(int token, int byte) const {
    const int t = first + token;
    return page(t) + Block::atom_offset(in_page(t), byte);
  }
  QUANTKV_DEVICE const uint8_t* scale(int token, int index) const {
    const int t = first + token;
    return page(t) + Block::scale_offset(in_page(t), index);
  }

 private:
  static constexpr bool kManyPages = Block::kPageSize < kTileTokens;
  QUANTKV_DEVICE const uint8_t* page(int t) const {
    return kManyPages ? slot + t / Block::kPageSize * Block::kBytes : slot;
  }
  QUANTKV_DEVICE static int in_page(int t) { return kManyPages ? t % Block::kPageSize : t; }
};

// float32 value of a scale in memory. An E8M0 byte of 255 becomes infinity, which marks the block as well as NaN.
template <class Block>
QUANTKV_DEVICE float load_scale(const uint8_t* p) {
  if constexpr (Block::kScaleBytes == 1)
    return as_float(uint32_t{*p} << 23);
  else
    return as_float(load4(p));
}
// Those of four consecutive tokens.
template <class Block>
QUANTKV_DEVICE void load_scales(const uint8_t* p, float (&scales)[4]) {
  if constexpr (Block::kScaleBytes == 1) {
    const uint32_t bytes = load4(p);
    for (int i = 0; i < 4; i++) scales[i] = as_float((bytes >> 8 * i & 255u) << 23);
  } else {
    const Bytes16 words = load16(p);
    for (int i = 0; i < 4; i++) scales[i] = as_float(words.w[i]);
  }
}

// Whether a 4-byte word of scales marks a non-finite row: an FP32 scale that is NaN or Inf, or an E8M0 byte of 255,
// the only one above 191 that is ever written.
template <class Block>
QUANTKV_DEVICE bool marks_non_finite(uint32_t word) {
  if constexpr (Block::kScaleBytes == 1)
    return (word & word << 1 & 0x80808080u) != 0;
  else
    return !is_finite(as_float(word));
}

}  // namespace quantkv
