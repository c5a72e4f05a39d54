#include "window.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace lokakern {
namespace {

// As `torch.inference_mode(False)` and `torch.no_grad()`.
struct Unrecorded {
  c10::InferenceMode inference{false};
  at::NoGradGuard no_grad;
};

at::Tensor largest(const at::Tensor& x, int64_t axis) {
  const int64_t axes[] = {axis};
  return at::linalg_vector_norm(x, std::numeric_limits<double>::infinity(), axes);
}

// As `lokakern.probe.statistics.coprime_from`.
int64_t coprime_from(int64_t number, int64_t other) {
  while (std::gcd(number, other) > 1) ++number;
  return number;
}

}  // namespace

std::vector<OperandSample> take_samples(const std::vector<at::Tensor>& operands,
                                        const std::vector<at::Tensor>& indices,
                                        const std::vector<Part>& parts) {
  TORCH_CHECK_VALUE(operands.size() == indices.size() && operands.size() == parts.size(),
                    "take_samples: lists of several lengths");
  const Unrecorded now;
  std::vector<OperandSample> found;
  found.reserve(operands.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    const at::Tensor x = operands[i].detach().view({-1, operands[i].size(-1)});
    const auto& [first, step] = parts[i];
    const at::Tensor part = step == 1 ? x : x.slice(0, first, std::nullopt, step);
    at::Tensor rows = x.index_select(0, indices[i]);
    found.push_back({largest(part, 1), largest(part, 0), std::move(rows)});
  }
  return found;
}

std::vector<std::pair<at::Tensor, at::Tensor>> sizes_of(const std::vector<at::Tensor>& matrices) {
  const Unrecorded now;
  std::vector<std::pair<at::Tensor, at::Tensor>> found;
  found.reserve(matrices.size());
  for (const auto& x : matrices) found.emplace_back(largest(x, 1), largest(x, 0));
  return found;
}

at::Tensor norms_of_rows(const at::Tensor& matrix) {
  const Unrecorded now;
  const int64_t axes[] = {1};
  return at::linalg_vector_norm(matrix.detach(), 2.0, axes);
}

std::vector<at::Tensor> as_tensors(const std::vector<int64_t>& numbers) {
  const Unrecorded now;
  std::vector<at::Tensor> found;
  found.reserve(numbers.size());
  for (const int64_t number : numbers) found.push_back(at::scalar_tensor(number, at::kLong));
  return found;
}

WindowNumbers::WindowNumbers(const std::vector<std::vector<at::Tensor>>& operands,
                             const std::vector<std::vector<at::Tensor>>& weights,
                             const WindowLimits& limits)
    : limits_(limits), operands_(operands.size()), weights_(weights.size()) {
  const Unrecorded now;
  // By type: what ATen joins, of one type, takes one launch.
  struct Joined {
    at::ScalarType dtype;
    std::vector<at::Tensor> tensors;
    std::vector<std::pair<Pieces*, int64_t>> takers;  // and how many numbers each takes
  };
  std::vector<Joined> joined;
  const auto of = [](auto& groups, auto fits) -> auto& {
    const auto found = std::find_if(groups.begin(), groups.end(), fits);
    return found == groups.end() ? groups.emplace_back() : *found;
  };
  const auto group_of = [&](const at::Tensor& x) -> Joined& {
    Joined& group = of(joined, [&](const Joined& one) { return one.dtype == x.scalar_type(); });
    group.dtype = x.scalar_type();
    return group;
  };
  const auto take = [&](const at::Tensor& x, Pieces& taker) {
    Joined& group = group_of(x);
    group.tensors.push_back(x);
    group.takers.emplace_back(&taker, x.numel());
  };
  struct Matrices {  // of one form, which are worked on together
    int64_t rows = 0;
    at::ScalarType dtype;
    std::vector<std::pair<Operand*, at::Tensor>> all;
  };
  std::vector<Matrices> matrices;

  for (size_t i = 0; i < operands.size(); ++i) {
    Operand& operand = operands_[i];
    const auto calls = static_cast<int64_t>(operands[i].size() / 3);
    for (size_t call = 0; call + 2 < operands[i].size(); call += 3) {
      const at::Tensor &row_sizes = operands[i][call], &column_sizes = operands[i][call + 1],
                       &rows = operands[i][call + 2];
      take(row_sizes, operand.rows);
      take(column_sizes, operand.columns);
      // Some elements, evenly spread over rows and columns.
      const int64_t most = std::max<int64_t>(limits.elements / calls, 1), all = rows.numel();
      const int64_t stride = coprime_from((all + most - 1) / most, rows.size(1));
      take(rows.reshape({-1}).slice(0, 0, std::nullopt, stride), operand.elements);
      operand.sampled_rows += rows.size(0);
      Matrices& group = of(matrices, [&](const Matrices& one) {
        return one.rows == rows.size(0) && one.dtype == rows.scalar_type();
      });
      group.rows = rows.size(0);
      group.dtype = rows.scalar_type();
      group.all.emplace_back(&operand, rows);
    }
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    take(weights[i].at(0), weights_[i].rows);
    take(weights[i].at(1), weights_[i].columns);
  }
  for (const Matrices& group : matrices) {
    for (size_t begin = 0, end = 0; begin < group.all.size(); begin = end) {
      std::vector<at::Tensor> batch;
      int64_t elements = 0;
      for (; end < group.all.size(); ++end) {
        const at::Tensor& x = group.all[end].second;
        if (end > begin && elements + x.numel() > limits.most_elements) break;
        elements += x.numel();
        batch.push_back(x);
      }
      const auto [deviation, mean] = at::std_mean(at::cat(batch, 1).to(at::kDouble), 0, false);
      for (const auto& [x, pieces] :
           {std::pair{deviation, &Operand::deviations}, std::pair{mean, &Operand::means}}) {
        Joined& all = group_of(x);
        all.tensors.push_back(x);
        for (size_t i = begin; i < end; ++i)
          all.takers.emplace_back(&(group.all[i].first->*pieces), group.all[i].second.size(1));
      }
    }
  }

  int64_t count = 0;
  for (const Joined& group : joined)
    for (const auto& [pieces, many] : group.takers) {
      pieces->push_back({count, many});
      count += many;
    }
  if (joined.empty()) return;
  const bool is_apart = !joined[0].tensors[0].is_cpu();
  values_ = at::empty({count}, at::TensorOptions().dtype(at::kFloat).pinned_memory(is_apart));
  int64_t first = 0;
  for (const Joined& group : joined) {
    const at::Tensor flat = at::cat(group.tensors).to(at::kFloat);
    values_.narrow(0, first, flat.numel()).copy_(flat, /*non_blocking=*/true);
    first += flat.numel();
  }
}

