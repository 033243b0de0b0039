// AMD gfx90a, gfx942, gfx950 and Hygon gfx936, by clang's own builtins: device code needs no ROCm header.
#pragma once
#ifndef QUANTKV_DEVICE_ONLY
#include <hip/hip_runtime.h>
#endif

#define QUANTKV_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define QUANTKV_HOST_DEVICE __attribute__((host, device)) inline __attribute__((always_inline))
#define QUANTKV_GLOBAL __attribute__((global)) void  // without bounds: for explicit instantiation
#define QUANTKV_KERNEL(threads, blocks_per_unit) \
  __attribute__((global)) void __attribute__((amdgpu_flat_work_group_size(1, threads)))

namespace quantkv {

constexpr int kWave = 64;

QUANTKV_DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
QUANTKV_DEVICE int block_size() { return __builtin_amdgcn_workgroup_size_x(); }
QUANTKV_DEVICE int block_index() { return __builtin_amdgcn_workgroup_id_x(); }
QUANTKV_DEVICE int block_index_y() { return __builtin_amdgcn_workgroup_id_y(); }
extern "C" __attribute__((device, shared, aligned(128))) uint8_t quantkv_shared[];
QUANTKV_DEVICE uint8_t* shared_memory() { return quantkv_shared; }

QUANTKV_DEVICE void sync_block() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// Lanes run in lockstep; what must be kept is the order of their memory operations.
QUANTKV_DEVICE void sync_wave() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
template <class T>
QUANTKV_DEVICE T shuffle(T value, int lane) {
  static_assert(sizeof(T) == 4);
  return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute(lane << 2, __builtin_bit_cast(int, value)));
}
template <class T>
QUANTKV_DEVICE T shuffle_xor(T value, int mask) {
  const int lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
  return shuffle(value, lane ^ mask);
}
QUANTKV_DEVICE bool any(bool predicate) { return __builtin_amdgcn_ballot_w64(predicate) != 0; }
// Bit l: lane l's predicate.
QUANTKV_DEVICE uint64_t ballot(bool predicate) { return __builtin_amdgcn_ballot_w64(predicate); }

#ifdef QUANTKV_DEVICE_ONLY  // elsewhere HIP's headers have them
QUANTKV_DEVICE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
QUANTKV_DEVICE float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
#endif
QUANTKV_DEVICE int count_bits(uint32_t x) { return __builtin_popcount(x); }
// Kernels of a stream run one after another.
QUANTKV_DEVICE void allow_next_kernel() {}
QUANTKV_DEVICE void wait_for_previous_kernel() {}
QUANTKV_DEVICE float exp2_approx(float x) { return __builtin_amdgcn_exp2f(x); }
QUANTKV_DEVICE float divide_approx(float a, float b) { return a * __builtin_amdgcn_rcpf(b); }
QUANTKV_DEVICE float divide(float a, float b) { return a / b; }
QUANTKV_DEVICE float square_root(float x) { return __builtin_sqrtf(x); }
QUANTKV_DEVICE float round_even(float x) { return __builtin_rintf(x); }
QUANTKV_DEVICE int trailing_zeros(uint32_t x) { return __builtin_ctz(x); }  // x != 0

// Low half: lo, high half: hi, both rounded to nearest even. gfx950 does it in one instruction.
QUANTKV_DEVICE uint32_t pack_bf16(float lo, float hi) {
  typedef __bf16 Pair __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(uint32_t, Pair{(__bf16)lo, (__bf16)hi});
}
QUANTKV_DEVICE uint32_t pack_fp16(float lo, float hi) {
  typedef _Float16 Pair __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(uint32_t, Pair{(_Float16)lo, (_Float16)hi});
}
QUANTKV_DEVICE float fp16_value(uint32_t half) {
  return __builtin_bit_cast(_Float16, static_cast<uint16_t>(half));
}


// ---- instructions of the MFMA and MMAC maps -------------------------------------------------------

// Byte i of the result is the byte that selector byte i names: 0..3 from lo, 4..7 from hi.
QUANTKV_DEVICE uint32_t select_bytes(uint32_t lo, uint32_t hi, uint32_t selector) {
  return __builtin_amdgcn_perm(hi, lo, selector);
}

typedef int Int4 __attribute__((ext_vector_type(4)));
typedef float Float4 __attribute__((ext_vector_type(4)));
typedef uint32_t Uint2 __attribute__((ext_vector_type(2)));
typedef uint32_t Uint4 __attribute__((ext_vector_type(4)));
typedef short Short4 __attribute__((ext_vector_type(4)));

