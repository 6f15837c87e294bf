// Operators of a program, seen below autograd without Python.
//
// Most operators need nothing from the runtime: what they read is there, and there is room for what they make. Those run
// from here, at a microsecond or two each. If memory is short, Python sees to it first. Of the ones that make something a
// record is written, from which Python makes its books when it has to evict. Operators that are not known, or odd, go to
// Python, to the mode that sees every operator where this is not built. The lock is never held while an operator runs or
// Python is called.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>

#include <atomic>

#include "plan.h"
#include "step.h"

namespace recoup {

using c10::impl::TorchDispatchModeTLS;
using Schema = c10::FunctionSchema;
using Lock = std::unique_lock<std::mutex>;

class Watch {
 public:
  Watch(py::object mode, c10::Device device, int64_t budget, py::object count)
      : device_(device), budget_(budget), count_(std::move(count)), journal_(device, budget), plan_(device),
        mode_(std::make_shared<c10::impl::PyObject_TorchDispatchMode>(mode.release().ptr(), getPyInterpreter())) {
    if (count_.is_none()) allocator_ = c10::getDeviceAllocator(device.type());
  }

  void start() {
    TORCH_CHECK(active == nullptr, "one block at a time");
    active = this;
    c10::impl::tls_set_dispatch_key_included(OURS, true);
  }

  void stop() {
    if (active != this) return;
    c10::impl::tls_set_dispatch_key_included(OURS, false);
    active = nullptr;
    mode_.reset();
    preparing = turning = py::none();  // which know us
  }

  static void seen(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (keys.has(DispatchKey::Python)) return ask_python(op, stack);
    c10::impl::ExcludeDispatchKeyGuard once(OURS);
    Watch* watch = active;
    if (watch == nullptr) {
      pass(op, keys, stack);
    } else {
      watch->run(op, keys, stack);
    }
  }

  // What Python says of the operator that it was called for.

  void describe(bool looks, bool repeatable, int training_flag, bool sized_by_floats) {
    if (asked == nullptr) return;
    Traits traits{looks, repeatable, training_flag, sized_by_floats};
    for (const auto& result : asked->returns()) traits.makes = traits.makes || result.alias_info() == nullptr;
    const auto& arguments = asked->arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      if (training_flag == 0 && alias != nullptr && alias->isWrite()) traits.writes.push_back(i);
      traits.has_device = traits.has_device || arguments[i].name() == "device";
    }
    Lock lock(mutex_);
    traits_.insert_or_assign(asked, std::move(traits));
  }

  void teach(int64_t number, int64_t alike, int64_t bytes, double seconds) {
    if (asked_key.empty()) return;
    Lock lock(mutex_);
    kinds_.insert_or_assign(asked_key, Kind{number, alike, bytes, seconds});
  }

  // What the operator made can be made again.
  void made() { asked_made = true; }

  // Python is not at work on what it was called for any more.
  void disown() {
    asked = nullptr;
    asked_key.clear();
  }

  // What Python knows of a storage: it can never be made again.
  void settle(int64_t key) {
    Lock lock(mutex_);
    if (Entry* entry = journal_.storages.known(reinterpret_cast<StorageImpl*>(key))) entry->made = false;
  }

  // Whether a record that Python has not read needs what a storage held that is no more. If so, its address is not given to
  // another until this is asked again, and no record does.
  bool mourn(int64_t key) {
    Lock lock(mutex_);
    Entry* entry = journal_.storages.known(reinterpret_cast<StorageImpl*>(key));
    if (entry == nullptr) return false;
    entry->mourned = entry->pending;
    return entry->pending;
  }

  // A step that is known: its operators, which of them may pass, what is allocated when they come, and at most from there on.
  void expect(std::vector<int64_t> numbers, std::vector<bool> light, std::vector<int64_t> memory,
              std::vector<int64_t> highest) {
    Lock lock(mutex_);
    step_.expect(std::move(numbers), std::move(light), std::move(memory), std::move(highest));
  }

