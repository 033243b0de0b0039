// What differs between compilers and machines: every #if about them is in this file and in arch/.
//
// One of three backends is included: arch/cuda.h, arch/hip.h (AMD and Hygon) or arch/emulated.h (the host, one
// fiber per GPU thread). Each defines the same names in namespace quantkv:
//   qualifiers    QUANTKV_DEVICE, QUANTKV_HOST_DEVICE, QUANTKV_GLOBAL, QUANTKV_KERNEL(threads, blocks_per_unit)
//   identity      thread_index, block_index, block_index_y, block_size, shared_memory, kWave
//   collectives   sync_block, sync_wave, shuffle, shuffle_xor, any, ballot
//   arithmetic    exp2_approx, divide_approx, and IEEE divide, square_root, round_even; count_bits, trailing_zeros
//   conversions   pack_bf16, pack_fp16, fp16_value
//   copies        where QUANTKV_ASYNC_COPY is defined: Barrier, barrier_*, copy_begin, copy_piece, copy_end
//   launch        Stream, DeviceLimits, launch, launch_early; allow_next_kernel, wait_for_previous_kernel
// and the matrix unit's own instructions, which only the fragment header of its map calls.
#pragma once
#include <stdint.h>

// Register maps of the matrix units; see fragments_mma.h and fragments_wave64.h.
#define QUANTKV_MAP_MMA 1        // NVIDIA mma.sync, 32 lanes
#define QUANTKV_MAP_MFMA 2       // AMD gfx90a, gfx942: int8 steps of 32, 64 lanes
#define QUANTKV_MAP_MFMA_WIDE 3  // AMD gfx950: int8 steps of 64
#define QUANTKV_MAP_MMAC 4       // Hygon gfx936: A and B as MFMA, another accumulator map

#if defined(__CUDACC__)
#define QUANTKV_MAP QUANTKV_MAP_MMA
#include "quantkv/arch/cuda.h"
#elif defined(__HIP__)
// The host pass does not know the architecture: the build names its map.
#ifndef QUANTKV_MAP
#error "HIP builds need -DQUANTKV_MAP=QUANTKV_MAP_..."
#endif
#include "quantkv/arch/hip.h"
#else
#ifndef QUANTKV_EMULATED_MAP
#error "the host emulation needs -DQUANTKV_EMULATED_MAP=QUANTKV_MAP_..."
#endif
#define QUANTKV_MAP QUANTKV_EMULATED_MAP
#include "quantkv/arch/emulated.h"
#endif

namespace quantkv {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kInfinity = __builtin_huge_valf();

// Words of memory of any type.
struct __attribute__((may_alias, aligned(16))) Bytes16 {
  uint32_t w[4];
};
struct __attribute__((may_alias, aligned(8))) Bytes8 {
  uint32_t w[2];
};
typedef uint32_t __attribute__((may_alias)) Bytes4;

QUANTKV_DEVICE Bytes16 load16(const void* p) { return *static_cast<const Bytes16*>(p); }
QUANTKV_DEVICE Bytes8 load8(const void* p) { return *static_cast<const Bytes8*>(p); }
QUANTKV_DEVICE uint32_t load4(const void* p) { return *static_cast<const Bytes4*>(p); }
QUANTKV_DEVICE void store16(void* p, const Bytes16& v) { *static_cast<Bytes16*>(p) = v; }
QUANTKV_DEVICE void store8(void* p, const Bytes8& v) { *static_cast<Bytes8*>(p) = v; }
QUANTKV_DEVICE void store4(void* p, uint32_t v) { *static_cast<Bytes4*>(p) = v; }

template <class To, class From>
QUANTKV_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
QUANTKV_DEVICE float as_float(uint32_t bits) { return bit_cast<float>(bits); }
QUANTKV_DEVICE uint32_t as_bits(float value) { return bit_cast<uint32_t>(value); }
QUANTKV_DEVICE bool is_finite(float x) { return (as_bits(x) & 0x7F800000u) != 0x7F800000u; }

QUANTKV_DEVICE int lane_index() { return thread_index() % kWave; }
QUANTKV_DEVICE int wave_index() { return thread_index() / kWave; }

QUANTKV_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
QUANTKV_DEVICE int min_of(int a, int b) { return a < b ? a : b; }
QUANTKV_DEVICE int max_of(int a, int b) { return a > b ? a : b; }

}  // namespace quantkv
