// Weights in codes (kernels/quantized.py), made into numbers in registers: int4, int8 and fp8 (e4m3).
// A panel is NR output columns, group after group: the group's codes, its NR scales, its NR offsets if there are any.
// Codes lie in steps of one or two cache lines. Every step_size of k gives the same numbers whatever reads them.
#pragma once

#include "gemm_tile.h"

namespace gm {

constexpr __mmask16 ALL = 0xffff;  // masked, since GCC 12 warns of what the plain conversions are made of

// W bytes with sign as 32-bit numbers.
GM_INLINE vi load_bytes(const char* p) {
#if GRISTMILL_LANES == 16 && !defined(GRISTMILL_EMULATE)
    return (vi)_mm512_maskz_cvtepi8_epi32(ALL, _mm_loadu_si128((const __m128i*)p));
#else
    __m256i parts[W / 8];
    for (int i = 0; i < W / 8; i++) parts[i] = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * i)));
    vi x;
    std::memcpy(&x, parts, sizeof x);
    return x;
#endif
}

// W float16 numbers.
GM_INLINE vf load_halves(const char* p) {
#if GRISTMILL_LANES == 16 && !defined(GRISTMILL_EMULATE)
    return (vf)_mm512_maskz_cvtph_ps(ALL, _mm256_loadu_si256((const __m256i*)p));
#else
    __m256 parts[W / 8];
    for (int i = 0; i < W / 8; i++) parts[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 16 * i)));
    vf x;
    std::memcpy(&x, parts, sizeof x);
    return x;
#endif
}

// Codes 0 to 15. A 32-bit lane holds those of 8 neighbouring k of one column, the lowest k in the lowest bits.
struct Int4 {
    static constexpr int STEP = 8;  // k of one step
    static constexpr int64_t STEP_BYTES = STEP / 2 * NR;
    static constexpr bool IS_PADDED = true;
    static constexpr float UNIT = 1;
    static constexpr float ZERO = 8;  // the code of 0 where there are no offsets

    static GM_INLINE vf load(const char* step, int half, int i) {
        const vu lanes = load_bits(step + half * 4 * W) >> 4 * i;
        return __builtin_convertvector((vi)(i < 7 ? lanes & 15 : lanes), vf);
    }

    static float load_one(const char* codes, int64_t k, int64_t column) {
        uint32_t lane;
        std::memcpy(&lane, codes + (k / STEP * NR + column) * sizeof lane, sizeof lane);
        return (lane >> k % STEP * 4) & 15;
    }
};

// One byte a code, [k][NR].
struct Int8 {
    static constexpr int STEP = 4;
    static constexpr int64_t STEP_BYTES = STEP * NR;
    static constexpr bool IS_PADDED = false;
    static constexpr float UNIT = 1;
    static constexpr float ZERO = 0;

    static GM_INLINE vf load(const char* step, int half, int i) {
        return __builtin_convertvector(load_bytes(step + i * NR + half * W), vf);
    }

    static float load_one(const char* codes, int64_t k, int64_t column) { return (int8_t)codes[k * NR + column]; }
};

// One byte a code, [k][NR]: sign, 4 bits of exponent with bias 7, 3 of mantissa. In float16's places, whose exponent
// has bias 15, they are 2^8 times too small, and float16's subnormal numbers are theirs. The two codes of NaN give 480.
struct Fp8 {
    static constexpr int STEP = 4;
    static constexpr int64_t STEP_BYTES = STEP * NR;
    static constexpr bool IS_PADDED = false;
    static constexpr float UNIT = 256;  // what numbers must be multiplied by
    static constexpr float ZERO = 0;

    static GM_INLINE vf load(const char* step, int half, int i) {
        const char* codes = step + i * NR + half * W;
#if GRISTMILL_LANES == 16 && !defined(GRISTMILL_EMULATE)
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes));
        const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80));
        return (vf)_mm512_maskz_cvtph_ps(ALL, halves);
#else
        __m256 parts[W / 8];
        for (int n = 0; n < W / 8; n++) {
            const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)(codes + 8 * n)));
            parts[n] = _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbf80)));
        }
        vf x;
        std::memcpy(&x, parts, sizeof x);
        return x;
#endif
    }

    static float load_one(const char* codes, int64_t k, int64_t column) {
        const int code = codes[k * NR + column];
        return _cvtsh_ss((uint16_t)(code * 128) & 0xbf80);
    }
};

// How many k n neighbouring ones take, where those of int4 end with a whole lane.
template <class Codes>
GM_INLINE int64_t padded(int64_t n) {
    return Codes::IS_PADDED ? (n + Codes::STEP - 1) / Codes::STEP * Codes::STEP : n;
}

// Bytes of the codes of n neighbouring k of a panel.
template <class Codes>
GM_INLINE int64_t codes_bytes(int64_t n) {
    return padded<Codes>(n) * Codes::STEP_BYTES / Codes::STEP;
}

}  // namespace gm
