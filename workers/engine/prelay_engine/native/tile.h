// One tile of a product: up to ROWS rows of A times a panel of PANEL columns, added up over k in one order.
#pragma once
#include "vec.h"

namespace prelay {

// How weights lie in a panel, and what one step of the sum is. k is filled up to a multiple of `fill` with zeros, and
// behind each `fill` of them lie `tail` more.
//   Pairs   bfloat16, [k / 2][PANEL][2]: two steps of k in one instruction
//   Halves  bfloat16, [k][PANEL], widened as they are read; A is float32
//   Floats  float32, [k][PANEL]
#if DOT_BF16
struct Pairs {
    typedef bf16 weight;
    typedef bf16 input;
    static const int step = 2, fill = 2, tail = 0;
    typedef __m512bh vector;
    static vector load(const bf16 *w) { return reinterpret_cast<vector>(_mm512_loadu_si512(w)); }
    static vector splat(const bf16 *a) {
        int32_t pair;
        std::memcpy(&pair, a, 4);
        return reinterpret_cast<vector>(_mm512_set1_epi32(pair));
    }
    static vf add(vf sum, vector a, vector w) {
        return reinterpret_cast<vf>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), a, w));
    }
};
#endif
template <class W> struct Plain {
    typedef W weight;
    typedef float input;
    static const int step = 1, fill = 1, tail = 0;
    typedef vf vector;
    static vector load(const W *w) { return prelay::load(w); }
    static vector splat(const float *a) { return prelay::splat(*a); }
    static vf add(vf sum, vf a, vf w) { return sum + a * w; }
};
typedef Plain<float> Floats;
#if DOT_BF16
typedef Pairs Halves;
#else
typedef Plain<bf16> Halves;
#endif
// The form that a model's dtype takes.
template <class E> struct FormOf;
template <> struct FormOf<float> { typedef Floats type; };
template <> struct FormOf<bf16> { typedef Halves type; };

// Ask for the line at `p`, into the second cache: the first has no room for what comes after the tile in work.
inline void ask(const void *p) { __builtin_prefetch(p, 0, 2); }

// Ask for `bytes` of what is read next, where `ahead` is not null, and step past them.
template <class W> inline void ask(const W *&ahead, int bytes) {
    if (!ahead) return;
    for (int i = 0; i < bytes; i += 64) ask(reinterpret_cast<const char *>(ahead) + i);
    ahead += bytes / sizeof(W);
}

// c[i] [PANEL] (+)= a[i] [steps * step] * w, for `R` rows. With `more` what stands in c is added to. `ahead`: a panel that
// is fetched meanwhile, or null.
template <int R, class F>
inline void tile_of(F, const typename F::input *const *a, const typename F::weight *w, int steps, float *c, bool more,
                    const typename F::weight *ahead) {
    vf sums[R][COLS];
    for (int i = 0; i < R; i++)
        for (int j = 0; j < COLS; j++) sums[i][j] = more ? load(c + i * PANEL + j * LANES) : vf{};
    for (int k = 0; k < steps; k++) {
        if constexpr (R >= ROWS / 2) ask(ahead, PANEL * F::step * sizeof(*w));  // of several parts none has fewer
        typename F::vector columns[COLS];
        for (int j = 0; j < COLS; j++) columns[j] = F::load(w + (k * PANEL + j * LANES) * F::step);
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) {
            typename F::vector row = F::splat(a[i] + k * F::step);
            for (int j = 0; j < COLS; j++) sums[i][j] = F::add(sums[i][j], row, columns[j]);
        }
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < COLS; j++) store(c + i * PANEL + j * LANES, sums[i][j]);
}

template <class F, int R = ROWS>
inline void tile(int rows, const typename F::input *const *a, const typename F::weight *w, int steps, float *c,
                 bool more, const typename F::weight *ahead = nullptr) {
    if constexpr (R == 1)
        tile_of<1>(F(), a, w, steps, c, more, ahead);
    else if (rows == R)
        tile_of<R>(F(), a, w, steps, c, more, ahead);
    else
        tile<F, R - 1>(rows, a, w, steps, c, more, ahead);
}

// `rows` in parts of at most ROWS that differ by one at most: 13 are 7 and 6, not 12 and 1.
struct Parts {
    int rows, count;
    explicit Parts(int rows) : rows(rows), count((rows + ROWS - 1) / ROWS) {}
    int first(int part) const { return int(int64_t(rows) * part / count); }
    int size(int part) const { return first(part + 1) - first(part); }
};

}  // namespace prelay
