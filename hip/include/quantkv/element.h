// The 16-bit floats that activations come in: bfloat16 or float16, chosen per launch.
#pragma once
#include "quantkv/arch.h"

namespace quantkv {

enum class Element : int { kBf16, kFp16 };

// float32 value of the element in the low 16 bits.
QUANTKV_DEVICE float element_to_float(uint32_t bits, Element type) {
  return type == Element::kBf16 ? as_float(bits << 16) : half_to_float(bits & 0xFFFFu);
}
// Two elements of one word, rounded to nearest even: lo in the low half.
QUANTKV_DEVICE uint32_t pack_elements(float lo, float hi, Element type) {
  return type == Element::kBf16 ? pack_bf16(lo, hi) : pack_half(lo, hi);
}

}  // namespace quantkv
