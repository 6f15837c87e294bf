// What ran without Python, written down until Python reads it: see recoup.online.journal.
#pragma once

#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <optional>

#include "storages.h"

namespace recoup {

constexpr size_t SOON = 8;  // records that are written in the life of a result that is only passing
constexpr size_t LATER = 32;  // and of a gradient that waits for another one

class Journal {
 public:
  Journal(c10::Device device, int64_t budget) : storages(device, budget), device_(device) {}

  // How to repeat a call that ran at this time, with its results on the stack; `over`: it wrote over what it was given.
  // Nothing if it made nothing.
  std::optional<Record> describe(const OperatorHandle& op, const Kind& kind, const Traits& traits,
                                 std::vector<IValue> args, const Stack& stack, bool over, double now) {
    bool grad = c10::GradMode::is_enabled();
    Record record{op, kind.number, grad, !grad && torch::autograd::get_current_graph_task_id() != -1};
    bool updates = traits.updates(args);
    std::vector<at::Tensor> results;
    for (const IValue& value : stack) collect(value, results);
    if (over) record.outputs.emplace_back(args[traits.writes[0]].toTensor());
    for (const at::Tensor& tensor : results) {
      if (!is_ours(tensor, device_)) continue;
      Place place(tensor);
      const Entry* entry = storages.known(place.key);
      if (entry != nullptr && !entry->storage.expired()) continue;
      bool twice = std::any_of(record.outputs.begin(), record.outputs.end(),
                               [&](const Place& one) { return one.key == place.key; });
      if (!twice && !is_input(place.key, args)) record.outputs.push_back(std::move(place));
    }
    if (record.outputs.empty()) return std::nullopt;
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
      Entry& entry = storages.at(view.place);
      entry.pending = true;
      for (const Place& place : record.outputs) {
        if (place.key != view.place.key) entry.readers.push_back(place.key);
      }
    }
    for (const Place& place : record.outputs) {
      Entry& entry = storages.at(place);
      entry.rewritten = entry.rewritten || over;
      entry.made = true;
      storages.use(entry, now, place.key);
    }
    overwrote = overwrote || (over && storages.known(record.outputs[0].key)->told);
    return record;
  }

  // Write it down.
  void add(Record record) {
    if (records_.size() >= SOON) {
      Record& earlier = records_[records_.size() - SOON];
      earlier.passing = earlier.is_dead();
    }
    records_.push_back(std::move(record));
    if (records_.size() >= crowded_) {
      std::vector<std::pair<int64_t, bool>> unused;
      records_ = compact(unused);
      crowded_ = std::max(CROWDED, 2 * records_.size());
    }
  }

  // What was made from these is not what it would be if it were made again.
  void invalidate(const std::unordered_set<StorageImpl*>& from) {
    for (Record& record : records_) record.invalidate(from);
  }

  // A plan was left: the records of what it knew, and what they need to be repeated, until Python has read them.
  void add(std::vector<Record> records, std::vector<c10::Storage> keeps) {
    for (const Record& record : records) {
      for (const View& view : record.views) storages.noted.push_back(view.place.key);  // it is pending until they are read
    }
    records_.insert(records_.end(), std::make_move_iterator(records.begin()), std::make_move_iterator(records.end()));
    keeps_.insert(keeps_.end(), keeps.begin(), keeps.end());
  }

  // Nobody needs to know how these results of calls were made: they stay.
  void settle(const std::vector<Record>& records) {
    for (const Record& record : records) {
      for (const Place& place : record.outputs) {
        if (Entry* entry = storages.known(place.key)) entry->made = false;
      }
      for (const View& view : record.views) {
        if (Entry* entry = storages.known(view.place.key)) entry->pending = false;
      }
    }
    for (const Record& record : records_) {
      for (const View& view : record.views) storages.await(view.place);
    }
    storages.tidy();
  }

  // What cannot be made again any more; the records that something may need, in order; of the others, which results were
  // passing; when what was used; what must not die meanwhile. Unless `all` are wanted, or a plan was left, the oldest
  // ones are enough, `count` of them and those after them whose results take so many `bytes`.
  py::tuple take(std::mutex& mutex, bool all, int64_t bytes, size_t count) {
    std::vector<Record> journal;
    std::vector<std::pair<int64_t, bool>> passing;
    std::vector<std::pair<Weak, double>> used;
    std::vector<std::pair<StorageImpl*, Weak>> settled;
    {
      std::unique_lock<std::mutex> lock(mutex);
      records_ = compact(passing);
      journal = all || !keeps_.empty() ? std::exchange(records_, {}) : split(bytes, count);
      for (const Record& record : journal) {
        for (const Place& place : record.outputs) {
          if (Entry* entry = storages.known(place.key)) entry->told = true;
        }
      }
      settled.swap(storages.fixed);
      overwrote = false;
      used = storages.take_used();
      for (const Record& record : records_) {
        for (const View& view : record.views) storages.await(view.place);
      }
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
      int64_t number = record.number, writes = record.writes, at = record.at;
      records.append(py::make_tuple(py::cast(std::move(record)), number, views, outputs, writes, at));
    }
    for (const auto& [storage, last] : used) touched.append(py::make_tuple(wrapped(storage), last));
    py::list keeps;
    for (c10::Storage& storage : std::exchange(keeps_, {})) keeps.append(wrapped(std::move(storage)));
    return py::make_tuple(fixed, records, passing, touched, keeps);
  }

