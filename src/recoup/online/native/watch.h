// Operators of a program, seen below autograd without Python.
//
// Most operators need nothing from the runtime: what they read is there, and there is room for what they make. Those run
// from here, at a microsecond or two each. Of the ones that make something a record is written, from which Python makes
// its books when memory runs short. All others go to Python, to the mode that sees every operator where this is not
// built. The lock is never held while an operator runs or Python is called.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "record.h"

namespace recoup {

using c10::impl::TorchDispatchModeTLS;
using Schema = c10::FunctionSchema;
using Key = std::vector<int64_t>;
using Lock = std::unique_lock<std::mutex>;

constexpr size_t STATISTICS = 3;  // where a batch norm has its running mean; its running variance comes next
constexpr size_t CROWDED = 2048;  // records, or storages, before those that nobody can need are dropped
constexpr int64_t SMALL = 100;  // a gradient of less than the budget by that is not worth a backward to evict
constexpr int64_t TINY = 100'000;  // what is less than the budget by that is not worth knowing
constexpr int64_t STAYING = 40;  // all of those together may be the budget by that
constexpr size_t SOON = 8;  // records that are written in the life of a result that is only passing
constexpr int64_t LOOK_EVERY = 16;  // operators of a known step between two looks at the allocator's count

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
  bool has_device = false;
  bool makes = false;  // something that is no argument
  std::vector<size_t> writes = {};

  // Whether it is a batch norm that writes to its running statistics this time.
  bool updates(Arguments args) const {
    return training_flag < 0 || (training_flag > 0 && args[training_flag].toBool());
  }
};

// What is known of a storage.
struct Entry {
  Weak storage;
  bool made = false;  // by a call that can be repeated, so that it may be evicted
  bool told = false;  // to Python
  bool pending = false;  // a record that Python has not read needs it
  bool rewritten = false;  // what was made from it may be from before that
  double last = -1;  // when it was last used, if Python does not know
  std::vector<StorageImpl*> readers;  // what was made from it, since it was last written to
};

// The arguments of a call, read in one pass.
struct Scan {
  Key key;  // the same for calls that take the same
  bool plain = true;  // nothing odd among them
  bool there = true;  // nothing evicted
  bool foreign = false;  // a tensor of another device, and no number that PyTorch made one of
  bool fractions = false;
  std::vector<at::Tensor> tensors;  // of the device
};

