// Attention over keys and values where they lie, block by block. What a row gets depends on its own position and
// on nothing else: keys are taken PANEL at a time from position 0 on, and what lies beyond a row counts as nothing.
#pragma once
#include "linear.h"
#include <algorithm>
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

const float LOG2E = 1.44269504089f;

// The keys and values of PANEL positions, one after the other.
template <class W> struct Tile {
    const W *keys[PANEL], *values[PANEL];
};

// Keys [PANEL] of `dim` numbers as a panel of weights, whose columns are the keys. `next` are asked for meanwhile.
template <class F>
void turn_keys(const typename F::weight *const *keys, const typename F::weight *const *next, int dim,
               typename F::weight *panel) {
    int d = 0;
#if LANES == 16
    if constexpr (sizeof(typename F::weight) * F::step == 4) {
        for (; d + 16 * F::step <= dim; d += 16 * F::step)
            for (int first = 0; first < PANEL; first += 16) {
                const uint32_t *rows[16];
                for (int i = 0; i < 16; i++) {
                    rows[i] = reinterpret_cast<const uint32_t *>(keys[first + i] + d);
                    ask(next[first + i] + d);
                }
                turn16(rows, reinterpret_cast<uint32_t *>(panel + d * PANEL) + first, PANEL);
            }
    }
#endif
    for (; d < dim; d++)
        for (int j = 0; j < PANEL; j++) panel[(d / F::step * PANEL + j) * F::step + d % F::step] = keys[j][d];
}