// D += A * B over 32 bytes of contraction, 8 a lane: a and b hold them in order.
QUANTKV_DEVICE void matrix_s8(int (&d)[4], const uint32_t* a, const uint32_t* b) {
  Int4 c = {d[0], d[1], d[2], d[3]};
#if QUANTKV_MAP == QUANTKV_MAP_MMAC
  const Uint2 va = {a[0], a[1]}, vb = {b[0], b[1]};
  asm volatile("v_mmac_i32_16x16x32_i8 %0, %1, %2, %0" : "+v"(c) : "v"(va), "v"(vb));
#elif defined(__gfx90a__)
  // Its step contracts 16 bytes; any split of the 32 that A and B share gives the same sum.
  c = __builtin_amdgcn_mfma_i32_16x16x16i8(a[0], b[0], c, 0, 0, 0);
  c = __builtin_amdgcn_mfma_i32_16x16x16i8(a[1], b[1], c, 0, 0, 0);
#elif defined(__gfx942__) || defined(__gfx950__)
  c = __builtin_amdgcn_mfma_i32_16x16x32_i8(__builtin_bit_cast(long, Uint2{a[0], a[1]}),
                                            __builtin_bit_cast(long, Uint2{b[0], b[1]}), c, 0, 0, 0);
#elif defined(__HIP_DEVICE_COMPILE__)
#error "no int8 matrix instruction is known for this target: gfx90a, gfx942, gfx950 and gfx936 have one"
#endif
  d[0] = c[0], d[1] = c[1], d[2] = c[2], d[3] = c[3];
}
#if QUANTKV_MAP == QUANTKV_MAP_MFMA_WIDE
// The same over 64 bytes of contraction, 16 a lane.
QUANTKV_DEVICE void matrix_s8_wide(int (&d)[4], const uint32_t* a, const uint32_t* b) {
  Int4 c = {d[0], d[1], d[2], d[3]};
  const Int4 va = {(int)a[0], (int)a[1], (int)a[2], (int)a[3]}, vb = {(int)b[0], (int)b[1], (int)b[2], (int)b[3]};
  c = __builtin_amdgcn_mfma_i32_16x16x64_i8(va, vb, c, 0, 0, 0);
  d[0] = c[0], d[1] = c[1], d[2] = c[2], d[3] = c[3];
}
#endif
// D += A * B over 16 bf16 of contraction, 4 a lane.
QUANTKV_DEVICE void matrix_bf16(float (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[2]) {
  Float4 c = {d[0], d[1], d[2], d[3]};
#if QUANTKV_MAP == QUANTKV_MAP_MMAC
  const Uint2 va = {a[0], a[1]}, vb = {b[0], b[1]};
  asm volatile("v_mmac_f32_16x16x16_bf16 %0, %1, %2, %0" : "+v"(c) : "v"(va), "v"(vb));
#elif defined(__HIP_DEVICE_COMPILE__)
  c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Short4, Uint2{a[0], a[1]}),
                                                __builtin_bit_cast(Short4, Uint2{b[0], b[1]}), c, 0, 0, 0);
#endif
  d[0] = c[0], d[1] = c[1], d[2] = c[2], d[3] = c[3];
}

// ---- launch ---------------------------------------------------------------------------------------

#ifndef QUANTKV_DEVICE_ONLY
using Stream = hipStream_t;

// nullptr, or what went wrong.
template <class Params>
const char* launch(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, Stream stream, const Params& params) {
  void* arguments[] = {const_cast<Params*>(&params)};
  hipError_t e = hipLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(threads), arguments, shared_bytes, stream);
  return e == hipSuccess ? nullptr : hipGetErrorString(e);
}

template <class Params>
const char* launch_early(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, Stream stream, const Params& params) {
  return launch(kernel, grid, threads, shared_bytes, stream, params);
}

struct DeviceLimits {
  int units;         // compute units
  int shared_bytes;  // that one block may use
};
inline DeviceLimits device_limits(int device) {
  DeviceLimits limits;
  (void)hipDeviceGetAttribute(&limits.units, hipDeviceAttributeMultiprocessorCount, device);
  (void)hipDeviceGetAttribute(&limits.shared_bytes, hipDeviceAttributeMaxSharedMemoryPerBlock, device);
  return limits;
}
#endif

}  // namespace quantkv
