#include "window.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>

#include "driver.h"

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
  const auto is_matrix = [](const at::Tensor& x) { return x.dim() == 2; };
  if (std::all_of(matrices.begin(), matrices.end(), is_matrix)) {
    const std::vector<Places> all(matrices.size(), Places{0, 1, 0, 1, 0});
    if (const auto pass = WindowPass::take(matrices, all, 0)) {
      for (size_t i = 0; i < matrices.size(); ++i) {
        const auto [rows, columns, kept] = pass->tensors(i);
        found.emplace_back(rows, columns);
      }
      return found;
    }
  }
  for (const auto& x : matrices) found.emplace_back(largest(x, 1), largest(x, 0));
  return found;
}

// --- passes

namespace {

// As in `kernels/cuda/window_samples.cu`.
struct Matrix {
  const void* x;
  float *row_sizes, *column_sizes;
  void* kept;
  float *elements, *deviations, *means;
  int64_t rows, kept_first, kept_step;
  int32_t columns, kind, read_first, read_step, read_rows, kept_rows, element_step, is_whole;
  uint32_t tiles, end;
};
static_assert(sizeof(Matrix) == 120);

constexpr at::ScalarType kKinds[] = {at::kBFloat16, at::kHalf, at::kFloat};
constexpr int64_t kStripColumns = 32, kThreads = 256, kRowAlignment = 16;

struct Kernel {
  void* function = nullptr;
  int64_t tile_rows, span, most_kept, most_matrices;
  std::string failure;  // of a launch, after which it is launched no more
};

std::mutex kernels_mutex;

std::map<int, Kernel>& kernels() {
  static auto& found = *new std::map<int, Kernel>;  // a thread may outlive it
  return found;
}

void keep_kernel(int device, void* function, const KernelSizes& sizes) {
  const auto [tile_rows, span, most_kept, most_matrices] = sizes;
  TORCH_CHECK_VALUE(tile_rows > 0 && span > 0 && most_kept > 0 && most_matrices > 0 &&
                        most_matrices * static_cast<int64_t>(sizeof(Matrix)) <= kMostParameterBytes,
                    "the kernel of samples has sizes that no launch has");
  const std::lock_guard lock(kernels_mutex);
  kernels()[device] = {function, tile_rows, span, most_kept, most_matrices, {}};
}

int64_t parts_of(int64_t count, int64_t part) { return (count + part - 1) / part; }

// The step between elements that are picked, evenly spread over rows and columns.
int64_t element_step_of(int64_t all, int64_t columns, int64_t most) {
  return coprime_from(std::max<int64_t>(parts_of(all, std::max<int64_t>(most, 1)), 1), columns);
}

}  // namespace

void load_window_kernel(int device, std::string_view cubin, const KernelSizes& sizes) {
  const PrimaryContext current(device);
  keep_kernel(device, load_kernel(cubin, "window_samples", 0, 1, device), sizes);
}

void use_window_kernel(int device, uint64_t function, const KernelSizes& sizes) {
  keep_kernel(device, reinterpret_cast<void*>(function), sizes);
}

std::string window_kernel_failure(int device) {
  const std::lock_guard lock(kernels_mutex);
  const auto found = kernels().find(device);
  return found == kernels().end() ? std::string() : found->second.failure;
}

