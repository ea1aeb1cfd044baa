// What Python calls (native/lib.py has the same shapes). dtype: 0 float32, 1 bfloat16. eight: weights are kept in eight
// bits (see bytes.h). No function fails.
#include "choose.h"
#include "decoder.h"

using namespace prelay;

namespace {

template <class E> using Weight = typename FormOf<E>::type::weight;

template <class E, class F, class Rows>
void linear_of(Pool &pool, int64_t rows, const Rows &from, const Packed<F> &weights, const float *bias, E *to) {
    const int n = weights.n;
    multiply<F>(pool, int(rows), from, {weights}, [&](int row, int panel, const float *const (&c)[1]) {
        columns(n, panel, [&](int column, int i, int count) {
            vf sum = load(c[0] + i);
            if (bias) sum += read(bias + column, count);
            write(to + int64_t(row) * n + column, sum, count);
        });
    });
}

template <class E>
void linear(Pool &pool, const E *x, int64_t rows, const Packed<typename FormOf<E>::type> &weights, const float *bias, E *to) {
    typedef typename FormOf<E>::type F;
    typedef typename F::input In;
    static thread_local std::vector<In> copy;
    const int64_t k = weights.k, wide = int64_t(weights.steps()) * F::step;
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
    linear_of(pool, rows, [&](int row) { return from + row * wide; }, weights, bias, to);
}

template <class E> void linear(Pool &pool, const E *x, int64_t rows, const Packed<Bytes> &weights, const float *bias, E *to) {
    static thread_local std::vector<Group> kept;
    const int64_t k = weights.k, wide = groups_of(k);
    kept.resize(rows * wide);
    Group *groups = kept.data();
    each_row(pool, rows, [&](int64_t row) { quantise(x + row * k, int(k), groups + row * wide); });
    linear_of(pool, rows, [&](int row) { return groups + row * wide; }, weights, bias, to);
}

// The linear of a dtype, whose weights are of that dtype or of eight bits.
template <class E>
void linear_as(Pool &pool, int64_t eight, const void *x, int64_t rows, const void *weights, int n, int k,
               const float *bias, void *to) {
    const E *from = static_cast<const E *>(x);
    if (eight)
        linear(pool, from, rows, Packed<Bytes>{static_cast<const uint8_t *>(weights), n, k}, bias, static_cast<E *>(to));
    else
        linear(pool, from, rows, Packed<typename FormOf<E>::type>{static_cast<const Weight<E> *>(weights), n, k}, bias,
               static_cast<E *>(to));
}

template <class F> int64_t bytes_of(int n, int k) {
    return panels_of(n) * Packed<F>{nullptr, n, k}.panel_size() * int64_t(sizeof(typename F::weight));
}

template <class E> void pack_as(int64_t eight, const void *weights, int n, int k, void *to) {
    if (eight)
        pack_bytes(static_cast<const E *>(weights), n, k, static_cast<uint8_t *>(to));
    else
        pack<typename FormOf<E>::type>(static_cast<const Weight<E> *>(weights), n, k, static_cast<Weight<E> *>(to));
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
                  [&](const Part &part, const Part &then) {
                      attend<E>(part, then, layer, form, group, int(dim),
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

int64_t prelay_packed_bytes(int64_t dtype, int64_t eight, int64_t n, int64_t k) {
    if (eight) return bytes_of<Bytes>(int(n), int(k));
    return dtype ? bytes_of<Halves>(int(n), int(k)) : bytes_of<Floats>(int(n), int(k));
}
void prelay_pack(int64_t dtype, int64_t eight, const void *weights, int64_t n, int64_t k, void *to) {
    (dtype ? pack_as<bf16> : pack_as<float>)(eight, weights, int(n), int(k), to);
}

void prelay_linear(void *pool, int64_t dtype, int64_t eight, const void *x, int64_t rows, const void *weights,
                   int64_t n, int64_t k, const float *bias, void *to) {
    Pool &threads = *static_cast<Pool *>(pool);
    (dtype ? linear_as<bf16> : linear_as<float>)(threads, eight, x, rows, weights, int(n), int(k), bias, to);
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
    const auto run = [&](auto step) { return !step.run(ids, rows, wanted, wanted_rows, logits, abandon); };
    if (net->eight && dtype) return run(Step<bf16, Bytes>(threads, *net, spans, count, cosines, sines));
    if (net->eight) return run(Step<float, Bytes>(threads, *net, spans, count, cosines, sines));
    if (dtype) return run(Step<bf16, Halves>(threads, *net, spans, count, cosines, sines));
    return run(Step<float, Floats>(threads, *net, spans, count, cosines, sines));
}
}
