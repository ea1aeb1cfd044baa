// Products of eight-bit numbers (W8A8): GROUP numbers of a row, and of a weight's output, have one scale.
//
// Within a group sums are whole numbers, so exact in any order; groups are added up in float32, the first one first.
#pragma once
#include "linear.h"
#include <cmath>

namespace prelay {

const int GROUP = 64;

// GROUP numbers of a row: number = q * scale.
struct Group {
    int8_t q[GROUP];
    float scale;
    int32_t offset;  // -128 * (sum of q): weights are kept 128 higher than they are, for they multiply without a sign
};

// Panels are groups of [GROUP / 4][PANEL][4] weights and [PANEL] scales.
struct Bytes {
    typedef uint8_t weight;
    typedef Group input;
    static const int step = 4, fill = GROUP, tail = PANEL * sizeof(float);
};

// sum + four products in each lane: `w` without a sign, `a` with one.
inline vi dot4(vi sum, const uint8_t *w, const int8_t *a) {
    int32_t four;
    std::memcpy(&four, a, 4);
#if LANES == 16 && defined(__AVX512VNNI__)
    const __m512i found = reinterpret_cast<__m512i>(sum);
    return reinterpret_cast<vi>(_mm512_dpbusd_epi32(found, _mm512_loadu_si512(w), _mm512_set1_epi32(four)));
#elif LANES == 8 && defined(__AVXVNNI__)
    const __m256i found = reinterpret_cast<__m256i>(sum), wide = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w));
    return reinterpret_cast<vi>(_mm256_dpbusd_avx_epi32(found, wide, _mm256_set1_epi32(four)));
#else
    const vi words = *reinterpret_cast<const vi *>(w);
    for (int i = 0; i < 4; i++) sum += ((words >> 8 * i) & 255) * int32_t(a[i]);
    return sum;
#endif
}

template <int R>
inline void tile_of(Bytes, const Group *const *a, const uint8_t *w, int steps, float *c, bool, const uint8_t *ahead) {
    std::memset(c, 0, R * PANEL * sizeof(*c));
    for (int g = 0; g < steps * Bytes::step / GROUP; g++) {
        vi sums[R][COLS];
        for (int i = 0; i < R; i++)
            for (int j = 0; j < COLS; j++) sums[i][j] = a[i][g].offset - vi{};
        for (int k = 0; k < GROUP; k += Bytes::step, w += PANEL * Bytes::step) {
            if constexpr (R >= ROWS / 2) ask(ahead, PANEL * Bytes::step);
#pragma GCC unroll 12
            for (int i = 0; i < R; i++)
                for (int j = 0; j < COLS; j++)
                    sums[i][j] = dot4(sums[i][j], w + j * LANES * Bytes::step, a[i][g].q + k);
        }
        vf scales[COLS];
        for (int j = 0; j < COLS; j++, w += LANES * sizeof(float))
            scales[j] = load(reinterpret_cast<const float *>(w));
        for (int i = 0; i < R; i++)
            for (int j = 0; j < COLS; j++) {
                float *to = c + i * PANEL + j * LANES;
                store(to, load(to) + __builtin_convertvector(sums[i][j], vf) * (scales[j] * a[i][g].scale));
            }
    }
}

inline int64_t groups_of(int64_t k) { return (k + GROUP - 1) / GROUP; }

// x [k] in groups; the last is filled up with zeros. A group with a number that is not finite has the scale NaN.
template <class T> void quantise(const T *x, int k, Group *to) {
    const float tiny = 1e-30f;  // below, 1 / scale would overflow: such a group counts as zeros
    for (int first = 0; first < k; first += GROUP, x += GROUP, to++) {
        const int n = k - first < GROUP ? k - first : GROUP;
        vi sizes = {};  // of floats without their sign, which are ordered as whole numbers are
        by_lanes(n, [&](int i, int count) {
            const vi size = reinterpret_cast<vi>(read(x + i, count)) & 0x7fffffff;
            sizes = size > sizes ? size : sizes;
        });
        const int32_t most = largest(sizes);
        float scale, factor = 0;
        std::memcpy(&scale, &most, sizeof(scale));
        scale /= 127;
        if (most >= 0x7f800000)
            scale = std::numeric_limits<float>::quiet_NaN();
        else if (scale > tiny)
            factor = 1 / scale;
        else
            scale = 0;
        vi total = {};
        if (n < GROUP) std::memset(to->q, 0, GROUP);
        by_lanes(n, [&](int i, int count) {
            const vi q = whole(read(x + i, count) * factor);
            total += q;
            *reinterpret_cast<vb *>(to->q + i) = __builtin_convertvector(q, vb);
        });
        to->scale = scale;
        to->offset = -128 * sum(total);
    }
}

// Weights [n, k] rounded to eight bits, in panels. What is not finite makes the sums it belongs to NaN.
template <class E> void pack_bytes(const E *from, int n, int k, uint8_t *to) {
    const Packed<Bytes> shape{to, n, k};
    const int size = GROUP * PANEL + Bytes::tail;
    std::memset(to, 0, panels_of(n) * shape.panel_size());
    for (int row = 0; row < n; row++)
        for (int first = 0; first < k; first += GROUP) {
            const E *weights = from + int64_t(row) * k + first;
            const int count = k - first < GROUP ? k - first : GROUP, column = row % PANEL;
            uint8_t *group = to + (row / PANEL) * shape.panel_size() + int64_t(first / GROUP) * size;
            float most = 0;
            for (int i = 0; i < count; i++) {
                const float size = std::abs(widen(weights[i]));
                most = std::isfinite(size) ? std::max(most, size) : std::numeric_limits<float>::quiet_NaN();
            }
            const float scale = most / 127;
            std::memcpy(group + GROUP * PANEL + column * sizeof(scale), &scale, sizeof(scale));
            for (int i = 0; i < count; i++)
                group[(i / Bytes::step * PANEL + column) * Bytes::step + i % Bytes::step] =
                    uint8_t(128 + (scale > 0 ? std::lrint(widen(weights[i]) / scale) : 0));
        }
}

}  // namespace prelay