  bool has_news() const { return !records_.empty() || !storages.fixed.empty(); }

  // As Python knows it.
  static py::object wrapped(c10::Storage storage) {
    return py::reinterpret_steal<py::object>(THPStorage_Wrap(std::move(storage)));
  }

  Storages storages;
  bool overwrote = false;  // a record that Python has not read ended a content that it may know

 private:
  // Without the records that nobody can need: neither their results nor anything that is made from them is there.
  std::vector<Record> compact(std::vector<std::pair<int64_t, bool>>& passing) {
    std::unordered_set<StorageImpl*> needed;
    std::vector<Record> kept;
    size_t left = records_.size();
    for (auto record = records_.rbegin(); record != records_.rend(); ++record, --left) {
      bool is_recent = records_.size() - left < SOON;
      record->recent = records_.size() - left < (record->backward ? LATER : SOON);
      if (record->is_dead()) passing.emplace_back(record->number, record->passing || is_recent);
      bool wanted = false;
      for (Place& place : record->outputs) {
        if (place.storage.expired()) {
          wanted = wanted || needed.count(place.key);
        } else if (record->invalid || (place.stays = place.stays || storages.had_better_stay(*record, place, is_recent))) {
          if (Entry* entry = storages.known(place.key)) entry->made = false;
        } else {
          wanted = true;
        }
      }
      if (record->invalid || !wanted) continue;
      for (const View& view : record->views) needed.insert(view.place.key);
      kept.push_back(std::move(*record));
    }
    std::reverse(kept.begin(), kept.end());
    storages.tidy();
    return kept;
  }

  // The oldest records whose results are there, and those that they need: so many, and then some whose results take so many
  // bytes. Not those whose results may well be gone soon. What is written over must not be split: all records up to such a
  // write go with it. The others stay.
  std::vector<Record> split(int64_t bytes, size_t count) {
    std::unordered_map<StorageImpl*, std::vector<size_t>> makers;
    std::vector<size_t> stack;
    for (size_t i = 0; i < records_.size(); ++i) {
      const Record& record = records_[i];
      for (const Place& place : record.outputs) makers[place.key].push_back(i);
      const Entry* target = record.writes < 0 ? nullptr : storages.known(record.outputs[0].key);
      bool offers = bytes > 0 && !record.recent && record.has_results();
      if (offers || (target != nullptr && target->told)) stack.push_back(i);
      if (offers && stack.size() >= count) bytes -= record.bytes();
    }
    std::vector<bool> goes(records_.size());
    size_t before = 0;  // all of these go
    while (!stack.empty()) {
      size_t top = stack.back();
      stack.pop_back();
      if (goes[top]) continue;
      goes[top] = true;
      for (const View& view : records_[top].views) {
        for (size_t maker : makers[view.place.key]) stack.push_back(maker);
      }
      for (const Place& place : records_[top].outputs) {
        for (size_t maker : makers[place.key]) stack.push_back(maker);
      }
      for (; records_[top].writes >= 0 && before < top; ++before) stack.push_back(before);
    }
    std::vector<Record> taken, left;
    for (size_t i = 0; i < records_.size(); ++i) (goes[i] ? taken : left).push_back(std::move(records_[i]));
    records_ = std::move(left);
    return taken;
  }

  // An argument with an undefined tensor for each of the device's; their views.
  IValue emptied(const IValue& value, Record& record) const {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      record.gaps.push_back(tensor.defined() && is_ours(tensor, device_));
      if (!record.gaps.back()) return value;
      record.views.emplace_back(tensor);
      return IValue(at::Tensor());
    }
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const IValue& one : value.toListRef()) list.push_back(emptied(one, record).toTensor());
    return list;
  }

  bool is_input(StorageImpl* key, Arguments args) const {
    std::vector<at::Tensor> tensors;
    for (const IValue& value : args) collect(value, tensors);
    return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
      return tensor.has_storage() && tensor.storage().unsafeGetStorageImpl() == key;
    });
  }

  static py::object wrapped(const Weak& weak) {
    auto storage = weak.lock();
    return storage ? wrapped(c10::Storage(std::move(storage))) : py::none();
  }

  static py::tuple described(const Place& place) {
    return py::make_tuple(reinterpret_cast<int64_t>(place.key), wrapped(place.storage), place.bytes);
  }

  c10::Device device_;
  std::vector<Record> records_;
  std::vector<c10::Storage> keeps_;
  size_t crowded_ = CROWDED;
};

}  // namespace recoup
