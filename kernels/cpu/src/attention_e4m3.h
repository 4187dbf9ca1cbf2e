// FP8 keys and values (e4m3: sign, 4 bits of exponent, 3 of mantissa): numbers to codes and back.
// A code moved up by 7 bits is a float16 of 1/256 its number, and the scales make up for that. So subnormal codes never
// become subnormal float32 numbers, which some CPUs multiply slowly.
#pragma once

#include "simd.h"

namespace gm {

struct e4m3 {
    uint8_t bits;
};

constexpr float E4M3_MAX = 448;
constexpr float E4M3_UNIT = 256;  // a code's number is so many times what load_row makes of it

typedef uint8_t vc __attribute__((vector_size(W)));  // W codes

// Rounds to the nearest code, ties to even. What is larger than the largest code becomes it; a NaN stays one.
GM_INLINE vc to_e4m3(vf x) {
    const vf size = (vf)((vu)x & 0x7fffffff);
    const vf capped = size < E4M3_MAX ? size : broadcast(E4M3_MAX);
    const vu bits = (vu)capped;
    const vu normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);  // exponents are 120 apart
    // Next to 2^14 float32 numbers are 2^-9 apart, as subnormal codes are.
    const vf magic = broadcast(16384.0f);
    const vu subnormal = (vu)(capped + magic) - (vu)magic;
    const vu code = capped < 0x1p-6f ? subnormal : normal;
    const vu sign = ((vu)x >> 24) & 0x80;
    return __builtin_convertvector(sign | (x == x ? code : 0x7f - vu{}), vc);
}

// Rounds a head's numbers over scale to codes; dim is a multiple of 16.
template <class X>
inline void round_head(const X* x, e4m3* codes, int64_t dim, float scale) {
    const vf divisor = broadcast(scale);
    for (int64_t d = 0; d < dim; d += W) {
        const vc rounded = to_e4m3(load(x + d) / divisor);
        std::memcpy(codes + d, &rounded, sizeof rounded);
    }
}

// 16 neighbouring codes as numbers over E4M3_UNIT.
GM_INLINE void load_row(const e4m3* p, vf* row) {
    const __m256i signs_twice = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    const __m256i finite = _mm256_and_si256(signs_twice, _mm256_set1_epi16((short)0xbfff));
    const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_add_epi16(finite, finite), _mm256_set1_epi16(0x7f00));
    const __m256i halves = _mm256_or_si256(finite, is_nan);
#if defined(__AVX512F__)
    row[0] = (vf)_mm512_cvtph_ps(halves);
#else
    const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#if GRISTMILL_LANES == 8
    row[0] = (vf)low;
    row[1] = (vf)high;
#else
    std::memcpy((char*)row, &low, sizeof low);
    std::memcpy((char*)row + sizeof low, &high, sizeof high);
#endif
#endif
}

}  // namespace gm
