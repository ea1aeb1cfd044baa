// Vectors of floats as the compiler knows them, of the widest registers that -march=native has.
//
// Everything here is written so that a number of a result is made by the same operations in the same order whatever
// is computed beside it: no sum is ever split by the number of rows, of threads, or of what is left over.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12  // of a tile of results kept in registers: ROWS * COLS + COLS + 1 of 32 registers
#elif defined(__AVX2__)
#define LANES 8
#define ROWS 6
#else
#define LANES 4
#define ROWS 6
#endif
#define COLS 2
#define PANEL (COLS * LANES)

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define DOT_BF16 1  // products of pairs of bfloat16, added up in float32, in one instruction
#else
#define DOT_BF16 0
#endif

namespace prelay {

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2), aligned(2)));
typedef int8_t vb __attribute__((vector_size(LANES), aligned(1)));

struct bf16 {
    uint16_t bits;
};

inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline float widen(float x) { return x; }

inline vf splat(float x) { return x - vf{}; }

inline vf load(const float *p) { return *reinterpret_cast<const vf *>(p); }
inline vf load(const bf16 *p) {
    vu wide = __builtin_convertvector(*reinterpret_cast<const vh *>(p), vu) << 16;
    return reinterpret_cast<vf>(wide);
}
inline void store(float *p, vf x) { *reinterpret_cast<vf *>(p) = x; }
// To the nearest, of two the even one, and a NaN stays one. The instruction takes what is smaller than any normal number
// for 0, as the products do that read it.
inline void store(bf16 *p, vf x) {
#if DOT_BF16
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x))));
#else
    vu bits = reinterpret_cast<vu>(x);
    vu even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (bits >> 16) | 0x40;
    vi is_nan = x != x;
    vu picked = (reinterpret_cast<vu>(is_nan) & nan) | (~reinterpret_cast<vu>(is_nan) & even);
    *reinterpret_cast<vh *>(p) = __builtin_convertvector(picked, vh);
#endif
}

// The first `count` of LANES numbers; the others are 0 and are not touched.
template <class T> inline vf load_some(const T *p, int count) {
    T buffer[LANES] = {};
    std::memcpy(buffer, p, count * sizeof(T));
    return load(buffer);
}
template <class T> inline void store_some(T *p, vf x, int count) {
    T buffer[LANES];
    store(buffer, x);
    std::memcpy(p, buffer, count * sizeof(T));
}

inline vf larger(vf a, vf b) { return a > b ? a : b; }

// Pairs of lanes far apart first: one order for all.
inline float sum(vf x) {
    float lanes[LANES];
    store(lanes, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}
inline int32_t sum(vi x) {
#if LANES == 16
    return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(x));
#endif
    int32_t all = 0;
    for (int i = 0; i < LANES; i++) all += x[i];
    return all;
}
inline int32_t largest(vi x) {
#if LANES == 16
    return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(x));
#endif
    int32_t most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}
inline float largest(vf x) {
#if LANES == 16
    return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x));
#endif
    float lanes[LANES];
    store(lanes, x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

const float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
inline vi whole(vf x) { return __builtin_convertvector(x + MAGIC - MAGIC, vi); }

// e^x to about 2 units in the last place: x = n ln 2 + r, a polynomial in r, and n put into the exponent.
// Below -87.3 (also -inf) it is 0; what is above 88.3 is taken for 88.3; a NaN stays one.
inline vf exp(vf x) {
    vi gone = x < -87.3f;
    vf given = x;
    x = x < -87.3f ? splat(-87.3f) : x;
    x = x > 88.3f ? splat(88.3f) : x;
    vf n = x * 1.44269504089f + MAGIC - MAGIC;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi exponent = __builtin_convertvector(n, vi) << 23;
    vi bits = reinterpret_cast<vi>(p) + exponent;
    vf power = reinterpret_cast<vf>(bits & ~gone);
    return given == given ? power : given;
}

// 2^x to 2 units in the last place, exactly 1 at 0. Below -150 (also -inf) it is 0; a NaN stays one; x is at most 127.
inline vf exp2(vf x) {
#if LANES == 16
    x = reinterpret_cast<vf>(_mm512_max_ps(_mm512_set1_ps(-150.0f), reinterpret_cast<__m512>(x)));  // a NaN in x passes
    const __m512 n = _mm512_roundscale_ps(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vf r = x - reinterpret_cast<vf>(n);
#else
    vi gone = x < -126.0f;
    vf given = x;
    x = x < -126.0f ? splat(-126.0f) : x;
    vf n = x + MAGIC - MAGIC, r = x - n;
#endif
    vf p = splat(1.32647274e-3f);
    p = p * r + 9.67151292e-3f;
    p = p * r + 5.55073375e-2f;
    p = p * r + 2.40222421e-1f;
    p = p * r + 6.93146978e-1f;
    p = p * r + 1.0f;
#if LANES == 16
    return reinterpret_cast<vf>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), n));
#else
    vi bits = reinterpret_cast<vi>(p) + (__builtin_convertvector(n, vi) << 23);
    vf power = reinterpret_cast<vf>(bits & ~gone);
    return given == given ? power : given;
#endif
}

// 1 - 2 / (e^2x + 1)
inline vf tanh(vf x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

}  // namespace prelay
