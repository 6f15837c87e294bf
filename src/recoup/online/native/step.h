// A step that is known to its last operator, and repeated: see recoup.online.familiar.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace recoup {

class Step {
 public:
  // Its operators, which of them may pass, what is allocated when they come, and at most from there on.
  void expect(std::vector<int64_t> numbers, std::vector<bool> light, std::vector<int64_t> memory,
              std::vector<int64_t> highest) {
    numbers_ = std::move(numbers);
    light_ = std::move(light);
    memory_ = std::move(memory);
    highest_ = std::move(highest);
  }

  // From now on it is repeated, with so much more allocated; if it is `planned`, what grows is seen to.
  void begin(int64_t offset, int64_t margin, bool planned) {
    offset_ = offset;
    margin_ = margin;
    planned_ = planned;
    familiar_ = true;
  }

  void end() { familiar_ = false; }

  bool is_familiar() const { return familiar_; }
  bool is_planned() const { return planned_; }
  size_t size() const { return numbers_.size(); }

  // Whether an operator is this one; the one after the last is the first.
  bool has(size_t at, int64_t number) const { return numbers_[at % numbers_.size()] == number; }
  bool lets_pass(size_t at) const { return at < numbers_.size() && light_[at]; }

  // Whether it is time to see how much is allocated: it takes too long to do that for each operator.
  bool is_time_to_look() { return ++passed_ % LOOK_EVERY == 0; }
  void look_at_next() { passed_ = -1; }

  // So much may be allocated before an operator that it cannot break the budget later in the step, and, where no plan says
  // what to evict then, that the step does not grow.
  int64_t most(size_t at, int64_t budget) const {
    int64_t spare = budget - highest_[at];
    return memory_[at] + (planned_ ? spare : std::min(spare, offset_ + margin_));
  }

 private:
  static constexpr int64_t LOOK_EVERY = 16;  // operators between two looks

  std::vector<int64_t> numbers_, memory_, highest_;
  std::vector<bool> light_;
  bool familiar_ = false, planned_ = false;
  int64_t offset_ = 0, margin_ = 0, passed_ = 0;
};

}  // namespace recoup
