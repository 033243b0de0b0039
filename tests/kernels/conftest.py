"""A small hip/ with one phase, so that the build system is tested apart from the project's kernels."""

import textwrap

import pytest

CONFIG = """
    #pragma once
    namespace quantkv {
    enum class Format { kInt8, kMxfp4, kFp4G32 };
    template <Format kK, Format kV, int kHeadDim_, int kPageSize_>
    struct CacheConfig {
      static constexpr int kHeadDim = kHeadDim_;
      static constexpr int kPageSize = kPageSize_;
    };
    }
"""
BINDING = """
    #include <tvm/ffi/function.h>
    #include "quantkv/config.h"
    #define QUANTKV_BIND_STORE(...) \\
      int slots(int pages) { return pages * __VA_ARGS__::kPageSize; } \\
      TVM_FFI_DLL_EXPORT_TYPED_FUNC(slots, slots)
"""
KERNEL = """
    #include "quantkv/config.h"
    #if defined(__HIP__)
    #define QUANTKV_THREAD __builtin_amdgcn_workitem_id_x()
    #define __global__ __attribute__((global))
    #define __shared__ __attribute__((shared))
    #else
    #define QUANTKV_THREAD threadIdx.x
    #endif
    namespace quantkv {
    template <class Config>
    __global__ void copy_row(const int* from, int* to) {
      __shared__ volatile int row[Config::kHeadDim];
      row[QUANTKV_THREAD] = from[QUANTKV_THREAD];
      to[QUANTKV_THREAD] = row[QUANTKV_THREAD];
    }
    }
    #define QUANTKV_INSTANTIATE_STORE(...) template __global__ void quantkv::copy_row<__VA_ARGS__>(const int*, int*);
"""


@pytest.fixture
def hip_root(tmp_path):
    """The folder; modules of this test go to a cache of its own."""
    root = tmp_path / "hip"
    for name, text in (
        ("include/quantkv/config.h", CONFIG),
        ("src/store_binding.h", BINDING),
        ("src/store.h", KERNEL),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    return root


@pytest.fixture(autouse=True)
def kernel_cache(tmp_path, monkeypatch, request):
    if "hip_root" in request.fixturenames:
        monkeypatch.setenv("SGLANG_QUANTKV_CACHE", str(tmp_path / "cache"))
