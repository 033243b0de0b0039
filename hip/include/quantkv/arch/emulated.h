// The host as a GPU: one fiber per thread, so that a wave's lanes really diverge between collectives.
//
// A collective (shuffle, vote, matrix step, barrier) runs when every lane of its wave or block has arrived; lanes
// that meet at different collectives, or an exit beside a collective, are errors. Lanes run in the order that
// QUANTKV_EMULATED_ORDER names (forward, reverse, random), blocks one after another. Shared memory holds a pattern
// when a block starts, and an asynchronous copy's target holds it until the copy is waited for.
#pragma once
#include <math.h>
#include <string.h>

#include "quantkv/arch/fibers.h"

#define QUANTKV_DEVICE inline
#define QUANTKV_HOST_DEVICE inline
#define QUANTKV_GLOBAL void  // without bounds: for explicit instantiation
#define QUANTKV_KERNEL(threads, blocks_per_unit) static void
#if QUANTKV_MAP == QUANTKV_MAP_MMA
#define QUANTKV_ASYNC_COPY 1
#endif

namespace quantkv {

constexpr int kWave = QUANTKV_MAP == QUANTKV_MAP_MMA ? 32 : 64;

struct dim3 {
  int x = 1, y = 1;
  dim3(int x_, int y_ = 1) : x(x_), y(y_) {}
};

QUANTKV_DEVICE int thread_index() { return emulation::machine().current; }
QUANTKV_DEVICE int block_size() { return emulation::machine().threads; }
QUANTKV_DEVICE int block_index() { return emulation::machine().block_x; }
QUANTKV_DEVICE int block_index_y() { return emulation::machine().block_y; }
QUANTKV_DEVICE uint8_t* shared_memory() { return emulation::machine().shared.data; }

// Nothing to do once everyone is there.
inline void meet(void* const*, int) {}
QUANTKV_DEVICE void sync_block() { emulation::collective(emulation::kBlock, meet, nullptr); }
QUANTKV_DEVICE void sync_wave() { emulation::collective(emulation::kWaveScope, meet, nullptr); }

template <class T>
struct Shuffle {
  T in, out;
  int from;
};
template <class T>
void run_shuffle(void* const* lanes, int count) {
  for (int l = 0; l < count; l++) {
    auto* s = static_cast<Shuffle<T>*>(lanes[l]);
    s->out = static_cast<const Shuffle<T>*>(lanes[s->from & (count - 1)])->in;
  }
}
template <class T>
QUANTKV_DEVICE T shuffle(T value, int lane) {
  Shuffle<T> s{value, value, lane};
  emulation::collective(emulation::kWaveScope, run_shuffle<T>, &s);
  return s.out;
}
template <class T>
QUANTKV_DEVICE T shuffle_xor(T value, int mask) {
  return shuffle(value, (thread_index() % kWave) ^ mask);
}
struct Vote {
  bool in;
  uint64_t out;
};
inline void run_ballot(void* const* lanes, int count) {
  uint64_t votes = 0;
  for (int l = 0; l < count; l++) votes |= uint64_t{static_cast<Vote*>(lanes[l])->in} << l;
  for (int l = 0; l < count; l++) static_cast<Vote*>(lanes[l])->out = votes;
}
// Bit l: lane l's predicate.
QUANTKV_DEVICE uint64_t ballot(bool predicate) {
  Vote v{predicate, 0};
  emulation::collective(emulation::kWaveScope, run_ballot, &v);
  return v.out;
}
QUANTKV_DEVICE bool any(bool predicate) { return ballot(predicate) != 0; }

QUANTKV_DEVICE int count_bits(uint32_t x) { return __builtin_popcount(x); }
// Kernels of a stream run one after another.
QUANTKV_DEVICE void allow_next_kernel() {}
QUANTKV_DEVICE void wait_for_previous_kernel() {}
QUANTKV_DEVICE float exp2_approx(float x) { return exp2f(x); }
QUANTKV_DEVICE float divide_approx(float a, float b) { return a / b; }
QUANTKV_DEVICE float divide(float a, float b) { return a / b; }
QUANTKV_DEVICE float square_root(float x) { return sqrtf(x); }
QUANTKV_DEVICE float round_even(float x) { return rintf(x); }
QUANTKV_DEVICE int trailing_zeros(uint32_t x) { return __builtin_ctz(x); }  // x != 0

inline uint32_t round_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7FFFu;
  return (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
}
QUANTKV_DEVICE uint32_t pack_bf16(float lo, float hi) { return round_to_bf16(lo) | round_to_bf16(hi) << 16; }

inline uint32_t round_to_fp16(float value) {
  const auto half = static_cast<_Float16>(value);
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
QUANTKV_DEVICE uint32_t pack_fp16(float lo, float hi) { return round_to_fp16(lo) | round_to_fp16(hi) << 16; }
QUANTKV_DEVICE float fp16_value(uint32_t half) {
  const auto bits = static_cast<uint16_t>(half);
  _Float16 value;
  memcpy(&value, &bits, 2);
  return value;
}


inline float half_to_float(uint32_t bits) {
  const uint32_t magnitude = (bits & 0x7FFFu) << 13, sign = (bits & 0x8000u) << 16;
  float value;
  memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;  // rebias; exact for subnormal numbers too
  uint32_t result;
  memcpy(&result, &value, 4);
  if ((bits & 0x7C00u) == 0x7C00u) result |= 0x7F800000u;
  result |= sign;
  memcpy(&value, &result, 4);
  return value;
}
inline uint32_t round_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u;
  if (magnitude >= 0x47800000u) return sign | 0x7C00u;  // 65536 and more
  if (magnitude < 0x38800000u) {                        // a multiple of 2^-24: let float addition round
    float small;
    memcpy(&small, &magnitude, 4);
    small += 0.5f;
    memcpy(&bits, &small, 4);
    return sign | (bits - 0x3F000000u);
  }
  return sign | ((magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1)) >> 13);
}
QUANTKV_DEVICE uint32_t pack_half(float lo, float hi) { return round_to_half(lo) | round_to_half(hi) << 16; }

}  // namespace quantkv

#include "quantkv/arch/emulated_matrix.h"

namespace quantkv {

using Stream = void*;

// nullptr, or what went wrong: a divergent collective, a deadlock, shared memory that does not fit.
template <class Params>
const char* launch(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, Stream, const Params& params) {
  reset_barriers();
  return emulation::run(grid.x, grid.y, threads, kWave, shared_bytes, [&] { kernel(params); });
}

template <class Params>
const char* launch_early(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, Stream stream, const Params& params) {
  return launch(kernel, grid, threads, shared_bytes, stream, params);
}

struct DeviceLimits {
  int units;
  int shared_bytes;
};
// Two units keep the number of partial results small; AMD's shared memory is the smallest of all.
inline DeviceLimits device_limits(int) { return {2, QUANTKV_MAP == QUANTKV_MAP_MMA ? 227 * 1024 : 64 * 1024}; }

}  // namespace quantkv
