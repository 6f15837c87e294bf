// The bytes of storages, which come and go while the storages stay.
#pragma once

#include <c10/core/Storage.h>

namespace recoup {

// Two storages exchange their memory; no tensor's version counter moves.
inline void exchange(c10::Storage& first, c10::Storage& second) {
  size_t bytes = first.nbytes();
  at::DataPtr memory = first.set_data_ptr(at::DataPtr(nullptr, first.device()));
  first.set_data_ptr_noswap(second.set_data_ptr(std::move(memory)));
  first.set_nbytes(second.nbytes());
  second.set_nbytes(bytes);
}

// Free its bytes.
inline void empty(c10::Storage& storage) {
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
  storage.set_nbytes(0);
}

}  // namespace recoup
