// Rows of single slots between the pages and packed buffers: how tokens move inside a pool, and out of one.
#pragma once
#include "quantkv/formats.h"

namespace quantkv {

constexpr int kSlotsThreads = 256;

// A packed row holds the codes of one token and head in order, then its scales in order.
struct SlotsParams {
  uint8_t* records;      // [pages, heads, Block::kBytes]
  uint8_t* rows;         // [tokens, heads, Block::kRowBytes]
  const int64_t* slots;  // [tokens]; a token with a negative slot is left out
  int64_t tokens;
  int heads;
};

enum class Direction { kGather, kScatter };  // pages to rows, rows to pages

// The 16 bytes of codes from `first` on. Bytes of a token atom's row lie in as many atoms.
template <class Block>
QUANTKV_DEVICE void load_codes(uint8_t (&codes)[16], const uint8_t* block, int token, int first) {
  if constexpr (Block::kIsTokenAtom)
    for (int b = 0; b < 16; b++) codes[b] = block[Block::code_offset(token, first + b)];
  else
    __builtin_memcpy(codes, __builtin_assume_aligned(block + Block::code_offset(token, first), 16), 16);
}
template <class Block>
QUANTKV_DEVICE void store_codes(const uint8_t (&codes)[16], uint8_t* block, int token, int first) {
  if constexpr (Block::kIsTokenAtom)
    for (int b = 0; b < 16; b++) block[Block::code_offset(token, first + b)] = codes[b];
  else
    __builtin_memcpy(__builtin_assume_aligned(block + Block::code_offset(token, first), 16), codes, 16);
}

// A thread moves 16 bytes of codes, or all scales, of one token and head.
template <class Block, Direction kDirection>
QUANTKV_KERNEL(kSlotsThreads, 1)
slots_kernel(SlotsParams p) {
  constexpr bool kGathers = kDirection == Direction::kGather;
  constexpr int kPieces = Block::kCodeBytes / kAtomBytes;
  constexpr int kPowerOfTwo = Block::kRowBytes & -Block::kRowBytes;
  constexpr int kRowAlignment = kPowerOfTwo < 16 ? kPowerOfTwo : 16;
  const int64_t index = static_cast<int64_t>(block_index()) * kSlotsThreads + thread_index();
  const int64_t i = index / (kPieces + 1);
  if (i >= p.tokens || p.slots[i] < 0) return;
  const int64_t slot = p.slots[i];
  const int piece = index % (kPieces + 1), token = slot % Block::kPageSize, head = block_index_y();
  uint8_t* block = p.records + (slot / Block::kPageSize * p.heads + head) * Block::kBytes;
  uint8_t* row = p.rows + (i * p.heads + head) * Block::kRowBytes;
  if (piece < kPieces) {
    const int first = piece * kAtomBytes;
    auto* packed = static_cast<uint8_t*>(__builtin_assume_aligned(row + first, kRowAlignment));
    alignas(16) uint8_t codes[16];
    if constexpr (kGathers) {
      load_codes<Block>(codes, block, token, first);
      __builtin_memcpy(packed, codes, 16);
    } else {
      __builtin_memcpy(codes, packed, 16);
      store_codes<Block>(codes, block, token, first);
    }
    return;
  }
  for (int s = 0; s < Block::kScales; s++) {
    auto* paged = __builtin_assume_aligned(block + Block::scale_offset(token, s), Block::kScaleBytes);
    auto* packed = __builtin_assume_aligned(row + Block::kCodeBytes + s * Block::kScaleBytes, Block::kScaleBytes);
    __builtin_memcpy(kGathers ? packed : paged, kGathers ? paged : packed, Block::kScaleBytes);
  }
}

#ifndef QUANTKV_DEVICE_ONLY
// nullptr, or what went wrong.
template <class Block, Direction kDirection>
const char* copy_slots(const SlotsParams& p, Stream stream) {
  if (p.tokens == 0) return nullptr;
  const int64_t threads = p.tokens * (Block::kCodeBytes / kAtomBytes + 1);
  const dim3 grid(static_cast<int>((threads + kSlotsThreads - 1) / kSlotsThreads), p.heads);
  return launch(slots_kernel<Block, kDirection>, grid, kSlotsThreads, 0, stream, p);
}
#endif

}  // namespace quantkv

// The kernels of a configuration, for a compile without host code.
#define QUANTKV_INSTANTIATE_SLOTS_KERNEL(Block, kDirection) \
  template QUANTKV_KERNEL(quantkv::kSlotsThreads, 1)        \
      quantkv::slots_kernel<Block, quantkv::Direction::kDirection>(quantkv::SlotsParams);
#define QUANTKV_INSTANTIATE_SLOTS(...)                            \
  using QuantkvSlotsConfig = __VA_ARGS__;                         \
  QUANTKV_INSTANTIATE_SLOTS_KERNEL(QuantkvSlotsConfig::K, kGather)  \
  QUANTKV_INSTANTIATE_SLOTS_KERNEL(QuantkvSlotsConfig::K, kScatter) \
  QUANTKV_INSTANTIATE_SLOTS_KERNEL(QuantkvSlotsConfig::V, kGather)  \
  QUANTKV_INSTANTIATE_SLOTS_KERNEL(QuantkvSlotsConfig::V, kScatter)
