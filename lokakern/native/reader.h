// Reads numbers and texts of a plan, which may come from outside: every read is bounded.
#pragma once

#include <cstring>

#include "plan.h"

namespace lokakern {

class Reader {
 public:
  explicit Reader(std::string_view text) : rest_(text) {}

  int64_t number(int64_t least, int64_t most) {
    const auto found = raw<int64_t>();
    if (found < least || found > most)
      throw BadPlan("found " + std::to_string(found) + "; expected a number from " +
                    std::to_string(least) + " to " + std::to_string(most));
    return found;
  }

  double real() { return raw<double>(); }

  std::string_view text(int64_t most) {
    const auto size = static_cast<size_t>(number(0, most));
    if (size > rest_.size()) throw BadPlan("a plan is cut off");
    const auto found = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return found;
  }

  void finish() const {
    if (!rest_.empty())
      throw BadPlan(std::to_string(rest_.size()) + " bytes follow the end of a plan");
  }

 private:
  template <typename T>
  T raw() {
    if (rest_.size() < sizeof(T)) throw BadPlan("a plan is cut off");
    T found;
    std::memcpy(&found, rest_.data(), sizeof found);
    rest_.remove_prefix(sizeof found);
    return found;
  }

  std::string_view rest_;
};

}  // namespace lokakern