  // What is to be done in it: orders are pairs of whether to evict, and what.
  void plan(std::vector<bool> remembers, const std::vector<std::vector<std::pair<bool, std::vector<int64_t>>>>& orders,
            std::vector<int64_t> counts, std::unordered_set<int64_t> holds, std::unordered_set<int64_t> lost) {
    Script script{std::move(remembers), {}, std::move(counts), std::move(holds), std::move(lost)};
    for (const auto& before : orders) {
      auto& line = script.orders.emplace_back();
      for (const auto& [evict, values] : before) line.push_back({evict, values});
    }
    Lock lock(mutex_);
    plan_.script = std::move(script);
  }

  // From now on the step is repeated, with so much more allocated; where a plan is followed, writes need care. `alone`: the
  // plan is followed here.
  void begin_step(int64_t offset, int64_t margin, bool planned, bool alone) {
    Lock lock(mutex_);
    step_.begin(offset, margin, planned);
    obeys = alone;
    over = false;
  }

  // If a plan was followed here, Python must read of what it knew.
  void end_step() {
    end_plan(false);
    Lock lock(mutex_);
    step_.end();
    over = false;
  }

  // The operators that passed, and what the program held when they came.
  py::tuple take_seen() {
    std::vector<int64_t> numbers, held;
    {
      Lock lock(mutex_);
      numbers.swap(seen_);
      held.swap(held_);
    }
    return py::make_tuple(std::move(numbers), std::move(held));
  }

  double take_seconds() {
    Lock lock(mutex_);
    return std::exchange(seconds_, 0.0);
  }

  // What was done to follow a plan: how much was evicted, how many calls were repeated, and what they take.
  py::tuple take_done() {
    Lock lock(mutex_);
    Done done = plan_.take_done();
    return py::make_tuple(done.evictions, done.repeated, done.seconds);
  }

  int64_t allocated() const {
    if (allocator_ != nullptr) return allocator_->getDeviceStats(device_.index()).allocated_bytes[0].current;
    py::gil_scoped_acquire held;
    return count_().cast<int64_t>();
  }

  py::tuple take(bool all, int64_t bytes, size_t count) { return journal_.take(mutex_, all, bytes, count); }
  bool has_news() const { return journal_.has_news(); }
  // Whether Python must know of something before it evicts anything.
  bool overwrote() const { return journal_.overwrote || !journal_.storages.fixed.empty(); }
  bool is_crowded() const { return seen_.size() >= CROWDED; }

  static inline std::atomic<Watch*> active{nullptr};

  int64_t at = -1;  // which operator of the known step ran last
  bool over = false;  // more is allocated than there was in the known step
  bool obeys = false;  // follows a plan
  bool strays = false;  // the operator that Python is asked for is not the planned one
  bool wonders = false;  // it is not known yet
  bool journals = false;
  bool watches = false;  // which operators pass
  int64_t away = 0;  // bytes that the program holds and that are evicted
  double clock = 0;
  py::object preparing;  // brings back what an operator reads, and makes room for what it makes
  py::object turning = py::none();  // begins a step that has a plan

