// A call of an operator as it is written down to be run again, and what is known of storages meanwhile.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>

#include <unordered_set>

namespace recoup {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using c10::StorageImpl;
using torch::jit::Stack;
using Arguments = c10::ArrayRef<IValue>;
using Weak = c10::weak_intrusive_ptr<StorageImpl>;
using Shape = c10::SmallVector<int64_t, 5>;

// In torch 2.11 a key that nothing uses; in 2.13 it is there for fake tensors, which no training step is made of.
constexpr DispatchKey OURS = DispatchKey::Fake;

// Excluded, operators run as kernels alone: no graph, no casts, nobody sees them.
inline DispatchKeySet all_above_kernels() {
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
         DispatchKeySet({OURS, DispatchKey::Python, DispatchKey::PythonTLSSnapshot});
}

// A storage. While something weak holds it, its address is not given to another.
struct Place {
  StorageImpl* key;
  Weak storage;
  size_t bytes;
  bool stays = false;  // for good: it is not worth evicting

  explicit Place(const at::Tensor& tensor)
      : key(tensor.storage().unsafeGetStorageImpl()), storage(tensor.storage().getWeakStorageImpl()),
        bytes(tensor.storage().nbytes()) {}
};

// How a tensor looks at a storage.
struct View {
  Place place;
  caffe2::TypeMeta type;
  int64_t offset;
  Shape sizes, strides;

  explicit View(const at::Tensor& tensor)
      : place(tensor), type(tensor.dtype()), offset(tensor.storage_offset()),
        sizes(tensor.sizes().begin(), tensor.sizes().end()), strides(tensor.strides().begin(), tensor.strides().end()) {}

  at::Tensor over(const c10::Storage& storage) const {
    DispatchKeySet keys(c10::computeDispatchKey(type.toScalarType(), c10::kStrided, storage.device()));
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, type);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return tensor;
  }
};

// In place of running statistics when a batch norm is repeated: it writes to them and does not read them.
struct Scratch {
  size_t position;
  Shape sizes;
  at::TensorOptions options;
};

inline void collect(const IValue& value, std::vector<at::Tensor>& found) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) found.push_back(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& one : value.toListRef()) collect(one, found);
  }
}

// Of the tensors among the arguments, in order, those in gaps are made from the next view.
struct Record {
  OperatorHandle op;
  int64_t number;
  bool grad;
  bool backward;  // of a gradient that nobody will differentiate
  bool passing = false;
  bool recent = false;  // its results may well be gone soon
  bool invalid = false;  // what it read has changed since
  std::vector<IValue> args;
  std::vector<bool> gaps;
  std::vector<View> views;
  std::vector<Scratch> scratch;
  std::vector<Place> outputs;
  int64_t writes = -1;  // the view that it writes to, and no new storage comes of it
  int64_t at = -1;  // which operator of a step with a plan it was

  bool is_dead() const {
    return std::all_of(outputs.begin(), outputs.end(), [](const Place& one) { return one.storage.expired(); });
  }

  // Whether something that it made is there and may be evicted.
  bool has_results() const {
    return std::any_of(outputs.begin(), outputs.end(), [](const Place& one) { return !one.stays && !one.storage.expired(); });
  }

  // What would be free if all of that were.
  int64_t bytes() const {
    int64_t sum = 0;
    for (const Place& one : outputs) sum += one.stays || one.storage.expired() ? 0 : static_cast<int64_t>(one.bytes);
    return sum;
  }

  // What was made from these is not what it would be if it were made again.
  void invalidate(const std::unordered_set<StorageImpl*>& from) {
    invalid = invalid || std::any_of(outputs.begin(), outputs.end(), [&](const Place& one) { return from.count(one.key) > 0; });
  }

  // For Python.
  std::vector<at::Tensor> again(const std::vector<py::object>& sources) const {
    std::vector<c10::Storage> storages;
    for (const py::object& source : sources) storages.push_back(torch::createStorage(source.ptr()));
    py::gil_scoped_release released;
    return run(storages);
  }

  // The result once more, from the bytes that each view looked at. Nothing but kernels runs.
  std::vector<at::Tensor> run(const std::vector<c10::Storage>& sources) const {
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < views.size(); ++i) tensors.push_back(views[i].over(sources[i]));
    c10::impl::ExcludeDispatchKeyGuard kernels(all_above_kernels());
    c10::AutoGradMode mode(grad);
    Stack stack = filled(tensors);
    op.callBoxed(&stack);
    std::vector<at::Tensor> results;
    for (const IValue& value : stack) collect(value, results);
    return results;
  }

 private:
  Stack filled(const std::vector<at::Tensor>& tensors) const {
    Stack stack;
    auto gap = gaps.begin();
    auto tensor = tensors.begin();
    auto fill = [&](const IValue& value) { return *gap++ ? *tensor++ : value.toTensor(); };
    auto blank = scratch.begin();
    for (size_t i = 0; i < args.size(); ++i) {
      if (blank != scratch.end() && blank->position == i) {
        stack.emplace_back(at::zeros(blank->sizes, blank->options));
        ++blank;
      } else if (args[i].isTensor()) {
        stack.emplace_back(fill(args[i]));
      } else if (args[i].isTensorList()) {
        c10::List<at::Tensor> list;
        for (const IValue& one : args[i].toListRef()) list.push_back(fill(one));
        stack.emplace_back(std::move(list));
      } else {
        stack.push_back(args[i]);
      }
    }
    return stack;
  }
};

}  // namespace recoup
