// What Python calls (native/lib.py has the same shapes). dtype: 0 float32, 1 bfloat16. No function fails.
#include "choose.h"
#include "decoder.h"

using namespace prelay;

namespace {

template <class E> using Weight = typename FormOf<E>::type::weight;

template <class E>
void linear(Pool &pool, const E *x, int64_t rows, const void *weights, int64_t n, int64_t k, const float *bias, E *to) {
    typedef typename FormOf<E>::type F;
    typedef typename F::input In;
    static thread_local std::vector<In> copy;
    const int64_t wide = (k + F::step - 1) / F::step * F::step;
    const bool as_it_is = std::is_same<In, E>::value && wide == k;
    if (!as_it_is) {
        copy.assign(rows * wide, In{});
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < k; i++) {
                if constexpr (std::is_same<In, E>::value)
                    copy[row * wide + i] = x[row * k + i];
                else
                    copy[row * wide + i] = widen(x[row * k + i]);
            }
    }
    const In *from = as_it_is ? reinterpret_cast<const In *>(x) : copy.data();
    multiply<F>(pool, int(rows), [&](int row) { return from + row * wide; },
                {Packed<F>{static_cast<const Weight<E> *>(weights), int(n), int(k)}},
                [&](int row, int panel, const float *const (&c)[1]) {
                    columns(int(n), panel, [&](int column, int i, int count) {
                        vf sum = load(c[0] + i);
                        if (bias) sum += read(bias + column, count);
                        write(to + row * n + column, sum, count);
                    });
                });
}

// Where queries, keys and values of a step lie: elements from one row, and from one head, to the next.
struct Inputs {
    const void *query, *key, *value;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
};

template <class E>
void attend_all(Pool &pool, const Span *spans, int64_t count, int64_t layer, const Inputs &in,
                int64_t heads, int64_t kv_heads, int64_t dim, const Form &form, E *to) {
    const E *query = static_cast<const E *>(in.query);
    for (int64_t s = 0; s < count; s++)
        for (int64_t i = 0; i < spans[s].length; i++)
            for (int64_t head = 0; head < kv_heads; head++) {
                const int64_t row = spans[s].row + i, position = spans[s].start + i;
                const E *key = static_cast<const E *>(in.key) + row * in.key_row + head * in.key_head;
                const E *value = static_cast<const E *>(in.value) + row * in.value_row + head * in.value_head;
                std::memcpy(at<E>(spans[s], layer, 0, int(head), position), key, dim * sizeof(E));
                std::memcpy(at<E>(spans[s], layer, 1, int(head), position), value, dim * sizeof(E));
            }
    const int group = int(heads / kv_heads);
    for_each_part(pool, spans, int(count), int(kv_heads), group,
                  [&](const Span &span, int kv_head, int64_t from, int64_t end) {
                      attend<E>(span, layer, form, kv_head, group, int(dim), from, end,
                                [&](int64_t row, int head) { return query + row * in.query_row + head * in.query_head; },
                                [&](int64_t row, int head, const auto &found) {
                                    E *at_head = to + (row * heads + head) * dim;
                                    by_lanes(int(dim), [&](int d, int n) { write(at_head + d, load(found(d)), n); });
                                });
                  });
}

}  // namespace

extern "C" {

void *prelay_pool(int64_t threads, int64_t spin_ns) { return new Pool(int(threads), spin_ns); }
void prelay_free_pool(void *pool) { delete static_cast<Pool *>(pool); }

int64_t prelay_packed_bytes(int64_t dtype, int64_t n, int64_t k) {
    if (dtype) return panels_of(n) * Packed<Halves>{nullptr, int(n), int(k)}.panel_size() * int64_t(sizeof(bf16));
    return panels_of(n) * Packed<Floats>{nullptr, int(n), int(k)}.panel_size() * int64_t(sizeof(float));
}
void prelay_pack(int64_t dtype, const void *weights, int64_t n, int64_t k, void *to) {
    if (dtype)
        pack<Halves>(static_cast<const bf16 *>(weights), int(n), int(k), static_cast<bf16 *>(to));
    else
        pack<Floats>(static_cast<const float *>(weights), int(n), int(k), static_cast<float *>(to));
}

void prelay_linear(void *pool, int64_t dtype, const void *x, int64_t rows, const void *weights, int64_t n, int64_t k,
                   const float *bias, void *to) {
    Pool &threads = *static_cast<Pool *>(pool);
    if (dtype)
        linear<bf16>(threads, static_cast<const bf16 *>(x), rows, weights, n, k, bias, static_cast<bf16 *>(to));
    else
        linear<float>(threads, static_cast<const float *>(x), rows, weights, n, k, bias, static_cast<float *>(to));
}

void prelay_attend(void *pool, int64_t dtype, const Span *spans, int64_t count, int64_t layer,
                   const Inputs *in, int64_t heads, int64_t kv_heads, int64_t dim, const Form *form, void *to) {
    Pool &threads = *static_cast<Pool *>(pool);
    if (dtype)
        attend_all<bf16>(threads, spans, count, layer, *in, heads, kv_heads, dim, *form, static_cast<bf16 *>(to));
    else
        attend_all<float>(threads, spans, count, layer, *in, heads, kv_heads, dim, *form, static_cast<float *>(to));
}

void prelay_describe(const float *row, int64_t vocabulary, int64_t token, int64_t count, double *own, int64_t *rank,
                     int64_t *ids, double *logs) {
    static thread_local Chooser chooser;
    chooser.describe(row, vocabulary, token, count, own, rank, ids, logs);
}

void prelay_choose(void *pool, const Draw *draws, int64_t count, int64_t vocabulary, int64_t *tokens) {
    static_cast<Pool *>(pool)->run(int(count), [&](int i) {
        static thread_local Chooser chooser;
        tokens[i] = chooser.choose(draws[i], vocabulary);
    });
}

// Returns 1 when it was left for the sake of `abandon` (not null, and not 0 before some layer), else 0.
int64_t prelay_step(void *pool, int64_t dtype, const Net *net, const Span *spans, int64_t count,
                 const int64_t *ids, int64_t rows, const float *cosines, const float *sines, const int64_t *wanted,
                 int64_t wanted_rows, float *logits, const int32_t *abandon) {
    Pool &threads = *static_cast<Pool *>(pool);
    const auto whole = [&](auto step) { return step.run(ids, rows, wanted, wanted_rows, logits, abandon); };
    if (dtype) return !whole(Step<bf16>(threads, *net, spans, count, cosines, sines));
    return !whole(Step<float>(threads, *net, spans, count, cosines, sines));
}
}
