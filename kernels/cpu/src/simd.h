// Vectors of the compiled level: W float lanes (8 for AVX2, 16 for AVX512) as GCC vector extensions, so that the code for
// 16 lanes also runs, split in two by the compiler, on a CPU with 8. a * b + c is contracted to one FMA.
// With GRISTMILL_EMULATE nothing beyond AVX2 is used: for tests of the higher levels.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef GRISTMILL_LANES
#error "GRISTMILL_LANES is the number of float lanes, 8 or 16; kernels/cpu_library.py sets it"
#endif

#define GM_INLINE inline __attribute__((always_inline))
#define GM_API extern "C" __attribute__((visibility("default")))

#if defined(GRISTMILL_BF16) && !defined(GRISTMILL_EMULATE)
#define GM_NATIVE_BF16 1
#endif

namespace gm {

constexpr int W = GRISTMILL_LANES;
constexpr int CACHE_LINE = 64;

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));  // W bfloat16 numbers

struct bf16 {
    uint16_t bits;
};

GM_INLINE vf broadcast(float x) { return x - vf{}; }
GM_INLINE vu broadcast_bits(uint32_t x) { return x - vu{}; }

GM_INLINE vf load(const float* p) {
    vf x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

GM_INLINE vu load_bits(const void* p) {
    vu x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

GM_INLINE void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }

GM_INLINE vf load(const bf16* p) {
    vh x;
    std::memcpy(&x, p, sizeof x);
    return (vf)(__builtin_convertvector(x, vu) << 16);
}

// Rounds to the nearest bfloat16, ties to even; a NaN stays one.
GM_INLINE vh to_bf16(vf x) {
#ifdef GM_NATIVE_BF16
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    const vu bits = (vu)x;
    const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(x == x ? rounded : (bits >> 16) | 0x40, vh);
#endif
}

GM_INLINE void store(bf16* p, vf x) {
    const vh y = to_bf16(x);
    std::memcpy(p, &y, sizeof y);
}

GM_INLINE float to_float(float x) { return x; }

GM_INLINE float to_float(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

template <class T>
GM_INLINE T from_float(float x);
template <>
GM_INLINE float from_float<float>(float x) {
    return x;
}
template <>
GM_INLINE bf16 from_float<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return bf16{(uint16_t)((bits >> 16) | 0x40)};
    return bf16{(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// A NaN in x gives y's lane, one in y stays.
GM_INLINE vf max(vf x, vf y) { return x > y ? x : y; }

GM_INLINE float horizontal_max(vf x) {
    float m = x[0];
    for (int i = 1; i < W; i++) m = x[i] > m ? x[i] : m;
    return m;
}

GM_INLINE float horizontal_sum(vf x) {
    float lanes[W];
    std::memcpy(lanes, &x, sizeof lanes);
    for (int n = W / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) lanes[i] += lanes[i + n];
    return lanes[0];
}

// Lanes 0:n of the mask are set.
GM_INLINE vi first_lanes(int n) {
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    return lane < n;
}

// e^x to 2 units in the last place: 0 below -86.9, infinity above 88.72. Range reduction and polynomial of Cephes' expf.
GM_INLINE vf exp(vf x) {
    const vf low = broadcast(-86.9f), high = broadcast(88.722839f);
    const vf y = x < low ? low : (x > high ? high : x);
    const vf magic = broadcast(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
    const vf n = (y * 1.44269504f + magic) - magic;
    const vf r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    // n reaches 128, which has no exponent field of its own: 2^n is 2^(n - 1) times 2.
    const vf scale = (vf)((__builtin_convertvector(n, vi) + 126) << 23);
    const vf e = p * scale * 2.0f;
    return x < low ? vf{} : (x > high ? broadcast(INFINITY) : e);
}

GM_INLINE vf silu(vf x) { return x / (1.0f + exp(-x)); }

// Each 32-bit lane of a and b holds two bfloat16 numbers; their products are added to the lane of sum.
GM_INLINE vf dot_pairs(vf sum, vu a, vu b) {
#ifdef GM_NATIVE_BF16
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = (vf)(a & 0xffff0000u) * (vf)(b & 0xffff0000u) + sum;
    return (vf)(a << 16) * (vf)(b << 16) + sum;
#endif
}

template <int LOCALITY = 3>
GM_INLINE void prefetch(const void* p) {
    __builtin_prefetch(p, 0, LOCALITY);
}

}  // namespace gm
