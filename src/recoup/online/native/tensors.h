// Which tensors are looked after.
#pragma once

#include "record.h"

namespace recoup {

// A strided tensor and nothing more.
inline bool is_plain(const at::Tensor& tensor) {
  static const DispatchKeySet odd(
      {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::Conjugate, DispatchKey::Negative,
       DispatchKey::ZeroTensor, DispatchKey::Functionalize, DispatchKey::FuncTorchGradWrapper,
       DispatchKey::FuncTorchBatched, DispatchKey::BatchedNestedTensor, OURS});
  return tensor.layout() == c10::kStrided && tensor.has_storage() && !tensor.is_quantized() && !tensor.is_meta() &&
      !tensor.key_set().has_any(odd);
}

// A tensor of the device; on the CPU not a number that PyTorch made one of for a call.
inline bool is_ours(const at::Tensor& tensor, c10::Device device) {
  return tensor.device() == device && is_plain(tensor) && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

inline std::vector<Place> ours(const IValue& value, c10::Device device) {
  std::vector<at::Tensor> tensors;
  collect(value, tensors);
  std::vector<Place> places;
  for (const at::Tensor& tensor : tensors) {
    if (is_ours(tensor, device)) places.emplace_back(tensor);
  }
  return places;
}

inline bool is_there(const at::Tensor& tensor) { return tensor.numel() == 0 || tensor.storage().nbytes() > 0; }

}  // namespace recoup
