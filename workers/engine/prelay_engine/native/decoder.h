// A whole decoder of the common kind: norm, attention with rotary positions, norm, gated product; added to the input.
#pragma once
#include "attention.h"
#include "bytes.h"

namespace prelay {

// Weights are packed (see linear.h); norms, biases and sinks are float32. What a model lacks is null.
struct Layer {
    const void *qkv, *out, *gate, *up, *down;
    const float *qkv_bias, *out_bias;
    const float *first_norm, *second_norm, *query_norm, *key_norm;
    int64_t window;
};

struct Net {
    int64_t layers, hidden, heads, kv_heads, dim, inner, vocabulary;
    const Layer *layer;
    const void *embedding;  // [vocabulary, hidden], as it is
    const void *head;
    const float *last_norm;
    float norm_eps, scale;
    int64_t gelu;  // 0: SiLU, 1: GELU by tanh
    int64_t eight;  // weights are of eight bits
};

template <class E, class In> inline void put(In *to, vf x, int count) {
    if constexpr (std::is_same<E, In>::value)
        write(to, x, count);
    else {  // rounded as the model's dtype, kept as what is multiplied
        E rounded[LANES];
        store(rounded, x);
        write(to, load(rounded), count);
    }
}

// x / sqrt(mean(x²) + eps) · weight, rounded once.
template <class E, class From, class In> void norm(const From *x, const float *weight, float eps, int n, In *to) {
    vf squares = {};
    by_lanes(n, [&](int i, int count) {
        vf value = read(x + i, count);
        squares += value * value;
    });
    const float factor = 1.0f / std::sqrt(sum(squares) / float(n) + eps);
    by_lanes(n, [&](int i, int count) { put<E>(to + i, read(x + i, count) * factor * read(weight + i, count), count); });
}

inline vf activation(vf x, bool gelu) {
    if (!gelu) return x / (1.0f + exp(-x));
    return x * 0.5f * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// The two halves of a head are turned against each other by the angles whose cosines and sines are given.
template <class E> void turn(E *x, const float *cosines, const float *sines, int dim) {
    const int half = dim / 2;
    by_lanes(half, [&](int i, int count) {
        vf a = read(x + i, count), b = read(x + half + i, count), c = read(cosines + i, count), s = read(sines + i, count);
        write(x + i, a * c - b * s, count);
        write(x + half + i, b * c + a * s, count);
    });
}

// Rows of one step on their way through the layers; memory that is kept from step to step.
template <class E> struct Rows {
    typedef typename FormOf<E>::type::input In;
    std::vector<E> x, qkv;
    std::vector<In> normed, seen, mixed;
    std::vector<Group> groups;  // of what is multiplied next, in eight bits
    void resize(const Net &net, int64_t rows) {
        x.resize(rows * net.hidden);
        normed.resize(rows * net.hidden);
        qkv.resize(rows * (net.heads + 2 * net.kv_heads) * net.dim);
        seen.resize(rows * net.heads * net.dim);
        mixed.resize(rows * net.inner);
    }
};

// `F` is the form of the weights; what is between products, and keys and values, are of `E`.
template <class E, class F> class Step {
  public:
    typedef typename FormOf<E>::type::input In;
    typedef typename F::weight W;

    Step(Pool &pool, const Net &net, const Span *spans, int64_t count, const float *cosines,
         const float *sines)
        : pool_(pool), net_(net), spans_(spans), count_(count), cosines_(cosines), sines_(sines) {}

    // Whether it ran to its end: it is left before a layer when another thread has made `abandon` other than 0.
    bool run(const int64_t *ids, int64_t rows, const int64_t *wanted, int64_t wanted_rows, float *logits,
             const int32_t *abandon) {
        memory().resize(net_, rows > wanted_rows ? rows : wanted_rows);
        rows_ = rows;
        each_row(pool_, rows, [&](int64_t row) {
            std::memcpy(x(row), static_cast<const E *>(net_.embedding) + ids[row] * net_.hidden, net_.hidden * sizeof(E));
        });
        for (int64_t i = 0; i < net_.layers; i++) {
            if (abandon && __atomic_load_n(abandon, __ATOMIC_RELAXED)) return false;
            attention(i);
            if (i + 1 == net_.layers) leave(wanted, wanted_rows);  // no other row goes on to anything
            add(net_.layer[i].out, net_.layer[i].out_bias, seen(0), net_.heads * net_.dim);
            gated(net_.layer[i]);
        }
        each_row(pool_, rows_, [&](int64_t row) {
            norm<E>(x(row), net_.last_norm, net_.norm_eps, int(net_.hidden), normed(row));
        });
        const int vocabulary = int(net_.vocabulary);
        product<1>(normed(0), net_.hidden, {packed(net_.head, vocabulary, net_.hidden)},
                   [&](int row, int panel, const float *const (&c)[1]) {
                       float *to = logits + int64_t(row) * vocabulary;
                       columns(vocabulary, panel, [&](int column, int i, int n) { write(to + column, load(c[0] + i), n); });
                   });
        return true;
    }

  private:
    static Rows<E> &memory() {
        static thread_local Rows<E> found;
        return found;
    }
    E *x(int64_t row) const { return rows_memory_.x.data() + row * net_.hidden; }
    In *normed(int64_t row) const { return rows_memory_.normed.data() + row * net_.hidden; }
    E *qkv(int64_t row) const { return rows_memory_.qkv.data() + row * width(); }
    In *seen(int64_t row) const { return rows_memory_.seen.data() + row * net_.heads * net_.dim; }
    In *mixed(int64_t row) const { return rows_memory_.mixed.data() + row * net_.inner; }
    int64_t width() const { return (net_.heads + 2 * net_.kv_heads) * net_.dim; }
    Packed<F> packed(const void *data, int64_t n, int64_t k) const {
        return {static_cast<const W *>(data), int(n), int(k)};
    }

    void attention(int64_t index) {
        const Layer &layer = net_.layer[index];
        const int group = int(net_.heads / net_.kv_heads), dim = int(net_.dim), wide = int(width());
        each_row(pool_, rows_, [&](int64_t row) {
            norm<E>(x(row), layer.first_norm, net_.norm_eps, int(net_.hidden), normed(row));
        });
        product<1>(normed(0), net_.hidden, {packed(layer.qkv, wide, net_.hidden)},
                   [&](int row, int panel, const float *const (&c)[1]) {
                       columns(wide, panel, [&](int column, int i, int n) {
                           vf sum = load(c[0] + i);
                           if (layer.qkv_bias) sum += read(layer.qkv_bias + column, n);
                           write(qkv(row) + column, sum, n);
                       });
                   });
        for_each_row_of_spans([&](const Span &span, int64_t i) { place(index, span, i); });
        const Form form{net_.scale, 0, layer.window, nullptr};
        for_each_part(pool_, spans_, int(count_), int(net_.kv_heads), group,
                      [&](const Part &part, const Part &then) {
                          attend<E>(part, then, index, form, group, dim,
                                    [&](int64_t row, int head) { return qkv(row) + int64_t(head) * dim; },
                                    [&](int64_t row, int head, const auto &found) {
                                        In *to_row = seen(row) + int64_t(head) * dim;
                                        by_lanes(dim, [&](int d, int n) { put<E>(to_row + d, load(found(d)), n); });
                                    });
                      });
    }

    // From now on there are only the rows `wanted`, in their order.
    void leave(const int64_t *wanted, int64_t count) {
        const int64_t hidden = net_.hidden, width = net_.heads * net_.dim;
        std::vector<E> x_left(count * hidden);
        std::vector<In> seen_left(count * width);
        for (int64_t i = 0; i < count; i++) {
            std::memcpy(x_left.data() + i * hidden, x(wanted[i]), hidden * sizeof(E));
            std::memcpy(seen_left.data() + i * width, seen(wanted[i]), width * sizeof(In));
        }
        std::memcpy(rows_memory_.x.data(), x_left.data(), x_left.size() * sizeof(E));
        std::memcpy(rows_memory_.seen.data(), seen_left.data(), seen_left.size() * sizeof(In));
        rows_ = count;
    }

    void gated(const Layer &layer) {
        const int inner = int(net_.inner);
        each_row(pool_, rows_, [&](int64_t row) {
            norm<E>(x(row), layer.second_norm, net_.norm_eps, int(net_.hidden), normed(row));
        });
        product<2>(normed(0), net_.hidden,
                   {packed(layer.gate, inner, net_.hidden), packed(layer.up, inner, net_.hidden)},
                   [&](int row, int panel, const float *const (&c)[2]) {
                       columns(inner, panel, [&](int column, int i, int n) {
                           put<E>(mixed(row) + column, activation(load(c[0] + i), net_.gelu) * load(c[1] + i), n);
                       });
                   });
        add(layer.down, nullptr, mixed(0), net_.inner);
    }

    // x += from [rows, k] · weights + bias
    void add(const void *weights, const float *bias, const In *from, int64_t k) {
        const int hidden = int(net_.hidden);
        product<1>(from, k, {packed(weights, hidden, k)}, [&](int row, int panel, const float *const (&c)[1]) {
            columns(hidden, panel, [&](int column, int i, int n) {
                vf sum = load(c[0] + i) + read(x(row) + column, n);
                if (bias) sum += read(bias + column, n);
                write(x(row) + column, sum, n);
            });
        });
    }

    // `multiply` of all rows of `from` [rows, k].
    template <int COUNT, class Give>
    void product(const In *from, int64_t k, const Packed<F> (&w)[COUNT], const Give &give) {
        if constexpr (std::is_same<F, Bytes>::value) {
            const int64_t wide = groups_of(k);
            rows_memory_.groups.resize(rows_ * wide);
            Group *groups = rows_memory_.groups.data();
            each_row(pool_, rows_, [&](int64_t row) { quantise(from + row * k, int(k), groups + row * wide); });
            multiply<F>(pool_, int(rows_), [&](int row) { return groups + row * wide; }, w, give);
        } else
            multiply<F>(pool_, int(rows_), [&](int row) { return from + row * k; }, w, give);
    }

    template <class Body> void for_each_row_of_spans(const Body &body) {
        span_of_.resize(rows_);
        for (int64_t s = 0; s < count_; s++)
            for (int64_t i = 0; i < spans_[s].length; i++) span_of_[spans_[s].row + i] = &spans_[s];
        each_row(pool_, rows_, [&](int64_t row) { body(*span_of_[row], row - span_of_[row]->row); });
    }

    // Norm and turn queries and keys of one row, and put its keys and values into the store.
    void place(int64_t index, const Span &span, int64_t i) {
        const Layer &layer = net_.layer[index];
        const int dim = int(net_.dim);
        const int64_t row = span.row + i, heads = net_.heads, kv_heads = net_.kv_heads;
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            E *at_head = qkv(row) + head * dim;
            const float *weight = head < heads ? layer.query_norm : layer.key_norm;
            if (weight) norm<E>(at_head, weight, net_.norm_eps, dim, at_head);
            turn(at_head, cosines_ + row * dim, sines_ + row * dim, dim);
        }
        for (int64_t head = 0; head < kv_heads; head++)
            for (int kind = 0; kind < 2; kind++)
                std::memcpy(at<E>(span, index, kind, int(head), span.start + i),
                            qkv(row) + (heads + kind * kv_heads + head) * dim, dim * sizeof(E));
    }

    Pool &pool_;
    const Net &net_;
    const Span *spans_;
    const int64_t count_;
    const float *cosines_, *sines_;
    int64_t rows_ = 0;
    std::vector<const Span *> span_of_;
    Rows<E> &rows_memory_ = memory();
};

}  // namespace prelay
