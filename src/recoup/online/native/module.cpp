// What Python sees: recoup.online.native loads it.
#include <torch/library.h>

#include "watch.h"

namespace recoup {

void exchange_storages(const py::object& one, const py::object& other) {
  c10::Storage first = torch::createStorage(one.ptr()), second = torch::createStorage(other.ptr());
  exchange(first, second);
}

// Whether this thread's operators go unseen from now on; how it was before.
bool hide(bool hidden) {
  bool before = c10::impl::tls_is_dispatch_key_excluded(OURS);
  c10::impl::tls_set_dispatch_key_excluded(OURS, hidden);
  return before;
}

}  // namespace recoup

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&recoup::Watch::seen>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using recoup::Record;
  using recoup::Watch;
  module.def("exchange", &recoup::exchange_storages);
  module.def("hide", &recoup::hide);
  module.def("is_watching", [] { return Watch::active != nullptr; });
  py::class_<Record>(module, "Record").def("again", &Record::again);
  py::class_<Watch>(module, "Watch")
      .def(py::init([](py::object mode, const py::object& device, int64_t budget, py::object count) {
        return std::make_unique<Watch>(std::move(mode), py::cast<c10::Device>(device), budget, std::move(count));
      }))
      .def("start", &Watch::start)
      .def("stop", &Watch::stop)
      .def("describe", &Watch::describe)
      .def("teach", &Watch::teach)
      .def("made", &Watch::made)
      .def("disown", &Watch::disown)
      .def("settle", &Watch::settle)
      .def("mourn", &Watch::mourn)
      .def("expect", &Watch::expect)
      .def("plan", &Watch::plan)
      .def("begin_step", &Watch::begin_step)
      .def("end_step", &Watch::end_step)
      .def("take", &Watch::take)
      .def("take_seen", &Watch::take_seen)
      .def("take_seconds", &Watch::take_seconds)
      .def("take_done", &Watch::take_done)
      .def("allocated", &Watch::allocated)
      .def("has_news", &Watch::has_news)
      .def_readwrite("preparing", &Watch::preparing)
      .def_readwrite("turning", &Watch::turning)
      .def_readwrite("at", &Watch::at)
      .def_property_readonly("overwrote", &Watch::overwrote)
      .def_readonly("over", &Watch::over)
      .def_readonly("obeys", &Watch::obeys)
      .def_readonly("strays", &Watch::strays)
      .def_readonly("wonders", &Watch::wonders)
      .def_readwrite("journals", &Watch::journals)
      .def_readwrite("watches", &Watch::watches)
      .def_readwrite("away", &Watch::away)
      .def_readwrite("clock", &Watch::clock);
}