std::shared_ptr<WindowPass> WindowPass::take(const std::vector<at::Tensor>& matrices,
                                             const std::vector<Places>& places,
                                             int64_t elements) {
  TORCH_CHECK_VALUE(matrices.size() == places.size(), "take_pass: lists of several lengths");
  if (matrices.empty()) return nullptr;
  const c10::Device device = matrices[0].device();
  Kernel kernel;
  {
    const std::lock_guard lock(kernels_mutex);
    const auto found = kernels().find(device.index());
    if (found != kernels().end()) kernel = found->second;
  }
  if (!kernel.function || !has_no_modes()) return nullptr;

  constexpr int64_t kMostInt = std::numeric_limits<int32_t>::max();
  const auto pass = std::make_shared<WindowPass>();
  pass->elements_ = elements;
  std::vector<Matrix> table;
  table.reserve(matrices.size());
  int64_t sizes = 0, others = 0, bytes = 0;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const at::Tensor& x = matrices[i];
    const auto [read_first, read_step, kept_first, kept_step, kept_rows] = places[i];
    const auto kind = std::find(std::begin(kKinds), std::end(kKinds), x.scalar_type());
    if (x.device() != device || kind == std::end(kKinds) || !is_plain_tensor(x) ||
        !x.is_contiguous() || !x.dim() || !x.numel())
      return nullptr;
    const int64_t columns = x.size(-1), rows = x.numel() / columns;
    const int64_t read_rows = parts_of(rows - read_first, read_step);
    if (columns > kMostInt / kernel.most_kept || read_rows > kMostInt || read_step > kMostInt ||
        kept_rows > kernel.most_kept || read_rows < 1)
      return nullptr;
    const auto item = static_cast<int64_t>(x.element_size());
    WindowPass::Taken taken{x.scalar_type(), columns, read_rows, kept_rows, 1};
    taken.element_step = element_step_of(kept_rows * columns, columns, elements);
    taken.row_sizes = sizes;
    taken.column_sizes = sizes + read_rows;
    sizes += read_rows + columns;
    taken.elements = others;
    taken.deviations = others + taken.element_count();
    taken.means = taken.deviations + columns;
    if (kept_rows) others = taken.means + columns;
    taken.kept = bytes;
    bytes += parts_of(kept_rows * columns * item, kRowAlignment) * kRowAlignment;
    pass->taken_.push_back(taken);
    const bool is_whole = columns * item % kRowAlignment == 0 &&
                          reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kRowAlignment == 0;
    const int64_t tiles =
        parts_of(read_rows, kernel.tile_rows) * parts_of(columns, kernel.span);
    if (tiles > kMostInt) return nullptr;
    table.push_back({x.const_data_ptr(), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                     rows, kept_first, kept_step, static_cast<int32_t>(columns),
                     static_cast<int32_t>(kind - std::begin(kKinds)),
                     static_cast<int32_t>(read_first), static_cast<int32_t>(read_step),
                     static_cast<int32_t>(read_rows), static_cast<int32_t>(kept_rows),
                     static_cast<int32_t>(taken.element_step), is_whole,
                     static_cast<uint32_t>(tiles), 0});
  }

  const c10::DeviceGuard guard(device);
  const int64_t before = parts_of((sizes + others) * 4, kRowAlignment) * kRowAlignment;
  pass->value_count_ = sizes + others;
  pass->memory_ = allocate(before + bytes, at::kByte, device);
  char* const start = static_cast<char*>(pass->memory_.data_ptr());
  float* const values = reinterpret_cast<float*>(start);
  for (size_t i = 0; i < table.size(); ++i) {
    WindowPass::Taken& taken = pass->taken_[i];
    for (int64_t* place : {&taken.elements, &taken.deviations, &taken.means}) *place += sizes;
    taken.kept += before;
    Matrix& m = table[i];
    m.row_sizes = values + taken.row_sizes;
    m.column_sizes = values + taken.column_sizes;
    m.kept = start + taken.kept;
    m.elements = values + taken.elements;
    m.deviations = values + taken.deviations;
    m.means = values + taken.means;
  }

  const Driver& to = driver();
  void* const stream = device.is_cuda() ? current_stream(device.index()) : nullptr;
  // A watch ends no training: torch takes the samples instead, from then on.
  const auto has_failed = [&](int failed, const char* doing) {
    if (!failed) return false;
    const std::string failure = std::string(doing) + ": " + error_text(failed);
    {
      const std::lock_guard lock(kernels_mutex);
      Kernel& kept = kernels()[device.index()];
      kept.function = nullptr;
      kept.failure = failure;
    }
    TORCH_WARN("torch takes the samples of a watch from now on; ", failure);
    return true;
  };
  const int cleared = in_context(device.index(), [&] {
    return to.fill(reinterpret_cast<uint64_t>(values), 0, static_cast<size_t>(sizes), stream);
  });
  if (has_failed(cleared, "clearing them")) return nullptr;
  alignas(16) std::array<uint8_t, kMostParameterBytes> parameter;
  for (size_t first = 0; first < table.size(); first += kernel.most_matrices) {
    const size_t count = std::min<size_t>(table.size() - first, kernel.most_matrices);
    int64_t blocks = 0;
    for (size_t i = first; i < first + count; ++i) {
      blocks += table[i].tiles + (table[i].kept_rows ? parts_of(table[i].columns, kStripColumns) : 0);
      table[i].end = static_cast<uint32_t>(blocks);
    }
    TORCH_CHECK(blocks <= kMostInt, "the samples of a watch are too large");
    std::memcpy(parameter.data(), &table[first], count * sizeof(Matrix));
    void* parameters[] = {parameter.data()};
    const LaunchConfig config{
        {static_cast<uint32_t>(blocks), 1, 1, kThreads, 1, 1, 0}, stream, nullptr, 0};
    const int launched = in_context(device.index(), [&] {
      return to.launch(&config, kernel.function, parameters, nullptr);
    });
    if (has_failed(launched, "taking them")) return nullptr;
  }
  return pass;
}