// Columns [from, from + count) of values [PANEL], as a panel of weights whose steps are the values. `next` are asked for
// meanwhile.
template <class F>
void lay_values(const typename F::weight *const *values, const typename F::weight *const *next, int from, int count,
                typename F::weight *panel) {
#if DOT_BF16
    if constexpr (F::step == 2) {
        if (count == PANEL) {
            alignas(64) static const uint16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
            const __m512i lows = _mm512_load_si512(low), highs = _mm512_add_epi16(lows, _mm512_set1_epi16(16));
            for (int k = 0; k < PANEL; k += 2) {
                ask(next[k] + from), ask(next[k + 1] + from);
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

// Rows [from, to) of a span, and the heads that read `kv_head`.
struct Part {
    const Span *span;
    int kv_head;
    int64_t from, to;
    // The first position that a tile begins at, and the last that a row sees.
    int64_t first(int64_t window) const {
        const int64_t position = span->start + from;
        return (window && position >= window ? position - window + 1 : 0) / PANEL * PANEL;
    }
    int64_t last() const { return span->start + to - 1; }
};

// The tile of `part` that begins at `base`; `nothing` stands for positions beyond its last.
template <class W> void find_tile(const Part &part, int64_t layer, int64_t base, const W *nothing, Tile<W> &tile) {
    const Span &span = *part.span;
    const int64_t in_block = layer * span.layer + part.kv_head * span.head, last = part.last();
    const int64_t *block = span.blocks + base / span.block;
    int64_t slot = base % span.block;
    for (int j = 0; j < PANEL; j++) {
        if (base + j > last) {
            tile.keys[j] = tile.values[j] = nothing;
            continue;
        }
        const char *key = reinterpret_cast<const char *>(*block) + in_block + slot * span.slot;
        tile.keys[j] = reinterpret_cast<const W *>(key);
        tile.values[j] = reinterpret_cast<const W *>(key + span.kind);
        if (++slot == span.block) slot = 0, block++;
    }
}

// query(row, head) → give(row, head, float32 [dim]). `then` is what this thread will probably do next.
template <class E, class Query, class Give>
void attend(const Part &part, const Part &then, int64_t layer, const Form &form, int group, int dim,
            const Query &query, const Give &give) {
    typedef typename FormOf<E>::type F;
    typedef typename F::input In;
    typedef typename F::weight W;
    const Span &span = *part.span;
    const int kv_head = part.kv_head;
    const int64_t from = part.from;
    const int queries = int(part.to - from) * group, columns = panels_of(dim), steps = (dim + F::step - 1) / F::step;
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
        if constexpr (std::is_same<In, E>::value)
            std::memcpy(to_row, row, dim * sizeof(E));
        else
            by_lanes(dim, [&](int d, int n) { write(to_row + d, read(row + d, n), n); });
        std::memset(to_row + dim, 0, (steps * F::step - dim) * sizeof(In));
        peaks[i] = none;
    }
    const int64_t first_position = span.start + from, last = part.last();
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    // From a product, or what its cap leaves of it, to the power of two that stands for the power of e.
    const float scale = (form.cap > 0 ? form.cap : form.scale) * LOG2E;
    Parts parts(queries);
    const In *rows[ROWS];
    Tile<W> tiles[2];
    int turn = 0;
    find_tile(part, layer, part.first(form.window), nothing, tiles[turn]);
    for (int64_t base = part.first(form.window); base <= last; base += PANEL, turn ^= 1) {
        const Tile<W> &now = tiles[turn];
        Tile<W> &next = tiles[turn ^ 1];
        if (base + PANEL <= last)
            find_tile(part, layer, base + PANEL, nothing, next);
        else
            find_tile(then, layer, then.first(form.window), nothing, next);
        turn_keys<F>(now.keys, next.keys, dim, turned);
        for (int p = 0; p < parts.count; p++) {
            int begin = parts.first(p), count = parts.size(p);
            for (int i = 0; i < count; i++) rows[i] = q + size_t(begin + i) * steps * F::step;
            tile<F>(count, rows, turned, steps, scores + size_t(begin) * PANEL, false);
        }
        for (int i = 0; i < queries; i++) {
            const float *score = scores + size_t(i) * PANEL;
            const int64_t position = first_position + i / group;
            const int64_t newest = position - base, oldest = form.window ? newest - form.window + 1 : 0;
            vf x[COLS], peak = splat(none);
            for (int j = 0; j < COLS; j++) {
                x[j] = load(score + j * LANES);
                if (form.cap > 0) x[j] = tanh(x[j] * form.scale / form.cap);
                if (newest < PANEL - 1 || oldest > 0) {
                    vi index = lane + j * LANES;
                    vi seen = (index <= int(newest < PANEL ? newest : PANEL)) & (index >= int(oldest > 0 ? oldest : 0));
                    x[j] = seen ? x[j] : splat(none);
                }
                peak = larger(peak, x[j]);
            }
            const float highest = largest(peak) * scale;
            if (highest > peaks[i]) {
                const float fade = exp2(splat(peaks[i] - highest))[0];
                store_some(sums + size_t(i) * LANES, load(sums + size_t(i) * LANES) * fade, LANES);
                for (int c = 0; c < columns; c++)
                    for (int j = 0; j < PANEL; j += LANES) {
                        float *to_fade = out + (size_t(c) * queries + i) * PANEL + j;
                        prelay::store(to_fade, load(to_fade) * fade);
                    }
                peaks[i] = highest;
            }
            // Where it has seen nothing yet all weighs nothing: 2^-inf.
            const float least = peaks[i] == none ? 0 : peaks[i];
            vf sum = load(sums + size_t(i) * LANES);
            for (int j = 0; j < COLS; j++) {
                const vf share = exp2(x[j] * scale - least);
                sum += share;
                prelay::store(shares + size_t(i) * PANEL + j * LANES, share);
            }
            prelay::store(sums + size_t(i) * LANES, sum);
        }
        for (int c = 0; c < columns; c++)
            lay_values<F>(now.values, next.values, c * PANEL, dim - c * PANEL < PANEL ? dim - c * PANEL : PANEL,
                          laid + size_t(c) * PANEL * PANEL);
        for (int p = 0; p < parts.count; p++) {
            int begin = parts.first(p), count = parts.size(p);
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
            const float sink = form.sinks[head] * LOG2E, peak = sink > peaks[i] ? sink : peaks[i];
            factor = exp2(splat(peaks[i] - peak))[0];
            total = total * factor + exp2(splat(sink - peak))[0];
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

// Calls work(part, then) for all rows of all spans, in parts that keep all threads busy; `then` is what the same thread
// will probably do next.
template <class Work>
void for_each_part(Pool &pool, const Span *spans, int count, int kv_heads, int group, const Work &work) {
    const int size = TASK_QUERIES / group > 1 ? TASK_QUERIES / group : 1;
    std::vector<Part> parts;
    for (int i = 0; i < count; i++)
        for (int64_t from = 0; from < spans[i].length; from += size)
            for (int head = 0; head < kv_heads; head++)
                parts.push_back({spans + i, head, from, std::min(from + size, spans[i].length)});
    // A thread that takes all heads of a span knows what to ask for while it works; with few spans all must share one.
    const int all = int(parts.size()), each = count >= 4 * pool.threads() ? kv_heads : 1;
    pool.run(all / each, [&](int task) {
        for (int i = task * each; i < (task + 1) * each; i++) {
            const int follows = i + 1 < (task + 1) * each ? i + 1 : std::max(0, pool.after(task)) * each;
            work(parts[i], parts[follows]);
        }
    });
}

}  // namespace prelay
