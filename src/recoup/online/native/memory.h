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

// While a view is made of what is evicted: no byte is read, but views are checked to be within their storage's bounds. Those
// of a tensor's are, unless they are given as numbers.
class Unbounded {
 public:
  explicit Unbounded(c10::Storage storage) : storage_(std::move(storage)) { storage_.set_nbytes(size_t{1} << 60); }
  ~Unbounded() { storage_.set_nbytes(0); }
  Unbounded(const Unbounded&) = delete;
  Unbounded& operator=(const Unbounded&) = delete;

 private:
  c10::Storage storage_;
};

// Free its bytes.
inline void empty(c10::Storage& storage) {
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
  storage.set_nbytes(0);
}

}  // namespace recoup
