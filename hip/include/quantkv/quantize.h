// Codes and scales of rows, by the exact rules of reference.quantize.
//
// A row of D values lies in D / 8 consecutive lanes of one wave, 8 consecutive values in each. What shares a scale is
// a row (int8) or 32 values, hence 4 lanes (the 4-bit formats): its lanes all get the scale.
#pragma once
#include "quantkv/formats.h"

namespace quantkv {

template <Format kFormat>
struct Codes {
  static constexpr int kWords = kFormat == Format::kInt8 ? 2 : 1;
  uint32_t words[kWords];  // of this lane's 8 values, in order
  uint32_t scale;          // a float's bits, or an E8M0 byte
};

// The largest magnitude in `lanes` neighbouring lanes, as bits: ordered like the values, and above every finite one
// if a value is NaN or infinite.
QUANTKV_DEVICE uint32_t largest_magnitude(const float (&x)[8], int lanes) {
  uint32_t largest = 0;
  for (int i = 0; i < 8; i++) {
    const uint32_t magnitude = as_bits(x[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  for (int mask = 1; mask < lanes; mask *= 2) {
    const uint32_t other = shuffle_xor(largest, mask);
    largest = other > largest ? other : largest;
  }
  return largest;
}

// E8M0 byte of a finite largest magnitude: the smallest power of two s with amax <= 7.5 s, clamped.
QUANTKV_DEVICE uint32_t e8m0_of(uint32_t amax) {
  if (amax == 0) return kE8m0ZeroBlock;
  const int exponent = (amax >> 23) - kE8m0LimitExponent + ((amax & 0x7FFFFFu) > kE8m0LimitMantissa);
  return min_of(max_of(exponent, kE8m0Min), kE8m0Max);
}

// The code of a scaled value without its sign. Magnitudes step by 1/2 up to 2, by 1 up to 4, by 2 up to 6; on each
// stretch one of the three terms is the code, and there it is the least. Ties go to even codes, as rounding does.
QUANTKV_DEVICE uint32_t e2m1_magnitude(float y) {
  const float fine = round_even(2.0f * y), middle = round_even(y) + 2.0f, coarse = round_even(0.5f * y) + 4.0f;
  const float code = fine < middle ? fine : middle < coarse ? middle : coarse;
  return static_cast<uint32_t>(code < 7.0f ? code : 7.0f);
}

// Divides many values by one scale, and rounds as IEEE division does: the product with the rounded reciprocal,
// corrected by its exact remainder (Markstein). Where the remainder would leave the range of floats, both sides are
// scaled first, which is exact. Quotients below 1/4 may come out as anything below 1/4, signs included.
struct Divisor {
  float shift, scale, reciprocal;
};
QUANTKV_DEVICE Divisor divisor_of(float scale, uint32_t amax) {
  const auto power = [](int exponent) { return as_float((127 + exponent) << 23); };
  const float shift = amax < as_bits(power(-80)) ? power(100) : amax > as_bits(power(100)) ? power(-100) : 1.0f;
  return {shift, scale * shift, divide(1.0f, scale * shift)};
}
QUANTKV_DEVICE float divide_by(float x, const Divisor& d) {
  const float quotient = x * d.shift * d.reciprocal;
  return fmaf(fmaf(-quotient, d.scale, x * d.shift), d.reciprocal, quotient);
}

template <Format kFormat, int kHeadDim>
QUANTKV_DEVICE Codes<kFormat> quantize(const float (&x)[8]) {
  constexpr bool kIsInt8 = kFormat == Format::kInt8, kIsMx = kFormat == Format::kMxfp4;
  static_assert(kHeadDim % kGroup == 0 && kHeadDim / 8 <= kWave);
  const uint32_t amax = largest_magnitude(x, kIsInt8 ? kHeadDim / 8 : kGroup / 8);
  const bool finite = amax < 0x7F800000u;
  Codes<kFormat> result{};
  Divisor divisor{};
  bool has_codes = finite && amax > 0;
  if constexpr (kIsMx) {
    result.scale = finite ? e8m0_of(amax) : kE8m0Nan;
    divisor.reciprocal = as_float((2 * kE8m0Bias - e8m0_of(amax)) << 23);  // of a power of two: exact
  } else {
    const float scale = divide(as_float(amax), kIsInt8 ? static_cast<float>(kInt8Max) : kE2m1Max);
    result.scale = finite ? as_bits(scale) : kNanBits;
    has_codes = has_codes && scale > 0.0f;
    divisor = divisor_of(scale, amax);
  }
  if (!has_codes) return result;
  for (int i = 0; i < 8; i++) {
    const float y = kIsMx ? x[i] * divisor.reciprocal : divide_by(x[i], divisor);
    if constexpr (kIsInt8) {
      const int code = min_of(max_of(static_cast<int>(round_even(y)), -kInt8Max), kInt8Max);
      result.words[i / 4] |= (code & 0xFFu) << i % 4 * 8;
    } else {
      const uint32_t magnitude = e2m1_magnitude(as_float(as_bits(y) & 0x7FFFFFFFu)), sign = as_bits(x[i]) >> 31;
      result.words[0] |= (magnitude | sign << 3) << i * 4;
    }
  }
  return result;
}

}  // namespace quantkv
