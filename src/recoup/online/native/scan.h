// Calls, before they run: what kind they are of, and how their operator behaves.
#pragma once

#include "tensors.h"

namespace recoup {

using Key = std::vector<int64_t>;

constexpr size_t STATISTICS = 3;  // where a batch norm has its running mean; its running variance comes next

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 1469598103934665603ull;
    for (int64_t part : key) hash = (hash ^ static_cast<uint64_t>(part)) * 1099511628211ull;
    return hash ^ (hash >> 32);
  }
};

// What an operator takes on arguments of one kind: see recoup.online.learned.
struct Kind {
  int64_t number, alike, bytes;
  double seconds;
};

// How an operator behaves: see recoup.online.operators.
struct Traits {
  bool looks, repeatable;
  int training_flag;
  bool sized_by_floats;  // what it makes from numbers alone
  bool has_device = false;
  bool makes = false;  // something that is no argument
  std::vector<size_t> writes = {};

  // Whether it is a batch norm that writes to its running statistics this time.
  bool updates(Arguments args) const {
    return training_flag < 0 || (training_flag > 0 && args[training_flag].toBool());
  }
};

// The arguments of a call, read in one pass.
struct Scan {
  Key key;  // the same for calls that take the same
  bool plain = true;  // nothing odd among them
  bool foreign = false;  // a tensor of another device, and no number that PyTorch made one of
  bool fractions = false;
  std::vector<at::Tensor> tensors;  // of the device

  explicit Scan(const c10::FunctionSchema& schema) {
    key.reserve(64);
    tensors.reserve(8);
    key.push_back(reinterpret_cast<int64_t>(&schema));
  }

  // Whether nothing is evicted.
  bool is_there() const { return std::all_of(tensors.begin(), tensors.end(), recoup::is_there); }

  // One argument.
  void read(const IValue& value, c10::Device device) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined()) {
        key.push_back(6);
        return;
      }
      if (!is_plain(tensor)) {
        plain = false;
        return;
      }
      bool managed = is_ours(tensor, device);
      key.push_back(managed ? 1 : 2);
      key.push_back(static_cast<int64_t>(tensor.scalar_type()));
      key.push_back(tensor.dim());
      key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
      if (managed) {
        key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
        tensors.push_back(tensor);
      } else if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        foreign = true;
      }
    } else if (value.isInt()) {
      key.push_back(3);
      key.push_back(value.toInt());
    } else if (value.isBool()) {
      key.push_back(value.toBool() ? 4 : 5);
    } else if (value.isNone()) {
      key.push_back(6);
    } else if (value.isDouble()) {  // changes no size; a rate that decays is no new operator
      key.push_back(7);
      fractions = true;
    } else if (value.isList()) {
      key.push_back(8);
      key.push_back(static_cast<int64_t>(value.toListRef().size()));
      for (const IValue& one : value.toListRef()) {
        read(one, device);
        if (one.isTensor() && !value.isTensorList()) plain = false;
      }
    } else if (value.isString()) {
      key.push_back(9);
      key.push_back(static_cast<int64_t>(std::hash<std::string>()(value.toStringRef())));
    } else if (value.isDevice()) {
      key.push_back(10);
      key.push_back(static_cast<int64_t>(value.toDevice().type()) * 256 + value.toDevice().index());
    } else {
      plain = false;
    }
  }
};

}  // namespace recoup
