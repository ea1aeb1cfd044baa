// One token out of a row of logits: a function of the row, the settings and one number in [0, 1).
#pragma once
#include "pool.h"
#include "vec.h"
#include <algorithm>
#include <cmath>
#include <functional>

namespace prelay {

struct Draw {
    const float *row;  // [vocabulary]
    double point;      // in [0, 1): where among the weights, laid side by side by rising id
    double top_p;
    int64_t top_k;  // 0: all
    float temperature, min_p;
};

// Running sums are kept for each so many weights, added up in double precision, in one order.
const int SUM_BLOCK = 64;
// How many of the heaviest are sorted before all of them are: most nuclei are smaller.
const int64_t FIRST_SORT = 512;

class Chooser {
  public:
    // The token, or -1 for a row that has a NaN or no finite peak.
    int64_t choose(const Draw &draw, int64_t vocabulary) {
        const int64_t best = peak_of(draw.row, vocabulary);
        if (best < 0) return -1;
        if (draw.temperature == 0 || draw.top_k == 1) return best;
        weigh(draw, vocabulary, draw.row[best]);
        const bool cut = (draw.top_k > 0 && draw.top_k < vocabulary) || draw.top_p < 1;
        if (cut) keep(kept(draw, vocabulary));
        return pick(draw.point);
    }

  private:
    // Of equals the first.
    static int64_t peak_of(const float *row, int64_t n) {
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

    // weights_: e^((logit - peak) / temperature); what weighs less than min_p of the heaviest weighs nothing.
    void weigh(const Draw &draw, int64_t n, float peak) {
        weights_.assign((n + SUM_BLOCK - 1) / SUM_BLOCK * SUM_BLOCK, 0.0f);
        const float coldest = 1.17549435e-38f, temperature = std::max(draw.temperature, coldest);
        const auto one = [&](vf x) {
            vf weight = exp((x - peak) / temperature);
            return weight < draw.min_p ? vf{} : weight;
        };
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) store(weights_.data() + i, one(load(draw.row + i)));
        if (i < n) store_some(weights_.data() + i, one(load_some(draw.row + i, int(n - i))), int(n - i));
    }

    // How many tokens top_k and then top_p leave: the fewest that make up the share, at least one.
    int64_t kept(const Draw &draw, int64_t n) {
        const int64_t limit = draw.top_k > 0 ? std::min(draw.top_k, n) : n;
        if (draw.top_p >= 1) return limit;
        sorted_.assign(weights_.begin(), weights_.begin() + n);
        if (limit < n) {
            sort_heaviest(limit);
            double all = 0;
            for (int64_t i = 0; i < limit; i++) all += sorted_[i];
            return nucleus(limit, draw.top_p * all);
        }
        const double target = draw.top_p * total();
        const int64_t first = std::min(limit, FIRST_SORT);
        sort_heaviest(first);
        const int64_t found = nucleus(first, target);
        if (found <= first) return std::min(found, limit);
        sort_heaviest(limit);
        return std::min(nucleus(limit, target), limit);
    }

    void sort_heaviest(int64_t count) {
        if (count < int64_t(sorted_.size()))
            std::nth_element(sorted_.begin(), sorted_.begin() + count, sorted_.end(), std::greater<float>());
        std::sort(sorted_.begin(), sorted_.begin() + count, std::greater<float>());
    }

    // How many of the `count` sorted reach `target`; count + 1 if all do not.
    int64_t nucleus(int64_t count, double target) const {
        double sum = 0;
        for (int64_t i = 0; i < count; i++) {
            sum += sorted_[i];
            if (sum >= target) return i + 1;
        }
        return count + 1;
    }

    // All but the `count` heaviest weigh nothing. Of equals the lower id stays.
    void keep(int64_t count) {
        if (count >= int64_t(weights_.size())) return;
        sorted_ = weights_;
        std::nth_element(sorted_.begin(), sorted_.begin() + (count - 1), sorted_.end(), std::greater<float>());
        const float bar = sorted_[count - 1];
        int64_t ties = count;
        for (float weight : weights_) ties -= weight > bar;
        for (float &weight : weights_)
            if (weight < bar || (weight == bar && ties-- <= 0)) weight = 0;
    }

    double block_sum(int64_t block) const {
        const float *from = weights_.data() + block * SUM_BLOCK;
        double sums[8] = {};
        for (int i = 0; i < SUM_BLOCK; i += 8)
            for (int j = 0; j < 8; j++) sums[j] += from[i + j];
        return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    }

    double total() const {
        double sum = 0;
        for (int64_t block = 0; block < int64_t(weights_.size()) / SUM_BLOCK; block++) sum += block_sum(block);
        return sum;
    }

    int64_t pick(double point) const {
        const double all = total(), target = std::min(point * all, std::nextafter(all, 0.0));
        double before = 0;
        int64_t block = 0, blocks = int64_t(weights_.size()) / SUM_BLOCK, last = -1;
        for (; block + 1 < blocks; block++) {
            const double sum = before + block_sum(block);
            if (sum > target) break;
            before = sum;
        }
        for (int64_t i = block * SUM_BLOCK; i < (block + 1) * SUM_BLOCK; i++) {
            before += weights_[i];
            if (weights_[i] > 0) last = i;
            if (before > target) return i;
        }
        return last;  // two ways of adding the same weights may differ in the last bit
    }

    std::vector<float> weights_, sorted_;
};

}  // namespace prelay
