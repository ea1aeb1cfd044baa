// x [rows, K] times weights [N, K], kept in panels of PANEL outputs.
#pragma once
#include "pool.h"
#include "tile.h"

namespace prelay {

inline int panels_of(int64_t n) { return int((n + PANEL - 1) / PANEL); }

// Weights of `F` in panels: `steps` steps of k each, zeros where there is no weight.
template <class F> struct Packed {
    const typename F::weight *data;
    int n, k;
    int steps() const { return (k + F::fill - 1) / F::fill * F::fill / F::step; }
    int64_t panel_size() const { return int64_t(steps()) * F::step / F::fill * (F::fill * PANEL + F::tail); }
    const typename F::weight *panel(int p) const { return data + p * panel_size(); }
};

template <class F> void pack(const typename F::weight *from, int n, int k, typename F::weight *to) {
    Packed<F> shape{to, n, k};
    std::memset(to, 0, panels_of(n) * shape.panel_size() * sizeof(*to));
    for (int row = 0; row < n; row++) {
        typename F::weight *panel = to + (row / PANEL) * shape.panel_size() + row % PANEL * F::step;
        for (int i = 0; i < k; i++) panel[int64_t(i / F::step) * PANEL * F::step + i % F::step] = from[int64_t(row) * k + i];
    }
}

// Bytes of weights that a task should read at least, and rows that it should not pass.
const int64_t TASK_BYTES = 48 << 10;
const int TASK_ROWS = 12 * ROWS;
// How far ahead weights are asked for that are multiplied once; those of several parts are asked for a panel ahead.
const int NEAR = 8 << 10;

// For each row and panel: give(row, panel, c) with c[i] [PANEL] of float32, the product with w[i].
// x(row) is where a row of the input begins. All of `w` have the same shape.
template <class F, int COUNT, class Rows, class Give>
void multiply(Pool &pool, int rows, const Rows &x, const Packed<F> (&w)[COUNT], const Give &give) {
    int panels = panels_of(w[0].n), blocks = (rows + TASK_ROWS - 1) / TASK_ROWS, steps = w[0].steps();
    int group = int(TASK_BYTES / (COUNT * w[0].panel_size() * sizeof(*w[0].data))) + 1;
    int groups = (panels + group - 1) / group;
    pool.run(groups * blocks, [&](int task) {
        int block = task % blocks, last = (task / blocks + 1) * group;
        int begin = int(int64_t(rows) * block / blocks), end = int(int64_t(rows) * (block + 1) / blocks);
        alignas(64) float c[COUNT][ROWS * PANEL];
        const typename F::input *a[ROWS];
        Parts parts(end - begin);
        if (last > panels) last = panels;
        for (int panel = task / blocks * group; panel < last; panel++) {
            const int then = pool.after(task);  // what this thread will probably read next
            const int follows = panel + 1 < last ? panel + 1 : then >= 0 ? then / blocks * group : -1;
            for (int part = 0; part < parts.count; part++) {
                int first = begin + parts.first(part), count = parts.size(part);
                for (int i = 0; i < count; i++) a[i] = x(first + i);
                for (int j = 0; j < COUNT; j++) {
                    const typename F::weight *now = w[j].panel(panel), *ahead = nullptr;
                    if (part == 0)
                        ahead = now + NEAR / int(sizeof(*now));
                    else if (part + 1 == parts.count && follows >= 0)
                        ahead = w[j].panel(follows);
                    tile<F>(count, a, now, steps, c[j], false, ahead);
                }
                for (int i = 0; i < count; i++) {
                    const float *found[COUNT];
                    for (int j = 0; j < COUNT; j++) found[j] = c[j] + i * PANEL;
                    give(first + i, panel, found);
                }
            }
        }
    });
}

// Calls body(row) for all rows, in the calling thread where that is quicker than to share them.
template <class Body> void each_row(Pool &pool, int64_t rows, const Body &body) {
    const int64_t part = 8;
    if (rows <= part) {
        for (int64_t row = 0; row < rows; row++) body(row);
        return;
    }
    pool.run(int((rows + part - 1) / part), [&](int task) {
        for (int64_t row = task * part; row < rows && row < (task + 1) * part; row++) body(row);
    });
}

// Calls body(from, count) for the numbers [0, n) by LANES, the last time with fewer.
template <class Body> inline void by_lanes(int n, const Body &body) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) body(i, LANES);
    if (i < n) body(i, n - i);
}
template <class T> inline vf read(const T *p, int count) { return count == LANES ? load(p) : load_some(p, count); }
template <class T> inline void write(T *p, vf x, int count) {
    if (count == LANES)
        store(p, x);
    else
        store_some(p, x, count);
}

// The columns of `panel` that there are: body(column, offset in the panel, count).
template <class Body> inline void columns(int n, int panel, const Body &body) {
    int first = panel * PANEL, last = first + PANEL < n ? first + PANEL : n;
    by_lanes(last - first, [&](int i, int count) { body(first + i, i, count); });
}

}  // namespace prelay