at::Tensor WindowPass::values() const {
  const Unrecorded now;
  return memory_.narrow(0, 0, value_count_ * 4).view(at::kFloat);
}

OperandSample WindowPass::tensors(size_t place) const {
  const Unrecorded now;
  const Taken& taken = taken_.at(place);
  const at::Tensor all = values();
  const auto item = static_cast<int64_t>(c10::elementSize(taken.dtype));
  const at::Tensor rows = memory_.narrow(0, taken.kept, taken.kept_rows * taken.columns * item);
  return {all.narrow(0, taken.row_sizes, taken.read_rows),
          all.narrow(0, taken.column_sizes, taken.columns),
          rows.view(taken.dtype).view({taken.kept_rows, taken.columns})};
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
                             const std::vector<InPass>& in_passes,
                             const std::vector<std::vector<at::Tensor>>& weights,
                             const WindowLimits& limits)
    : limits_(limits), operands_(operands.size()), weights_(weights.size()) {
  TORCH_CHECK_VALUE(operands.size() == in_passes.size(), "WindowNumbers: lists of several lengths");
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
      const int64_t stride =
          element_step_of(rows.numel(), rows.size(1), limits.elements / calls);
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
  // A pass has everything in order, and goes as it is.
  std::vector<std::pair<const WindowPass*, at::Tensor>> passes;
  std::vector<int64_t> begins;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto& [pass, place] = in_passes[i];
    if (!pass) continue;
    TORCH_CHECK_VALUE(operands[i].empty() && pass->picked_of() == limits.elements,
                      "WindowNumbers: a pass with other elements, or beside tensors");
    auto known = std::find_if(passes.begin(), passes.end(),
                              [&](const auto& one) { return one.first == pass.get(); });
    if (known == passes.end()) {
      passes.emplace_back(pass.get(), pass->values());
      known = std::prev(passes.end());
      begins.push_back(count);
      count += known->second.numel();
    }
    const int64_t begin = begins[known - passes.begin()];
    const WindowPass::Taken& taken = pass->at(static_cast<size_t>(place));
    Operand& operand = operands_[i];
    operand.rows.push_back({begin + taken.row_sizes, taken.read_rows});
    operand.columns.push_back({begin + taken.column_sizes, taken.columns});
    operand.elements.push_back({begin + taken.elements, taken.element_count()});
    operand.deviations.push_back({begin + taken.deviations, taken.columns});
    operand.means.push_back({begin + taken.means, taken.columns});
    operand.sampled_rows += taken.kept_rows;
  }
  if (!count) return;
  const at::Tensor& one = passes.empty() ? joined[0].tensors[0] : passes[0].second;
  const bool is_apart = !one.is_cpu();
  device_ = one.device().index();
  values_ = at::empty({count}, at::TensorOptions().dtype(at::kFloat).pinned_memory(is_apart));
  int64_t first = 0;
  for (const Joined& group : joined) {
    const at::Tensor flat = at::cat(group.tensors).to(at::kFloat);
    values_.narrow(0, first, flat.numel()).copy_(flat, /*non_blocking=*/true);
    first += flat.numel();
  }
  for (const auto& [_, values] : passes) {
    values_.narrow(0, first, values.numel()).copy_(values, /*non_blocking=*/true);
    first += values.numel();
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

std::vector<double> WindowNumbers::compute(uint64_t event) const {
  if (event) {
    const auto wait = [&] {
      return call_driver("cuEventSynchronize", reinterpret_cast<void*>(event));
    };
    constexpr int kRelaxed = 2;  // CUstreamCaptureMode: what others capture meanwhile goes on
    const int mode = exchange_capture_mode(kRelaxed);
    const int failed = in_context(device_, wait);
    exchange_capture_mode(mode);
    if (failed)
      throw LaunchFailure("waiting for a window: " + error_text(failed));
  }
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
