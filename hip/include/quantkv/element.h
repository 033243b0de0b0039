// The 16-bit floats that models compute in, two in a word.
#pragma once
#include "quantkv/arch.h"

namespace quantkv {

enum class Element { kBf16, kFp16 };

template <Element kElement>
QUANTKV_DEVICE void unpack(const Bytes16& packed, float (&x)[8]) {
  for (int i = 0; i < 4; i++) {
    const uint32_t pair = packed.w[i];
    if constexpr (kElement == Element::kBf16) {
      x[2 * i] = as_float(pair << 16);
      x[2 * i + 1] = as_float(pair & 0xFFFF0000u);
    } else {
      x[2 * i] = fp16_value(pair & 0xFFFFu);
      x[2 * i + 1] = fp16_value(pair >> 16);
    }
  }
}

// Rounds to nearest even.
template <Element kElement>
QUANTKV_DEVICE Bytes16 pack(const float (&x)[8]) {
  Bytes16 packed;
  for (int i = 0; i < 4; i++) {
    if constexpr (kElement == Element::kBf16)
      packed.w[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    else
      packed.w[i] = pack_fp16(x[2 * i], x[2 * i + 1]);
  }
  return packed;
}

// The same for one element, and for two, of a type that is known at launch.
QUANTKV_DEVICE float element_to_float(uint32_t bits, Element type) {
  return type == Element::kBf16 ? as_float(bits << 16) : fp16_value(bits & 0xFFFFu);
}
QUANTKV_DEVICE uint32_t pack_elements(float lo, float hi, Element type) {
  return type == Element::kBf16 ? pack_bf16(lo, hi) : pack_fp16(lo, hi);
}

}  // namespace quantkv