class Watch {
 public:
  Watch(py::object mode, c10::Device device, int64_t budget, py::object count)
      : device_(device), budget_(budget), count_(std::move(count)),
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
  }

  static void seen(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (keys.has(DispatchKey::Python)) return pass(op, keys, stack);  // what a mode or a subclass makes of it comes here
    c10::impl::ExcludeDispatchKeyGuard once(OURS);
    Watch* watch = active;
    if (watch == nullptr) {
      pass(op, keys, stack);
    } else {
      watch->run(op, keys, stack);
    }
  }

  // What Python says of the operator that it was called for.

  void describe(bool looks, bool repeatable, int training_flag) {
    if (asked == nullptr) return;
    Traits traits{looks, repeatable, training_flag};
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
    if (Entry* entry = known(reinterpret_cast<StorageImpl*>(key))) entry->made = false;
  }

  // Whether a record that Python has not read needs what a storage held.
  bool is_pending(int64_t key) {
    Lock lock(mutex_);
    Entry* entry = known(reinterpret_cast<StorageImpl*>(key));
    return entry != nullptr && entry->pending;
  }

  // A step that is known: its operators, which of them may pass, and what is allocated when they come.
  void expect(std::vector<int64_t> numbers, std::vector<bool> light, std::vector<int64_t> memory) {
    Lock lock(mutex_);
    numbers_ = std::move(numbers);
    light_ = std::move(light);
    memory_ = std::move(memory);
  }

  // From now on the step is repeated, with so much more allocated; where a plan is followed, writes need care.
  void begin_step(int64_t offset, int64_t margin, bool careful) {
    Lock lock(mutex_);
    offset_ = offset;
    margin_ = margin;
    careful_ = careful;
    familiar_ = true;
    over = false;
  }

  void end_step() {
    Lock lock(mutex_);
    familiar_ = over = false;
  }

  // What cannot be made again any more; the records that something may need, in order; of the others, which results were
  // passing; when what was used.
  py::tuple take() {
    std::vector<Record> journal;
    std::vector<std::pair<int64_t, bool>> passing;
    std::vector<std::pair<Weak, double>> used;
    std::vector<std::pair<StorageImpl*, Weak>> settled;
    {
      Lock lock(mutex_);
      for (const Record& record : journal_) {
        for (const Place& place : record.outputs) {
          if (Entry* entry = known(place.key)) entry->told = true;
        }
      }
      journal = compact(passing);
      journal_.clear();
      settled.swap(fixed_);
      overwrote = false;
      for (StorageImpl* key : noted_) {
        Entry* entry = known(key);
        if (entry == nullptr) continue;
        if (entry->made && entry->last >= 0) used.emplace_back(entry->storage, entry->last);
        entry->pending = false;
        entry->last = -1;
      }
      noted_.clear();
    }
    py::list records, touched, fixed;
    for (const auto& [key, storage] : settled) {
      fixed.append(py::make_tuple(reinterpret_cast<int64_t>(key), wrapped(storage)));
    }
    for (Record& record : journal) {
      py::list views, outputs;
      for (const View& view : record.views) views.append(described(view.place));
      for (const Place& place : record.outputs) {
        outputs.append(place.stays && !place.storage.expired() ? py::object(py::none()) : described(place));
      }
      int64_t number = record.number, writes = record.writes;
      records.append(py::make_tuple(py::cast(std::move(record)), number, views, outputs, writes));
    }
    for (const auto& [storage, last] : used) touched.append(py::make_tuple(wrapped(storage), last));
    return py::make_tuple(fixed, records, passing, touched);
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

  int64_t allocated() const {
    if (allocator_ != nullptr) return allocator_->getDeviceStats(device_.index()).allocated_bytes[0].current;
    py::gil_scoped_acquire held;
    return count_().cast<int64_t>();
  }

  bool has_news() const { return !journal_.empty() || !fixed_.empty(); }
  bool is_crowded() const { return seen_.size() >= CROWDED; }

  static inline std::atomic<Watch*> active{nullptr};

  int64_t at = -1;  // which operator of the known step ran last
  bool overwrote = false;  // a record that Python has not read ended a content that it may know
  bool over = false;  // more is allocated than there was in the known step
  bool journals = false;
  bool watches = false;  // which operators pass
  int64_t away = 0;  // bytes that the program holds and that are evicted
  double clock = 0;

 private:
  static void pass(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, OURS), stack);
  }

  void run(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const Schema& schema = op.schema();
    Arguments args(stack->data() + stack->size() - schema.arguments().size(), schema.arguments().size());
    Lock lock(mutex_);
    auto found = traits_.find(&schema);
    const Traits* traits = found == traits_.end() ? nullptr : &found->second;
    lock.unlock();
    if (traits == nullptr) return is_alias(schema) ? pass(op, keys, stack) : ask(op, stack, {});
    if (traits->looks && args[0].isTensor() && is_plain(args[0].toTensor()) && is_there(args[0].toTensor())) {
      return pass(op, keys, stack);
    }
    Scan scan;
    scan.key.push_back(reinterpret_cast<int64_t>(&schema));
    for (const IValue& value : args) read(value, scan);
    bool lone = scan.tensors.empty();
    if (lone && scan.foreign && scan.plain && !traits->has_device) return pass(op, keys, stack);
    bool odd = !scan.plain || scan.foreign || (lone && scan.fractions);
    if (odd || !scan.there || traits->looks) return ask(op, stack, {});
    lock.lock();
    auto kind = kinds_.find(scan.key);
    if (kind == kinds_.end()) {
      lock.unlock();
    } else if (familiar_) {
      Kind what = kind->second;
      lock.unlock();
      if (is_expected(what, *traits, args)) return pass(op, keys, stack);
    } else if (journals && traits->repeatable && !is_crowded()) {
      Kind what = kind->second;
      bool over = may_write_over(*traits, args);
      bool fine = over || may_write(*traits, args);
      lock.unlock();
      int64_t memory = allocated();
      if (fine && memory + what.bytes <= budget_ && note(op, keys, stack, *traits, what, memory, scan, over)) return;
    }
    if (lock.owns_lock()) lock.unlock();
    ask(op, stack, std::move(scan.key));
  }

  // The same tensor again: nothing can go wrong, and PyTorch calls it where Python must not have a hand in the result.
  static bool is_alias(const Schema& schema) { return schema.name() == "aten::alias" || schema.name() == "aten::detach"; }

  // Let Python do it.
  void ask(const OperatorHandle& op, Stack* stack, Key key) {
    std::vector<std::vector<Place>> places;
    size_t count = op.schema().arguments().size();
    for (const IValue& value : Arguments(stack->data() + stack->size() - count, count)) places.push_back(ours(value));
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
    if (entries_.size() >= many_) tidy();
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
        Entry& entry = entry_at(place);
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
      for (const Place& place : ours(value)) {
        if (inputs.count(place.key) || known(place.key) != nullptr) continue;
        Entry& entry = entry_at(place);
        entry.made = made;
        entry.told = true;
        if (made) made_now.push_back(place.key);
      }
    }
    for (const Place* place : reads) {
      auto& readers = entry_at(*place).readers;
      readers.insert(readers.end(), made_now.begin(), made_now.end());
    }
  }

  // An operator of the known step, if it is the one that comes next and may pass.
  bool is_expected(const Kind& kind, const Traits& traits, Arguments args) {
    size_t next = at + 1;
    if (next >= numbers_.size() || !light_[next] || numbers_[next] != kind.alike) return false;
    if (careful_) {
      Lock lock(mutex_);
      if (!may_write(traits, args)) return false;
    }
    if (++passed_ % LOOK_EVERY == 0 && allocated() > memory_[next] + offset_ + margin_) {
      over = true;
      return false;
    }
    at = next;
    seconds_ += kind.seconds;
    return true;
  }

  // Run an operator and write down how to repeat it. False if there was no memory for it; nothing has happened then.
  bool note(const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Traits& traits, const Kind& kind,
            int64_t memory, const Scan& scan, bool over) {
    size_t count = op.schema().arguments().size();
    std::vector<IValue> args(stack->end() - count, stack->end());
    size_t below = stack->size() - count;
    bool updates = traits.updates(args);
    try {
      pass(op, keys, stack);
    } catch (const c10::OutOfMemoryError&) {
      if (updates || !traits.writes.empty()) throw;
      stack->resize(below);
      stack->insert(stack->end(), args.begin(), args.end());
      return false;
    }
    Lock lock(mutex_);
    if (watches) {
      seen_.push_back(kind.alike);
      held_.push_back(memory + away);
    }
    if (over || traits.writes.empty()) write_down(op, kind, traits, std::move(args), *stack, over);
    double now = clock + seconds_;
    for (const at::Tensor& tensor : scan.tensors) use(entry_at(Place(tensor)), now, Place(tensor).key);
    seconds_ += kind.seconds;
    return true;
  }

  void write_down(const OperatorHandle& op, const Kind& kind, const Traits& traits, std::vector<IValue> args,
                  const Stack& stack, bool over) {
    bool grad = c10::GradMode::is_enabled();
    Record record{op, kind.number, grad, !grad && torch::autograd::get_current_graph_task_id() != -1};
    bool updates = traits.updates(args);
    std::vector<at::Tensor> results;
    for (const IValue& value : stack) collect(value, results);
    if (over) record.outputs.emplace_back(args[traits.writes[0]].toTensor());
    for (const at::Tensor& tensor : results) {
      if (!is_ours(tensor)) continue;
      Place place(tensor);
      auto found = entries_.find(place.key);
      if (found != entries_.end() && !found->second.storage.expired()) continue;
      bool twice = std::any_of(record.outputs.begin(), record.outputs.end(),
                               [&](const Place& one) { return one.key == place.key; });
      if (!twice && !is_input(place.key, args)) record.outputs.push_back(std::move(place));
    }
    if (record.outputs.empty()) return;
    for (size_t i = 0; i < args.size(); ++i) {
      if (updates && (i == STATISTICS || i == STATISTICS + 1) && args[i].isTensor() && args[i].toTensor().defined()) {
        const at::Tensor& tensor = args[i].toTensor();
        record.scratch.push_back({i, Shape(tensor.sizes().begin(), tensor.sizes().end()), tensor.options()});
        args[i] = IValue();
      } else {
        if (over && i == traits.writes[0]) record.writes = static_cast<int64_t>(record.views.size());
        args[i] = emptied(args[i], record);
      }
    }
    record.args = std::move(args);
    for (const View& view : record.views) {
      Entry& entry = entry_at(view.place);
      entry.pending = true;
      for (const Place& place : record.outputs) {
        if (place.key != view.place.key) entry.readers.push_back(place.key);
      }
    }
    for (const Place& place : record.outputs) {
      Entry& entry = entry_at(place);
      entry.rewritten = entry.rewritten || over;
      entry.made = true;
      use(entry, clock + seconds_, place.key);
    }
    overwrote = overwrote || over;
    if (journal_.size() >= SOON) {
      Record& earlier = journal_[journal_.size() - SOON];
      earlier.passing = earlier.is_dead();
    }
    journal_.push_back(std::move(record));
    if (journal_.size() >= crowded_) {
      std::vector<std::pair<int64_t, bool>> unused;
      journal_ = compact(unused);
      crowded_ = std::max(CROWDED, 2 * journal_.size());
    }
  }

  // Without the records that nobody can need: neither their results nor anything that is made from them is there.
  std::vector<Record> compact(std::vector<std::pair<int64_t, bool>>& passing) {
    std::unordered_set<StorageImpl*> needed;
    std::vector<Record> kept;
    size_t left = journal_.size();
    for (auto record = journal_.rbegin(); record != journal_.rend(); ++record, --left) {
      bool is_recent = journal_.size() - left < SOON;
      if (record->is_dead()) passing.emplace_back(record->number, record->passing || is_recent);
      bool wanted = false;
      for (Place& place : record->outputs) {
        if (place.storage.expired()) {
          wanted = wanted || needed.count(place.key);
        } else if (record->invalid || (place.stays = place.stays || had_better_stay(*record, place, is_recent))) {
          if (Entry* entry = known(place.key)) entry->made = false;
        } else {
          wanted = true;
        }
      }
      if (record->invalid || !wanted) continue;
      for (const View& view : record->views) needed.insert(view.place.key);
      kept.push_back(std::move(*record));
    }
    std::reverse(kept.begin(), kept.end());
    if (entries_.size() >= many_) tidy();
    return kept;
  }

  // Forget storages that are no more, and that nothing was made from that is there and may be made again.
  void tidy() {
    std::unordered_map<StorageImpl*, std::vector<StorageImpl*>> sources;
    std::unordered_set<StorageImpl*> matter;
    std::vector<StorageImpl*> stack;
    for (auto& [key, entry] : entries_) {
      for (StorageImpl* reader : entry.readers) sources[reader].push_back(key);
      if (entry.rewritten || (entry.made && !entry.storage.expired())) stack.push_back(key);
    }
    while (!stack.empty()) {
      StorageImpl* top = stack.back();
      stack.pop_back();
      if (!matter.insert(top).second) continue;
      for (StorageImpl* source : sources[top]) {
        if (known(source)->storage.expired()) stack.push_back(source);  // else it is there, and need not be made again
      }
    }
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      auto& readers = entry->second.readers;
      std::sort(readers.begin(), readers.end());
      readers.erase(std::unique(readers.begin(), readers.end()), readers.end());
      readers.erase(std::remove_if(readers.begin(), readers.end(), [&](auto* one) { return !matter.count(one); }),
                    readers.end());
      bool over = entry->second.storage.expired() && readers.empty();
      entry = over ? entries_.erase(entry) : std::next(entry);
    }
    auto gone = [&](StorageImpl* key) { return known(key) == nullptr; };
    noted_.erase(std::remove_if(noted_.begin(), noted_.end(), gone), noted_.end());
    many_ = std::max(CROWDED, 2 * entries_.size());
  }

  // One argument for the key, and what is there.
  void read(const IValue& value, Scan& scan) const {
    Key& key = scan.key;
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined()) {
        key.push_back(6);
        return;
      }
      if (!is_plain(tensor)) {
        scan.plain = false;
        return;
      }
      bool ours = is_ours(tensor);
      key.push_back(ours ? 1 : 2);
      key.push_back(static_cast<int64_t>(tensor.scalar_type()));
      key.push_back(tensor.dim());
      key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
      if (ours) {
        key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
        scan.there = scan.there && is_there(tensor);
        scan.tensors.push_back(tensor);
      } else if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        scan.foreign = true;
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
      scan.fractions = true;
    } else if (value.isList()) {
      key.push_back(8);
      key.push_back(static_cast<int64_t>(value.toListRef().size()));
      for (const IValue& one : value.toListRef()) {
        read(one, scan);
        if (one.isTensor() && !value.isTensorList()) scan.plain = false;
      }
    } else if (value.isString()) {
      key.push_back(9);
      key.push_back(static_cast<int64_t>(std::hash<std::string>()(value.toStringRef())));
    } else if (value.isDevice()) {
      key.push_back(10);
      key.push_back(static_cast<int64_t>(value.toDevice().type()) * 256 + value.toDevice().index());
    } else {
      scan.plain = false;
    }
  }

  // An argument with an undefined tensor for each of the device's; their views.
  IValue emptied(const IValue& value, Record& record) const {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      record.gaps.push_back(tensor.defined() && is_ours(tensor));
      if (!record.gaps.back()) return value;
      record.views.emplace_back(tensor);
      return IValue(at::Tensor());
    }
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const IValue& one : value.toListRef()) list.push_back(emptied(one, record).toTensor());
    return list;
  }

  // Whether what a call writes to was there before, and nothing that may be made again was made from it, or only what
  // Python does not know: then that is not made again any more.
  bool may_write(const Traits& traits, Arguments args) {
    std::vector<at::Tensor> written;
    if (traits.updates(args)) {
      collect(args[STATISTICS], written);
      collect(args[STATISTICS + 1], written);
    }
    for (size_t i : traits.writes) collect(args[i], written);
    std::vector<StorageImpl*> changed;
    std::unordered_set<StorageImpl*> from, waiting;
    for (const at::Tensor& tensor : written) {
      if (tensor.device() != device_) continue;
      auto found = entries_.find(tensor.storage().unsafeGetStorageImpl());
      if (found == entries_.end()) continue;
      if (found->second.made || !follow(found->second, from, waiting)) return false;
      changed.push_back(found->first);
    }
    for (StorageImpl* key : changed) entries_.find(key)->second.readers.clear();
    for (StorageImpl* key : from) known(key)->made = false;
    for (StorageImpl* key : waiting) {
      Entry* entry = known(key);
      entry->made = false;
      entry->pending = true;
      noted_.push_back(key);
      fixed_.emplace_back(key, entry->storage);
    }
    if (from.empty()) return true;
    for (Record& record : journal_) {
      record.invalid = record.invalid || std::any_of(record.outputs.begin(), record.outputs.end(),
                                                     [&](const Place& one) { return from.count(one.key) > 0; });
    }
    return true;
  }

  // All that was made from a storage: what is known here, and what Python knows and can be told later because nothing was
  // made from that. False if there is more.
  bool follow(const Entry& first, std::unordered_set<StorageImpl*>& from, std::unordered_set<StorageImpl*>& waiting) {
    std::vector<const Entry*> stack{&first};
    while (!stack.empty()) {
      const Entry* top = stack.back();
      stack.pop_back();
      for (StorageImpl* key : top->readers) {
        Entry* reader = known(key);
        if (reader == nullptr || from.count(key)) continue;
        bool is_there = !reader->storage.expired();
        if (is_there && reader->made && reader->told) {
          auto storage = reader->storage.lock();
          if (!reader->readers.empty() || reader->rewritten || storage->nbytes() == 0) return false;
          waiting.insert(key);
          continue;
        }
        if (is_there && !reader->made && !reader->rewritten) continue;
        from.insert(key);
        if (!is_there || reader->rewritten) stack.push_back(reader);
      }
    }
    return true;
  }

  // Whether all that a call writes to is one tensor that can be made again, up to here and with the call.
  bool may_write_over(const Traits& traits, Arguments args) const {
    if (traits.makes || traits.writes.size() != 1 || !args[traits.writes[0]].isTensor()) return false;
    const at::Tensor& tensor = args[traits.writes[0]].toTensor();
    if (!tensor.defined() || !is_ours(tensor) || (tensor.requires_grad() && tensor.is_leaf())) return false;
    auto found = entries_.find(tensor.storage().unsafeGetStorageImpl());
    if (found == entries_.end() || !found->second.made) return false;
    return !found->second.told || found->second.readers.empty();  // else Python must know now what is made from which
  }

  bool is_input(StorageImpl* key, Arguments args) const {
    std::vector<at::Tensor> tensors;
    for (const IValue& value : args) collect(value, tensors);
    return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
      return tensor.has_storage() && tensor.storage().unsafeGetStorageImpl() == key;
    });
  }

  // A strided tensor and nothing more.
  static bool is_plain(const at::Tensor& tensor) {
    static const DispatchKeySet odd(
        {DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::Conjugate, DispatchKey::Negative,
         DispatchKey::ZeroTensor, DispatchKey::Functionalize, DispatchKey::FuncTorchGradWrapper,
         DispatchKey::FuncTorchBatched, DispatchKey::BatchedNestedTensor, OURS});
    return tensor.layout() == c10::kStrided && tensor.has_storage() && !tensor.is_quantized() && !tensor.is_meta() &&
        !tensor.key_set().has_any(odd);
  }

  // A tensor of the device; on the CPU not a number that PyTorch made one of for a call.
  bool is_ours(const at::Tensor& tensor) const {
    return tensor.device() == device_ && is_plain(tensor) && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
  }

  std::vector<Place> ours(const IValue& value) const {
    std::vector<at::Tensor> tensors;
    collect(value, tensors);
    std::vector<Place> places;
    for (const at::Tensor& tensor : tensors) {
      if (is_ours(tensor)) places.emplace_back(tensor);
    }
    return places;
  }

  static bool is_there(const at::Tensor& tensor) { return tensor.numel() == 0 || tensor.storage().nbytes() > 0; }

  void use(Entry& entry, double now, StorageImpl* key) {
    if (entry.last < 0) noted_.push_back(key);
    entry.last = now;
  }

  Entry& entry_at(const Place& place) { return entries_.try_emplace(place.key, Entry{place.storage}).first->second; }

  Entry* known(StorageImpl* key) {
    auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : &found->second;
  }

  static py::object wrapped(const Weak& weak) {
    auto storage = weak.lock();
    if (!storage) return py::none();
    return py::reinterpret_steal<py::object>(THPStorage_Wrap(c10::Storage(std::move(storage))));
  }

  static py::tuple described(const Place& place) {
    return py::make_tuple(reinterpret_cast<int64_t>(place.key), wrapped(place.storage), place.bytes);
  }

  // Whether a result that is there had better stay for good, so that nobody needs to know how it was made: a tiny thing
  // that came with another one, or a gradient that waits for an optimizer. Not if that comes to much in all.
  bool had_better_stay(const Record& record, const Place& place, bool is_recent) {
    int64_t bytes = static_cast<int64_t>(place.bytes);
    Entry* entry = known(place.key);
    bool beside = bytes < budget_ / TINY && place.key != record.outputs[0].key;
    bool waits = record.backward && bytes < budget_ / SMALL && !is_recent && entry != nullptr && entry->readers.empty();
    if (record.writes >= 0 || !(beside || waits)) return false;
    if (staying_bytes_ + bytes > budget_ / STAYING) {
      auto gone = [](const Place& one) { return one.storage.expired(); };
      staying_.erase(std::remove_if(staying_.begin(), staying_.end(), gone), staying_.end());
      staying_bytes_ = 0;
      for (const Place& one : staying_) staying_bytes_ += static_cast<int64_t>(one.bytes);
      if (staying_bytes_ + bytes > budget_ / STAYING) return false;
    }
    staying_.push_back(place);
    staying_bytes_ += bytes;
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
  std::unordered_map<StorageImpl*, Entry> entries_;
  std::vector<Record> journal_;
  std::vector<std::pair<StorageImpl*, Weak>> fixed_;  // what Python knows, and does not know to be so
  std::vector<StorageImpl*> noted_;  // storages that were used since Python last read
  std::vector<Place> staying_;
  int64_t staying_bytes_ = 0;
  size_t crowded_ = CROWDED, many_ = CROWDED;
  std::vector<int64_t> seen_, held_;
  double seconds_ = 0;
  bool familiar_ = false, careful_ = false;
  int64_t offset_ = 0, margin_ = 0, passed_ = 0;
  std::vector<int64_t> numbers_, memory_;
  std::vector<bool> light_;
};

}  // namespace recoup
