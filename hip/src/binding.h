// What the binding files share: tensors, streams and errors between tvm-ffi and the launchers.
#pragma once
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "quantkv/arch.h"

namespace quantkv {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// The stream that the caller works on; the host emulation has none.
inline Stream stream_of(const TensorView& tensor) {
  const DLDevice device = tensor.device();
  return static_cast<Stream>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

template <class T>
T* data_of(const TensorView& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}
template <class T>
T* data_of(const Optional<TensorView>& tensor) {
  return tensor.has_value() ? data_of<T>(*tensor) : nullptr;
}

// Raises what a launcher returned.
inline void check(const char* error) {
  if (error) TVM_FFI_THROW(RuntimeError) << "sglang_quantkv: kernel launch failed: " << error;
}

}  // namespace quantkv
