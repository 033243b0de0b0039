// NVIDIA, sm_80 and up.
#pragma once
#include <cuda_runtime.h>

#define QUANTKV_DEVICE __device__ __forceinline__
#define QUANTKV_HOST_DEVICE __host__ __device__ __forceinline__
#define QUANTKV_GLOBAL __global__ void  // without bounds: for explicit instantiation
#define QUANTKV_KERNEL(threads, blocks_per_unit) __global__ void __launch_bounds__(threads, blocks_per_unit)
#define QUANTKV_ASYNC_COPY 1  // tiles arrive in shared memory by themselves

namespace quantkv {

constexpr int kWave = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

QUANTKV_DEVICE int thread_index() { return threadIdx.x; }
QUANTKV_DEVICE int block_size() { return blockDim.x; }
QUANTKV_DEVICE int block_index() { return blockIdx.x; }
QUANTKV_DEVICE int block_index_y() { return blockIdx.y; }
QUANTKV_DEVICE uint8_t* shared_memory() {
  extern __shared__ __align__(128) uint8_t quantkv_shared[];
  return quantkv_shared;
}

QUANTKV_DEVICE void sync_block() { __syncthreads(); }
QUANTKV_DEVICE void sync_wave() { __syncwarp(); }
template <class T>
QUANTKV_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(kAllLanes, value, lane);
}
template <class T>
QUANTKV_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}
QUANTKV_DEVICE bool any(bool predicate) { return __any_sync(kAllLanes, predicate); }
// Bit l: lane l's predicate.
QUANTKV_DEVICE uint64_t ballot(bool predicate) { return __ballot_sync(kAllLanes, predicate); }

QUANTKV_DEVICE int count_bits(uint32_t x) { return __popc(x); }

// A kernel that was launched with `launch_early` may start once every block of the one before it has allowed it, or has
// ended; it must wait before it reads what that one wrote.
QUANTKV_DEVICE void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
QUANTKV_DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

QUANTKV_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
QUANTKV_DEVICE float divide_approx(float a, float b) { return __fdividef(a, b); }
QUANTKV_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
QUANTKV_DEVICE float square_root(float x) { return __fsqrt_rn(x); }
QUANTKV_DEVICE float round_even(float x) { return rintf(x); }
QUANTKV_DEVICE int trailing_zeros(uint32_t x) { return __ffs(x) - 1; }  // x != 0

// Low half: lo, high half: hi, both rounded to nearest even.
QUANTKV_DEVICE uint32_t pack_bf16(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
QUANTKV_DEVICE uint32_t pack_fp16(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
QUANTKV_DEVICE float fp16_value(uint32_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(half)));
  return value;
}


// ---- instructions of the mma map ------------------------------------------------------------------

QUANTKV_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
// A value that the compiler must keep in a vector register: uniform ones are copied at every use.
QUANTKV_DEVICE uint32_t in_vector_register(uint32_t value) { return __shfl_sync(kAllLanes, value, threadIdx.x % kWave); }

QUANTKV_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

QUANTKV_DEVICE void ldmatrix(uint32_t (&r)[4], const uint8_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
QUANTKV_DEVICE void ldmatrix_transposed(uint32_t (&r)[4], const uint8_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
QUANTKV_DEVICE uint32_t movmatrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// d = a * b + c; d may be c.
QUANTKV_DEVICE void mma_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
QUANTKV_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- asynchronous copies into shared memory: begin, pieces, end, called by every thread of a scope -----------

// Counts the arrivals of one tile. sm_90 has the copy engine count bytes; before, each thread's copies arrive.
using Barrier = uint64_t;

QUANTKV_DEVICE void barrier_init(Barrier* barrier, int threads) {
#if __CUDA_ARCH__ >= 900
  threads = 1;
#endif
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(threads) : "memory");
}
// After the last barrier_init, before anything waits.
QUANTKV_DEVICE void barrier_init_done() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
QUANTKV_DEVICE void barrier_wait(Barrier* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
#define QUANTKV_TEST_WAIT "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#else
#define QUANTKV_TEST_WAIT "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
#endif
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n" QUANTKV_TEST_WAIT
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

QUANTKV_DEVICE void copy_begin(Barrier* barrier, int bytes, int rank) {
#if __CUDA_ARCH__ >= 900
  if (rank == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}
// Pages are read once per step: they should not push anything else out of the L2 cache.
QUANTKV_DEVICE void copy_piece(Barrier* barrier, uint8_t* to, const uint8_t* from, int bytes, int rank, int threads) {
#if __CUDA_ARCH__ >= 900
  if (rank == 0) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
  }
#else
  const uint32_t target = shared_address(to);
#pragma unroll 1
  for (int i = rank * 16; i < bytes; i += threads * 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + i), "l"(from + i) : "memory");
#endif
}
QUANTKV_DEVICE void copy_end(Barrier* barrier) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// ---- launch ---------------------------------------------------------------------------------------

using Stream = cudaStream_t;

// nullptr, or what went wrong.
template <class Params>
const char* launch(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, Stream stream, const Params& params,
                   bool early = false) {
  cudaError_t e = cudaSuccess;
  if (shared_bytes > 48 * 1024)
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = early;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  if (e == cudaSuccess) e = cudaLaunchKernelEx(&config, kernel, params);
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}
// As `launch`, and the kernel may start before the one before it has ended.
template <class Params>
const char* launch_early(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes, Stream stream, const Params& params) {
  return launch(kernel, grid, threads, shared_bytes, stream, params, true);
}

struct DeviceLimits {
  int units;         // streaming multiprocessors
  int shared_bytes;  // that one block may use
};
inline DeviceLimits device_limits(int device) {
  DeviceLimits limits;
  cudaDeviceGetAttribute(&limits.units, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return limits;
}

}  // namespace quantkv