// Magnitudes of an operand, but for zeros, of which few are asked for by their place.
//
// As integers their bits are in the same order. One pass counts them by the highest bits; to find
// one, only those are put in order that share its bits.
class WindowNumbers::Magnitudes {
 public:
  Magnitudes(const float* values, const Pieces& pieces, double least)
      : values_(values), pieces_(pieces), counts_(kInfinity >> kShift) {
    least_ = bits_of(static_cast<float>(least));
    int64_t zeros = 0;
    for_each([&](uint32_t bits) {
      ++all_;
      if (bits >= kInfinity) {
        ++beyond_;
      } else if (bits < least_) {
        ++zeros;
      } else {
        ++counts_[bits >> kShift];
      }
    });
    count_ = all_ - beyond_ - zeros;
  }

  double count() const { return static_cast<double>(count_); }

  double share_beyond() const {
    return static_cast<double>(beyond_) / static_cast<double>(all_);
  }

  // The one at a place in ascending order; the least size where there is none.
  double at(double place) const {
    if (!count_) return number_of(least_);
    int64_t before = std::min(static_cast<int64_t>(std::max(place, 0.0)), count_ - 1);
    uint32_t bin = 0;
    while (before >= counts_[bin]) before -= counts_[bin++];
    std::vector<uint32_t> some;
    some.reserve(counts_[bin]);
    for_each([&](uint32_t bits) {
      if (bits >> kShift == bin && bits >= least_) some.push_back(bits);
    });
    std::nth_element(some.begin(), some.begin() + before, some.end());
    return number_of(some[before]);
  }

  double at_share(double share) const { return at(std::nearbyint(share * (count() - 1.0))); }

 private:
  static constexpr uint32_t kInfinity = 0x7f800000, kShift = 19;  // 16 bins an octave

  static uint32_t bits_of(float x) {
    uint32_t bits = 0;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
  }

  static double number_of(uint32_t bits) {
    float x = 0.0f;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }

  template <class Act>
  void for_each(Act act) const {
    for (const auto& [first, count] : pieces_)
      for (const float* x = values_ + first; x != values_ + first + count; ++x) act(bits_of(*x));
  }

  const float* values_;
  const Pieces& pieces_;
  std::vector<int64_t> counts_;  // by the highest bits
  uint32_t least_ = 0;
  int64_t all_ = 0, beyond_ = 0, count_ = 0;
};

std::vector<double> WindowNumbers::compute() const {
  const float* const values = values_.defined() ? values_.const_data_ptr<float>() : nullptr;
  std::vector<double> found, beyond, means, sampled;
  const auto add_spread = [&](double high, double low) { found.push_back(std::log2(high / low)); };
  const auto ends = [&](const Pieces& pieces, double top) {
    const Magnitudes some(values, pieces, limits_.least_size);
    add_spread(some.at_share(top), some.at_share(0.5));
  };
  for (const Operand& one : operands_) {
    const Magnitudes some(values, one.rows, limits_.least_size);
    const double share = std::clamp(limits_.fewest_below / std::max(some.count(), 1.0),
                                    limits_.least_share, 0.25);
    add_spread(some.at(std::ceil((1.0 - share) * some.count()) - 1.0),
               some.at(std::ceil(share * some.count()) - 1.0));
    beyond.push_back(some.share_beyond());
  }
  for (const Operand& one : weights_) ends(one.rows, 1.0);
  for (const Operand& one : operands_) ends(one.columns, 1.0);
  for (const Operand& one : weights_) ends(one.columns, 1.0);
  for (const Operand& one : operands_) ends(one.elements, 0.999);
  const auto sum_of_squares = [&](const Pieces& pieces) {  // in order, as NumPy's cumsum
    double sum = 0.0;
    for (const auto& [first, count] : pieces)
      for (const float* x = values + first; x != values + first + count; ++x)
        if (std::isfinite(*x)) sum += static_cast<double>(*x) * static_cast<double>(*x);
    return sum;
  };
  for (const Operand& one : operands_) {
    const double variance = sum_of_squares(one.deviations), square = sum_of_squares(one.means);
    const double ratio = variance > limits_.least_variance * square ? square / variance : 0.0;
    means.push_back(0.5 * std::log2(1.0 + ratio));
    sampled.push_back(static_cast<double>(one.sampled_rows));
  }
  for (const auto* some : {&beyond, &means, &beyond, &sampled})
    found.insert(found.end(), some->begin(), some->end());
  return found;
}

}  // namespace lokakern
