// The CPU's allocator with a count, as a GPU's has one: so that what needs that can be tested anywhere.
#include <c10/core/Allocator.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdlib>

namespace {

std::atomic<int64_t> total{0}, highest{0}, lately{0};

constexpr size_t HEADER = 64;  // before the bytes, and says how many they are; kernels want bytes aligned

void release(void* data) {
  if (data == nullptr) return;
  auto* block = static_cast<char*>(data) - HEADER;
  total -= *reinterpret_cast<int64_t*>(block);
  std::free(block);
}

struct Counting final : c10::Allocator {
  c10::Allocator* inner = c10::GetAllocator(c10::kCPU);

  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    auto* block = static_cast<char*>(std::aligned_alloc(HEADER, HEADER + (bytes + HEADER - 1) / HEADER * HEADER));
    *reinterpret_cast<int64_t*>(block) = static_cast<int64_t>(bytes);
    total += static_cast<int64_t>(bytes);
    highest = std::max(highest.load(), total.load());
    lately = std::max(lately.load(), total.load());
    return {block + HEADER, block + HEADER, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { inner->copy_data(to, from, bytes); }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static Counting* counting = nullptr;
  module.def("start", [] {
    if (counting == nullptr) counting = new Counting();
    c10::SetAllocator(c10::kCPU, counting, 1);
  });
  module.def("stop", [] { c10::SetAllocator(c10::kCPU, counting->inner, 1); });
  module.def("allocated", [] { return total.load(); });
  module.def("peak", [] { return highest.load(); });
  module.def("reset_peak", [] { highest = total.load(); });
  module.def("begin", [] { lately = total.load(); });
  module.def("peak_since", [] { return lately.load(); });
}
