// A ring of shared-memory slots through which tiles arrive, private to a wave or shared by a block.
//
// A source hands out tiles in order: `bool next(TileCopy&)`, called by every thread of the scope. The kernel calls
// `fill` once, then for every tile `wait`, which returns the tile's slot, and `release` once all reading is done.
// With asynchronous copies, several tiles are under way. Without (AMD), one is, in registers: `wait` writes it to
// shared memory and starts to load the next.
#pragma once
#include "quantkv/arch.h"

namespace quantkv {

struct WaveScope {
  static constexpr int kMaxThreads = kWave;
  QUANTKV_DEVICE static int rank() { return lane_index(); }
  QUANTKV_DEVICE static int size() { return kWave; }
  QUANTKV_DEVICE static void sync() { sync_wave(); }
};
template <int kThreads>
struct BlockScope {
  static constexpr int kMaxThreads = kThreads;
  QUANTKV_DEVICE static int rank() { return thread_index(); }
  QUANTKV_DEVICE static int size() { return kThreads; }
  QUANTKV_DEVICE static void sync() { sync_block(); }
};

// Where a tile's head blocks lie: one page of 64 or 128 tokens, or two of 32, each of which may be left out.
struct TileCopy {
  const uint8_t* page[2];
  int page_bytes;
};

#ifdef QUANTKV_ASYNC_COPY

// Bytes of shared memory of a ring; its slots come first, on 128-byte boundaries.
template <class Slot>
QUANTKV_HOST_DEVICE constexpr int ring_bytes(int stages) {
  return (stages * (Slot::kBytes + static_cast<int>(sizeof(Barrier))) + 127) / 128 * 128;
}
constexpr int kMinStages = 2, kMaxStages = 4;

template <class Scope, class Slot>
class TileRing {
  static constexpr int kSlotBytes = Slot::kBytes, kPages = Slot::kPages;

 public:
  QUANTKV_DEVICE TileRing(uint8_t* memory, int stages)
      : memory_(memory), barriers_(reinterpret_cast<Barrier*>(memory + stages * kSlotBytes)), stages_(stages) {
    if (Scope::rank() == 0)
      for (int i = 0; i < stages; i++) barrier_init(&barriers_[i], Scope::size());
    barrier_init_done();
    Scope::sync();
  }
  template <class Source>
  QUANTKV_DEVICE void fill(Source& source) {
    for (int i = 0; i < stages_; i++) copy(i, source);
  }
  template <class Source>
  QUANTKV_DEVICE const uint8_t* wait(Source&) {
    const int slot = waiting_;
    barrier_wait(&barriers_[slot], parity_);
    if (++waiting_ == stages_) {
      waiting_ = 0;
      parity_ ^= 1;
    }
    return memory_ + slot * kSlotBytes;
  }
  template <class Source>
  QUANTKV_DEVICE void release(Source& source) {
    Scope::sync();
    copy(released_, source);
    if (++released_ == stages_) released_ = 0;
  }

 private:
  template <class Source>
  QUANTKV_DEVICE void copy(int slot, Source& source) {
    TileCopy tile;
    if (!source.next(tile)) return;
    int bytes = 0;
#pragma unroll
    for (int i = 0; i < kPages; i++) bytes += is_present(tile, i) ? tile.page_bytes : 0;
    copy_begin(&barriers_[slot], bytes, Scope::rank());
#pragma unroll
    for (int i = 0; i < kPages; i++)
      if (is_present(tile, i))
        copy_piece(&barriers_[slot], memory_ + slot * kSlotBytes + i * tile.page_bytes, tile.page[i], tile.page_bytes,
                   Scope::rank(), Scope::size());
    copy_end(&barriers_[slot]);
  }

  // A tile of one page always has it.
  QUANTKV_DEVICE static bool is_present(const TileCopy& tile, int i) { return kPages == 1 || tile.page[i]; }

  uint8_t* memory_;
  Barrier* barriers_;
  int stages_, waiting_ = 0, released_ = 0, parity_ = 0;
};

#else

constexpr int kMinStages = 1, kMaxStages = 1;
// A slot that holds two tiles of K is still being read when its V arrives: then there are two.
template <class Slot>
QUANTKV_HOST_DEVICE constexpr int ring_bytes(int) {
  return Slot::kTiles * Slot::kBytes;
}

template <class Scope, class Slot>
class TileRing {
  static constexpr int kSlotBytes = Slot::kBytes, kPages = Slot::kPages;

 public:
  QUANTKV_DEVICE TileRing(uint8_t* memory, int) : memory_(memory) {}
  template <class Source>
  QUANTKV_DEVICE void fill(Source& source) {
    load(source);
  }
  template <class Source>
  QUANTKV_DEVICE const uint8_t* wait(Source& source) {
    uint8_t* slot = memory_ + (Slot::kTiles > 1 ? (waits_++ & 1) * kSlotBytes : 0);
    Scope::sync();
    for (int i = 0; i < kPages; i++)
      if (tile_.page[i])
#pragma unroll
        for (int piece = 0; piece < kPieces; piece++) {
          const int offset = (piece * Scope::size() + Scope::rank()) * 16;
          if (offset < tile_.page_bytes) store16(slot + i * tile_.page_bytes + offset, loaded_[i][piece]);
        }
    Scope::sync();
    load(source);
    return slot;
  }
  template <class Source>
  QUANTKV_DEVICE void release(Source&) {}

 private:
  static constexpr int kPieces = ceil_div(kSlotBytes / kPages, Scope::kMaxThreads * 16);
  template <class Source>
  QUANTKV_DEVICE void load(Source& source) {
    if (!source.next(tile_)) return;
    for (int i = 0; i < kPages; i++)
      if (tile_.page[i])
#pragma unroll
        for (int piece = 0; piece < kPieces; piece++) {
          const int offset = (piece * Scope::size() + Scope::rank()) * 16;
          if (offset < tile_.page_bytes) loaded_[i][piece] = load16(tile_.page[i] + offset);
        }
  }

  uint8_t* memory_;
  int waits_ = 0;
  TileCopy tile_;
  Bytes16 loaded_[kPages][kPieces];
};

#endif

}  // namespace quantkv
