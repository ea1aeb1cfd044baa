// Attention over keys and values where they lie, block by block. What a row gets depends on its own position and
// on nothing else: keys are taken PANEL at a time from position 0 on, and what lies beyond a row counts as nothing.
#pragma once
#include "linear.h"
#include <cmath>
#include <limits>

namespace prelay {

// Positions [start, start + length) of one sequence, from `row` of the step on; the addresses of its blocks; bytes from
// one layer, from keys to values, from one head, from one position to the next; and positions a block.
struct Span {
    int64_t start, length, row;
    const int64_t *blocks;
    int64_t layer, kind, head, slot, block;
};

// score = query · key · scale, capped, over the last `window` positions (0: all), beside a sink for each head.
struct Form {
    float scale, cap;
    int64_t window;
    const float *sinks;
};

// Where the key (kind 0) or value (1) of a head and a position stands.
template <class E> inline E *at(const Span &span, int64_t layer, int kind, int head, int64_t position) {
    const int64_t block = span.blocks[position / span.block];
    return reinterpret_cast<E *>(block + layer * span.layer + kind * span.kind + head * span.head +
                                 position % span.block * span.slot);
}

#if LANES == 16
// Sixteen rows of sixteen words, turned: out[i * stride] has word i of each row.
inline void turn16(const uint32_t *const *rows, uint32_t *out, int stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i]);
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(out + i * stride, _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
        _mm512_storeu_si512(out + (4 + i) * stride, _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88));
        _mm512_storeu_si512(out + (8 + i) * stride, _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd));
        _mm512_storeu_si512(out + (12 + i) * stride, _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd));
    }
}
#endif

// Keys [PANEL] of `dim` numbers as a panel of weights, whose columns are the keys.
template <class F> void turn_keys(const typename F::weight *const *keys, int dim, typename F::weight *panel) {
    int d = 0;
#if LANES == 16
    if constexpr (sizeof(typename F::weight) * F::step == 4) {
        for (; d + 16 * F::step <= dim; d += 16 * F::step)
            for (int first = 0; first < PANEL; first += 16) {
                const uint32_t *rows[16];
                for (int i = 0; i < 16; i++) rows[i] = reinterpret_cast<const uint32_t *>(keys[first + i] + d);
                turn16(rows, reinterpret_cast<uint32_t *>(panel + d * PANEL) + first, PANEL);
            }
    }
#endif
    for (; d < dim; d++)
        for (int j = 0; j < PANEL; j++) panel[(d / F::step * PANEL + j) * F::step + d % F::step] = keys[j][d];
}

// Columns [from, from + count) of values [PANEL], as a panel of weights whose steps are the values.
template <class F>
void lay_values(const typename F::weight *const *values, int from, int count, typename F::weight *panel) {
#if DOT_BF16
    if constexpr (F::step == 2) {
        if (count == PANEL) {
            alignas(64) static const uint16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
            const __m512i lows = _mm512_load_si512(low), highs = _mm512_add_epi16(lows, _mm512_set1_epi16(16));
            for (int k = 0; k < PANEL; k += 2) {
                __m512i a = _mm512_loadu_si512(values[k] + from), b = _mm512_loadu_si512(values[k + 1] + from);
                _mm512_storeu_si512(panel + k * PANEL, _mm512_permutex2var_epi16(a, lows, b));
                _mm512_storeu_si512(panel + k * PANEL + 32, _mm512_permutex2var_epi16(a, highs, b));
            }
            return;
        }
    }
#endif
    for (int k = 0; k < PANEL; k++)
        for (int j = 0; j < PANEL; j++) {
            typename F::weight &to = panel[(k / F::step * PANEL + j) * F::step + k % F::step];
            if (j < count)
                to = values[k][from + j];
            else
                std::memset(&to, 0, sizeof(to));
        }
}

