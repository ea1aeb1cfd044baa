// One token out of a row of logits, and what is said of it: functions of the row, the settings and one number.
#pragma once
#include "vec.h"
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace prelay {

struct Draw {
    const float *row;  // [vocabulary]
    double point;      // in [0, 1): where among the weights, laid side by side by rising id
    double top_p;
    int64_t top_k;  // 0: all
    float temperature, min_p;
};

// Numbers that are added up, or looked through for the largest, at a time.
const int BLOCK = 64;

// Added up in double precision, in one order.
inline double block_sum(const float *from) {
    double sums[8] = {};
    for (int i = 0; i < BLOCK; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += from[i + j];
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// Where the largest stands, of equals the first; -1 if there is a NaN or it is infinite.
inline int64_t peak_of(const float *row, int64_t n) {
    vf high = splat(row[0]);
    vi odd = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf x = load(row + i);
        odd |= x != x;
        high = larger(high, x);
    }
    float peak = largest(high);
    bool nan = false;
    for (int lane = 0; lane < LANES; lane++) nan |= odd[lane] != 0;
    for (; i < n; i++) {
        nan |= row[i] != row[i];
        if (row[i] > peak) peak = row[i];
    }
    if (nan || !std::isfinite(peak)) return -1;
    return std::find(row, row + n, peak) - row;
}

class Chooser {
  public:
    // The token, or -1 for a row that has a NaN or no finite peak.
    int64_t choose(const Draw &draw, int64_t n) {
        const int64_t best = peak_of(draw.row, n);
        if (best < 0) return -1;
        if (draw.temperature == 0 || draw.top_k == 1) return best;
        const float least = draw.min_p, temperature = std::max(draw.temperature, 1.17549435e-38f);
        weigh(draw.row, n, draw.row[best], temperature, least);
        if ((draw.top_k > 0 && draw.top_k < n) || draw.top_p < 1) cut(draw, n);
        return pick(draw.point);
    }

    // log p(token) and its rank, and the `count` likeliest with theirs; of equals the lower id ranks first.
    void describe(const float *row, int64_t n, int64_t token, int64_t count, double *own, int64_t *rank, int64_t *ids,
                  double *logs) {
        const int64_t best = peak_of(row, n);
        if (best < 0) {  // no distribution
            *own = std::nan("");
            *rank = 1;
            for (int64_t i = 0; i < count; i++) ids[i] = i, logs[i] = *own;
            return;
        }
        const float peak = row[best];
        weigh(row, n, peak, 1.0f, 0.0f);
        const double all = std::log(total());
        const auto log_of = [&](int64_t id) { return double(row[id]) - double(peak) - all; };
        *own = log_of(token);
        *rank = 1;
        const float mine = row[token];
        int64_t above = 0;
        for (int64_t i = 0; i < n; i++) above += row[i] > mine;
        for (int64_t i = 0; i < token; i++) above += row[i] == mine;
        *rank += above;
        order_.clear();
        const float least = least_of(row, n, count);
        for (int64_t i = 0; i < n; i++)
            if (row[i] >= least) order_.push_back(i);
        const auto before = [&](int64_t a, int64_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; };
        std::partial_sort(order_.begin(), order_.begin() + count, order_.end(), before);
        for (int64_t i = 0; i < count; i++) ids[i] = order_[i], logs[i] = log_of(order_[i]);
    }

  private:
    // weights_: e^((logit - peak) / temperature), by whole blocks; what weighs less than `least` weighs nothing.
    void weigh(const float *row, int64_t n, float peak, float temperature, float least) {
        weights_.resize((n + BLOCK - 1) / BLOCK * BLOCK);
        std::fill(weights_.begin() + n, weights_.end(), 0.0f);
        const auto one = [&](vf x) {
            vf weight = exp((x - peak) / temperature);
            return weight < least ? vf{} : weight;
        };
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) store(weights_.data() + i, one(load(row + i)));
        if (i < n) store_some(weights_.data() + i, one(load_some(row + i, int(n - i))), int(n - i));
    }

    // What at least `count` of the numbers reach, and few others: the count-th largest of the blocks' largest.
    float least_of(const float *row, int64_t n, int64_t count) {
        if (count > n / BLOCK || count < 1) return -std::numeric_limits<float>::infinity();
        peaks_.clear();
        for (int64_t i = 0; i + BLOCK <= n; i += BLOCK) {
            vf high = load(row + i);
            for (int j = LANES; j < BLOCK; j += LANES) high = larger(high, load(row + i + j));
            peaks_.push_back(largest(high));
        }
        std::nth_element(peaks_.begin(), peaks_.begin() + (count - 1), peaks_.end(), std::greater<float>());
        return peaks_[count - 1];
    }

    // sorted_: all weights of at least `least`, the heaviest first.
    void sort_from(float least) {
        sorted_.clear();
        for (float weight : weights_)
            if (weight >= least) sorted_.push_back(weight);
        std::sort(sorted_.begin(), sorted_.end(), std::greater<float>());
    }

    // Leave what top_k and then top_p leave: the fewest that make up the share, at least one.
    void cut(const Draw &draw, int64_t n) {
        int64_t count = draw.top_k > 0 ? std::min(draw.top_k, n) : n;
        double all;
        if (count < n) {
            sort_from(least_of(weights_.data(), int64_t(weights_.size()), count));
            count = std::min(count, int64_t(sorted_.size()));
            all = 0;
            for (int64_t i = 0; i < count; i++) all += sorted_[i];
        } else {  // all that weigh less make up less than what top_p leaves out
            all = total();
            sort_from(float((1 - draw.top_p) * all / double(2 * n)));
            count = std::min(count, int64_t(sorted_.size()));
        }
        if (draw.top_p < 1) {
            double sum = 0;
            for (int64_t i = 0; i < count; i++) {
                sum += sorted_[i];
                if (sum >= draw.top_p * all) count = i + 1;
            }
        }
        keep(std::max<int64_t>(count, 1));
    }

    // All but the `count` heaviest weigh nothing. Of equals the lower id stays.
    void keep(int64_t count) {
        const float bar = sorted_[count - 1];
        int64_t ties = 0;
        for (int64_t i = count; i-- > 0 && sorted_[i] == bar;) ties++;
        for (float &weight : weights_) weight = weight < bar ? 0 : weight;
        if (count < int64_t(sorted_.size()) && sorted_[count] == bar)
            for (float &weight : weights_)
                if (weight == bar && ties-- <= 0) weight = 0;
    }

    double total() const {
        double sum = 0;
        for (size_t i = 0; i < weights_.size(); i += BLOCK) sum += block_sum(weights_.data() + i);
        return sum;
    }

    int64_t pick(double point) const {
        const double all = total(), target = std::min(point * all, std::nextafter(all, 0.0));
        double before = 0;
        size_t first = 0;
        int64_t last = -1;
        for (; first + BLOCK < weights_.size(); first += BLOCK) {
            const double sum = before + block_sum(weights_.data() + first);
            if (sum > target) break;
            before = sum;
        }
        for (size_t i = first; i < first + BLOCK; i++) {
            before += weights_[i];
            if (weights_[i] > 0) last = int64_t(i);
            if (before > target) return int64_t(i);
        }
        if (last >= 0) return last;  // two ways of adding the same weights may differ in the last bit
        for (size_t i = 0; i < first; i++)
            if (weights_[i] > 0) last = int64_t(i);
        return last;
    }

    std::vector<float> weights_, sorted_, peaks_;
    std::vector<int64_t> order_;
};

}  // namespace prelay