 private:
  static void pass(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, OURS), stack);
  }

  // A mode or a subclass, as PyTorch's own fallback does, but what they make of the operator comes here: in torch 2.11,
  // where our key is above Python's, that fallback excludes it.
  static void ask_python(const OperatorHandle& op, Stack* stack) {
    DispatchKeySet below(DispatchKeySet::FULL_AFTER, DispatchKey::Python);
    DispatchKeySet above = DispatchKeySet(DispatchKeySet::FULL) ^ (below | DispatchKeySet(DispatchKey::Python));
    c10::impl::ExcludeDispatchKeyGuard entered(above - DispatchKeySet(OURS));
    (*getPyInterpreter())->dispatch(op, stack);
  }

  void run(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const Schema& schema = op.schema();
    Arguments args(stack->data() + stack->size() - schema.arguments().size(), schema.arguments().size());
    Lock lock(mutex_);
    auto found = traits_.find(&schema);
    const Traits* traits = found == traits_.end() ? nullptr : &found->second;
    lock.unlock();
    strays = wonders = false;
    if (traits == nullptr) return needs_nobody(schema) ? pass(op, keys, stack) : ask(op, stack, {});
    if (traits->looks && args[0].isTensor() && is_plain(args[0].toTensor())) {
      c10::Storage storage = args[0].toTensor().storage();
      if (is_there(args[0].toTensor())) return pass(op, keys, stack);
      if (is_evicted(storage) && only_shapes(schema)) {
        Unbounded unbounded(storage);
        return pass(op, keys, stack);
      }
    }
    Scan scan(schema);
    for (const IValue& value : args) scan.read(value, device_);
    bool lone = scan.tensors.empty();
    if (lone && scan.foreign && scan.plain && !traits->has_device) return pass(op, keys, stack);
    bool odd = !scan.plain || (lone && scan.fractions && traits->sized_by_floats);
    if (odd || traits->looks) return ask(op, stack, {});
    lock.lock();
    auto kind = kinds_.find(scan.key);
    bool knows = kind != kinds_.end();
    Kind what = knows ? kind->second : Kind{};
    bool familiar = step_.is_familiar();
    bool notes = journals && traits->repeatable && !scan.foreign && !is_crowded();
    lock.unlock();
    if (knows && familiar) {
      if (plan_.exists() && follow(op, keys, stack, *traits, what, scan)) return;
      if (!obeys && scan.is_there() && is_expected(what, *traits, args)) {
        if (passes(op, keys, stack, *traits, args.vec())) return;
        --at;
      }
    } else if (int64_t memory = 0; knows && notes && (is_ready(scan, what, memory) || prepare(scan, what, memory))) {
      lock.lock();
      bool writes_over = journal_.storages.may_write_over(*traits, args);
      bool fine = writes_over || may_write(*traits, args);
      lock.unlock();
      if (fine && note(op, keys, stack, *traits, what, memory, scan, writes_over)) return;
    }
    wonders = !knows;
    ask(op, stack, std::move(scan.key));
  }

  // Whether an operator that makes views reads no byte, and stays within the tensor's own bounds.
  static bool only_shapes(const Schema& schema) {
    return schema.name().rfind("aten::", 0) == 0 && schema.name() != "aten::as_strided";
  }

  bool is_evicted(const c10::Storage& storage) {
    Lock lock(mutex_);
    const Entry* entry = journal_.storages.known(storage.unsafeGetStorageImpl());
    return entry != nullptr && entry->made && storage.nbytes() == 0;
  }

  // Whether what a call writes to may change: if something was made from that, and Python need not know, it is not made
  // again any more.
  bool may_write(const Traits& traits, Arguments args) {
    std::unordered_set<StorageImpl*> from;
    if (!journal_.storages.may_write(traits, args, obeys, from)) return false;
    if (!from.empty()) {
      journal_.invalidate(from);
      plan_.invalidate(from);
    }
    for (size_t i : traits.writes) {
      std::vector<at::Tensor> written;
      if (obeys) collect(args[i], written);
      for (const at::Tensor& tensor : written) plan_.give_up(tensor);
    }
    return true;
  }

  Plan::Room room() const {
    return [this](int64_t bytes) { return allocated() + bytes <= budget_; };
  }

  bool obey(size_t next) {
    try {
      return plan_.obey(next, room());
    } catch (const c10::OutOfMemoryError&) {
      return false;
    }
  }

  // An operator of a step whose plan is followed here. False if it is not the next one, or the plan cannot be followed.
  bool follow(const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Traits& traits, const Kind& kind,
              const Scan& scan) {
    size_t next = at + 1;
    strays = !step_.has(next, kind.alike);
    if (strays) return false;
    if (next == step_.size()) {
      turn();
      next = 0;
    }
    if (!obeys || (scan.foreign && plan_.script.remembers[next])) return false;
    plan_.tidy();
    over = is_over(next);
    if (over || !obey(next)) return false;
    for (const at::Tensor& tensor : scan.tensors) {
      if (!plan_.bring_back(tensor, room())) return false;
    }
    std::vector<IValue> args(stack->end() - op.schema().arguments().size(), stack->end());
    Lock lock(mutex_);
    bool writes_over = traits.repeatable && journal_.storages.may_write_over(traits, args, true);
    if (!writes_over && !may_write(traits, args)) return false;
    lock.unlock();
    if (!passes(op, keys, stack, traits, args)) return false;
    at = static_cast<int64_t>(next);
    seconds_ += kind.seconds;
    bool backward = !c10::GradMode::is_enabled() && torch::autograd::get_current_graph_task_id() != -1;
    bool matters = plan_.script.remembers[next] || !backward;  // most of what a backward makes is gone soon
    if (!writes_over && !(matters && traits.repeatable && traits.writes.empty() && !scan.foreign)) return true;
    lock.lock();
    auto record = journal_.describe(op, kind, traits, std::move(args), *stack, writes_over, clock + seconds_);
    if (record) plan_.add(next, std::move(*record), kind);
    return true;
  }

  // The step is over, and begins again: Python decides how.
  void turn() {
    bool alone = end_plan(true);
    call(turning, alone);
  }

  // If a plan was followed here: what it knew goes to the journal, unless the step is `done` and nothing is evicted.
  bool end_plan(bool done) {
    Left left;
    Lock lock(mutex_);
    if (!std::exchange(obeys, false)) return false;
    bool is_needed = !done || plan_.has_away();
    left = plan_.end();
    if (is_needed) {
      journal_.add(std::move(left.records), left.keeps);
    } else {
      journal_.settle(left.records);
    }
    return true;
  }

  template <typename... Given>
  static void call(const py::object& hook, const Given&... given) {
    py::gil_scoped_acquire held;
    c10::impl::ExcludeDispatchKeyGuard kernels(all_above_kernels());
    try {
      hook(given...);
    } catch (py::error_already_set& problem) {
      problem.restore();
      python_error error;
      error.persist();
      throw error;
    }
  }

  // Whether what a call reads is there, and there is room for what it makes beside the `memory` that is allocated.
  bool is_ready(const Scan& scan, const Kind& kind, int64_t& memory) const {
    if (!scan.is_there()) return false;
    memory = allocated();
    return memory + kind.bytes <= budget_;
  }

  // Let Python see to that.
  bool prepare(const Scan& scan, const Kind& kind, int64_t& memory) {
    {
      py::gil_scoped_acquire held;
      py::list storages;
      for (const at::Tensor& tensor : scan.tensors) storages.append(Journal::wrapped(tensor.storage()));
      call(preparing, storages, kind.number, kind.bytes);
    }
    return journals && is_ready(scan, kind, memory);  // else the learner wants to see it
  }

  // The same tensor again: nothing can go wrong, and PyTorch calls it where Python must not have a hand in the result. Or
  // what an optimizer says to a profiler.
  static bool needs_nobody(const Schema& schema) {
    return schema.name() == "aten::alias" || schema.name() == "aten::detach" || schema.name().rfind("profiler::", 0) == 0;
  }

  // Let Python do it.
  void ask(const OperatorHandle& op, Stack* stack, Key key) {
    std::vector<std::vector<Place>> places;
    size_t count = op.schema().arguments().size();
    for (const IValue& value : Arguments(stack->data() + stack->size() - count, count)) places.push_back(ours(value, device_));
    bool updates = false;
    bool made = false;
    {
      std::vector<IValue> args(stack->end() - count, stack->end());
      Asking asking(mode_, &op.schema(), std::move(key));
      mode_->pyinterpreter()->dispatch(op, stack);
      made = asked_made;
      Lock lock(mutex_);
      auto found = traits_.find(&op.schema());
      if (found == traits_.end()) return;
      updates = found->second.updates(args);
    }
    Lock lock(mutex_);
    mark(traits_.find(&op.schema())->second, places, updates, *stack, made);
    journal_.storages.tidy();
    step_.look_at_next();  // what Python did may count
  }

  // After Python ran an operator: what is made in the block, and from what.
  void mark(const Traits& traits, const std::vector<std::vector<Place>>& places, bool updates, const Stack& stack,
            bool made) {
    std::unordered_set<StorageImpl*> inputs;
    std::vector<StorageImpl*> made_now;
    std::vector<const Place*> reads;
    for (size_t i = 0; i < places.size(); ++i) {
      bool writes = updates ? i == STATISTICS || i == STATISTICS + 1
                            : std::find(traits.writes.begin(), traits.writes.end(), i) != traits.writes.end();
      for (const Place& place : places[i]) {
        inputs.insert(place.key);
        if (!writes) {
          reads.push_back(&place);
          continue;
        }
        Entry& entry = journal_.storages.at(place);
        entry.told = true;
        if (entry.made) {
          entry.rewritten = true;
          made_now.push_back(place.key);
        } else {
          entry.readers.clear();  // Python has seen to them
        }
      }
    }
    for (const IValue& value : stack) {
      for (const Place& place : ours(value, device_)) {
        if (inputs.count(place.key) || journal_.storages.known(place.key) != nullptr) continue;
        Entry& entry = journal_.storages.at(place);
        entry.made = made;
        entry.told = true;
        if (made) made_now.push_back(place.key);
      }
    }
    for (const Place* place : reads) {
      auto& readers = journal_.storages.at(*place).readers;
      readers.insert(readers.end(), made_now.begin(), made_now.end());
    }
  }

  // Whether more is allocated than a known step may have. That is looked up now and then.
  bool is_over(size_t next) { return step_.is_time_to_look() && allocated() > step_.most(next, budget_); }

  // An operator of the known step, if it is the one that comes next and may pass.
  bool is_expected(const Kind& kind, const Traits& traits, Arguments args) {
    size_t next = at + 1;
    if (!step_.lets_pass(next) || !step_.has(next, kind.alike)) return false;
    if (step_.is_planned()) {
      Lock lock(mutex_);
      if (!may_write(traits, args)) return false;
    }
    over = is_over(next);
    if (over) return false;
    at = next;
    seconds_ += kind.seconds;
    return true;
  }

  // Run an operator. False if there was no memory for it; nothing has happened then.
  static bool passes(const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Traits& traits,
                     const std::vector<IValue>& args) {
    size_t below = stack->size() - args.size();
    try {
      pass(op, keys, stack);
      return true;
    } catch (const c10::OutOfMemoryError&) {
      if (traits.updates(args) || !traits.writes.empty()) throw;
      stack->resize(below);
      stack->insert(stack->end(), args.begin(), args.end());
      return false;
    }
  }

  // Run an operator and write down how to repeat it. False if there was no memory for it; nothing has happened then.
  bool note(const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Traits& traits, const Kind& kind,
            int64_t memory, const Scan& scan, bool writes_over) {
    std::vector<IValue> args(stack->end() - op.schema().arguments().size(), stack->end());
    if (!passes(op, keys, stack, traits, args)) return false;
    Lock lock(mutex_);
    if (watches) {
      seen_.push_back(kind.alike);
      held_.push_back(memory + away);
    }
    double now = clock + seconds_;
    if (writes_over || traits.writes.empty()) {
      auto record = journal_.describe(op, kind, traits, std::move(args), *stack, writes_over, now);
      if (record) journal_.add(std::move(*record));
    }
    for (const at::Tensor& tensor : scan.tensors) journal_.storages.use(tensor, now);
    seconds_ += kind.seconds;
    return true;
  }

  // The mode is there while Python is asked, and no longer.
  struct Asking {
    Asking(const std::shared_ptr<c10::impl::PyObject_TorchDispatchMode>& mode, const Schema* schema, Key key) {
      asked = schema;
      asked_key = std::move(key);
      asked_made = false;
      TorchDispatchModeTLS::push_non_infra_mode_onto_stack(mode);
    }
    ~Asking() {
      TorchDispatchModeTLS::pop_stack();
      asked = nullptr;
      asked_key.clear();
    }
  };

  static inline thread_local const Schema* asked = nullptr;
  static inline thread_local Key asked_key;
  static inline thread_local bool asked_made = false;

  c10::Device device_;
  int64_t budget_;
  py::object count_;
  c10::DeviceAllocator* allocator_ = nullptr;
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> mode_;
  std::mutex mutex_;
  std::unordered_map<const Schema*, Traits> traits_;
  std::unordered_map<Key, Kind, KeyHash> kinds_;
  Journal journal_;
  Plan plan_;
  std::vector<int64_t> seen_, held_;
  double seconds_ = 0;
  Step step_;
};

}  // namespace recoup