// Memory of one thread, kept from call to call.
struct Scratch {
    std::vector<char> bytes;
    size_t used = 0;
    template <class T> T *take(size_t count) {
        size_t at = used;
        used += (count * sizeof(T) + 63) / 64 * 64;
        return reinterpret_cast<T *>(at);
    }
    // After all are taken: where offset `at` lies. Zero offsets are the first.
    template <class T> T *place(T *at) {
        if (bytes.size() < used + 64) bytes.resize(used + 64);
        uintptr_t base = (reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64;
        return reinterpret_cast<T *>(base + reinterpret_cast<uintptr_t>(at));
    }
};

inline Scratch &scratch() {
    static thread_local Scratch found;
    found.used = 0;
    return found;
}

// Queries that share a tile of keys once it is turned.
const int TASK_QUERIES = 4 * ROWS;

// Rows [from, to) of `span`, the heads that read `kv_head`: query(row, head) → give(row, head, float32 [dim]).
template <class E, class Query, class Give>
void attend(const Span &span, int64_t layer, const Form &form, int kv_head, int group, int dim,
            int64_t from, int64_t to, const Query &query, const Give &give) {
    typedef typename FormOf<E>::type F;
    typedef typename F::input In;
    typedef typename F::weight W;
    const int queries = int(to - from) * group, columns = panels_of(dim), steps = (dim + F::step - 1) / F::step;
    Scratch &memory = scratch();
    In *q = memory.take<In>(size_t(queries) * steps * F::step);
    W *turned = memory.take<W>(size_t(steps) * F::step * PANEL), *laid = memory.take<W>(size_t(columns) * PANEL * PANEL);
    float *scores = memory.take<float>(size_t(queries) * PANEL), *peaks = memory.take<float>(queries);
    In *shares = memory.take<In>(size_t(queries) * PANEL);
    float *sums = memory.take<float>(size_t(queries) * LANES), *out = memory.take<float>(size_t(columns) * queries * PANEL);
    W *nothing = memory.take<W>(dim);
    q = memory.place(q), turned = memory.place(turned), laid = memory.place(laid), scores = memory.place(scores);
    peaks = memory.place(peaks), shares = memory.place(shares), sums = memory.place(sums), out = memory.place(out);
    nothing = memory.place(nothing);
    std::memset(nothing, 0, dim * sizeof(W));
    std::memset(turned, 0, size_t(steps) * F::step * PANEL * sizeof(W));
    std::memset(out, 0, size_t(columns) * queries * PANEL * sizeof(float));
    std::memset(sums, 0, size_t(queries) * LANES * sizeof(float));
    const float none = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < queries; i++) {
        In *to_row = q + size_t(i) * steps * F::step;
        const E *row = query(span.row + from + i / group, kv_head * group + i % group);
        for (int d = 0; d < steps * F::step; d++) {
            if constexpr (std::is_same<In, E>::value)
                d < dim ? void(to_row[d] = row[d]) : void(std::memset(to_row + d, 0, sizeof(In)));
            else
                to_row[d] = widen(row[d]);
        }
        peaks[i] = none;
    }
    const int64_t first_position = span.start + from, last = span.start + to - 1;
    const int64_t first = form.window && first_position >= form.window ? first_position - form.window + 1 : 0;
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    Parts parts(queries);
    const In *rows[ROWS];
    const int64_t in_block = layer * span.layer + kv_head * span.head;
    for (int64_t base = first / PANEL * PANEL; base <= last; base += PANEL) {
        const W *keys[PANEL], *values[PANEL];
        int64_t slot = base % span.block;
        const int64_t *block = span.blocks + base / span.block;
        for (int j = 0; j < PANEL; j++) {
            if (base + j > last) {
                keys[j] = values[j] = nothing;
                continue;
            }
            const char *key = reinterpret_cast<const char *>(*block) + in_block + slot * span.slot;
            keys[j] = reinterpret_cast<const W *>(key), values[j] = reinterpret_cast<const W *>(key + span.kind);
            if (++slot == span.block) slot = 0, block++;
        }
        turn_keys<F>(keys, dim, turned);
        for (int part = 0; part < parts.count; part++) {
            int begin = parts.first(part), count = parts.size(part);
            for (int i = 0; i < count; i++) rows[i] = q + size_t(begin + i) * steps * F::step;
            tile<F>(count, rows, turned, steps, scores + size_t(begin) * PANEL, false);
        }
        for (int i = 0; i < queries; i++) {
            float *score = scores + size_t(i) * PANEL;
            const int64_t position = first_position + i / group;
            const int64_t newest = position - base, oldest = form.window ? newest - form.window + 1 : 0;
            vf peak = splat(none);
            for (int j = 0; j < PANEL; j += LANES) {
                vf x = load(score + j) * form.scale;
                if (form.cap > 0) x = tanh(x / form.cap) * form.cap;
                if (newest < PANEL - 1 || oldest > 0) {
                    vi index = lane + j;
                    vi seen = (index <= int(newest < PANEL ? newest : PANEL)) & (index >= int(oldest > 0 ? oldest : 0));
                    x = seen ? x : splat(none);
                }
                store_some(score + j, x, LANES);
                peak = larger(peak, x);
            }
            const float highest = largest(peak);
            if (highest > peaks[i]) {
                const float fade = exp(splat(peaks[i] - highest))[0];
                store_some(sums + size_t(i) * LANES, load(sums + size_t(i) * LANES) * fade, LANES);
                for (int c = 0; c < columns; c++)
                    for (int j = 0; j < PANEL; j += LANES) {
                        float *to_fade = out + (size_t(c) * queries + i) * PANEL + j;
                        prelay::store(to_fade, load(to_fade) * fade);
                    }
                peaks[i] = highest;
            }
            vf sum = load(sums + size_t(i) * LANES);
            for (int j = 0; j < PANEL; j += LANES) {
                vf share = peaks[i] == none ? vf{} : exp(load(score + j) - peaks[i]);
                sum += share;
                prelay::store(shares + size_t(i) * PANEL + j, share);
            }
            prelay::store(sums + size_t(i) * LANES, sum);
        }
        for (int c = 0; c < columns; c++)
            lay_values<F>(values, c * PANEL, dim - c * PANEL < PANEL ? dim - c * PANEL : PANEL,
                          laid + size_t(c) * PANEL * PANEL);
        for (int part = 0; part < parts.count; part++) {
            int begin = parts.first(part), count = parts.size(part);
            for (int i = 0; i < count; i++) rows[i] = shares + size_t(begin + i) * PANEL;
            for (int c = 0; c < columns; c++)
                tile<F>(count, rows, laid + size_t(c) * PANEL * PANEL, PANEL / F::step,
                        out + (size_t(c) * queries + begin) * PANEL, true);
        }
    }
    for (int i = 0; i < queries; i++) {
        const int head = kv_head * group + i % group;
        float total = sum(load(sums + size_t(i) * LANES)), factor = 1;
        if (form.sinks) {
            const float sink = form.sinks[head], peak = sink > peaks[i] ? sink : peaks[i];
            factor = exp(splat(peaks[i] - peak))[0];
            total = total * factor + exp(splat(sink - peak))[0];
        }
        factor /= total;
        for (int c = 0; c < columns; c++)
            for (int j = 0; j < PANEL; j += LANES) {
                float *scaled = out + (size_t(c) * queries + i) * PANEL + j;
                prelay::store(scaled, load(scaled) * factor);
            }
        give(span.row + from + i / group, head, [&](int d) { return out + (size_t(d / PANEL) * queries + i) * PANEL + d % PANEL; });
    }
}

// Calls task(span, kv_head, from, to) for all rows of all spans, in parts that keep all threads busy.
template <class Task>
void for_each_part(Pool &pool, const Span *spans, int count, int kv_heads, int group, const Task &task) {
    const int size = TASK_QUERIES / group > 1 ? TASK_QUERIES / group : 1;
    std::vector<std::pair<int, int>> parts;  // a span, a part of it
    for (int i = 0; i < count; i++)
        for (int part = 0; part * size < spans[i].length; part++) parts.emplace_back(i, part);
    pool.run(int(parts.size()) * kv_heads, [&](int index) {
        auto [i, part] = parts[index / kv_heads];
        const int64_t from = int64_t(part) * size, end = spans[i].length;
        task(spans[i], index % kv_heads, from, from + size < end ? from + size : end);
    });
}

}  // namespace prelay
