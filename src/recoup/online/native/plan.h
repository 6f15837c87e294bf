// The plan of a step, followed without Python: what goes and what is made again before each operator.
//
// Records of the step's operators are kept here while it runs. Python learns of them only if the program leaves its course:
// then they go to the journal, like all others.
#pragma once

#include <functional>

#include "journal.h"
#include "memory.h"

namespace recoup {

struct Order {
  bool evict;
  std::vector<int64_t> values;  // one to evict, or all that one operator makes
};

// What Python says of a step; operators and values are called by their numbers: see recoup.online.orders.
struct Script {
  std::vector<bool> remembers;  // whether the plan must know what an operator makes
  std::vector<std::vector<Order>> orders;  // before each operator
  std::vector<int64_t> counts;  // how many values there are before each, and at the end
  std::unordered_set<int64_t> holds;  // values to hold longer than the program does, until they are evicted
  std::unordered_set<int64_t> lost;  // values that are made again because the program lets go of them too early
};

struct Done {
  int64_t evictions = 0, repeated = 0;
  double seconds = 0;
};

// What there is at the end of a run: records, what they need to be repeated as far as that could die, and what else was held.
struct Left {
  std::vector<Record> records;
  std::vector<c10::Storage> keeps, others;
};

class Plan {
 public:
  using Room = std::function<bool(int64_t)>;  // whether so many more bytes fit

  explicit Plan(c10::Device device) : device_(device) {}

  Script script;

  bool exists() const { return !script.orders.empty(); }

  // What is there, or kept, for the sake of what is needed no more goes.
  void tidy() {
    auto is_over = [&](int64_t number) {
      Value& value = values_.at(number);
      if (!is_needed(number)) {
        value.own = {};
        value.keeps.clear();
      }
      return !value.own && value.keeps.empty();
    };
    owners_.erase(std::remove_if(owners_.begin(), owners_.end(), is_over), owners_.end());
  }

  // Do what is to be done before an operator. False if that cannot be done.
  bool obey(size_t at, const Room& has_room) {
    if (broken_) return false;
    if (obeyed_ == static_cast<int64_t>(at)) return true;
    obeyed_ = static_cast<int64_t>(at);
    for (const Order& order : script.orders[at]) {
      for (int64_t number : order.values) {
        auto found = values_.find(number);
        if (found == values_.end()) continue;
        if (order.evict) {
          holding_.erase(number);
          evict(number);
        } else if (!bytes_of(found->second) && is_needed(number) && !make(found->second.record, has_room)) {
          return false;
        }
      }
    }
    keep_less();
    return true;
  }

  // What a tensor looks at, if the plan did not see to that. False if it cannot be made again here.
  bool bring_back(const at::Tensor& tensor, const Room& has_room) {
    if (is_there(tensor)) return true;
    auto found = current_.find(tensor.storage().unsafeGetStorageImpl());
    return found != current_.end() && make(values_.at(found->second).record, has_room) && is_there(tensor);
  }

  // How to make again what an operator of the step has made.
  void add(size_t at, Record record, const Kind& kind) {
    std::vector<int64_t> reads;
    for (const View& view : record.views) {
      auto found = current_.find(view.place.key);
      reads.push_back(found == current_.end() ? OUTSIDE : found->second);
    }
    auto count = static_cast<int64_t>(record.outputs.size());
    bool as_planned = count == script.counts[at + 1] - script.counts[at];
    broken_ = broken_ || (script.remembers[at] && !as_planned);
    record.at = as_planned ? static_cast<int64_t>(at) : -1;
    int64_t first = as_planned ? script.counts[at] : unplanned_ -= count;
    int64_t number = first;
    for (const Place& place : record.outputs) {
      auto before = current_.find(place.key);
      if (before != current_.end()) values_.at(before->second).replaced = true;
      current_[place.key] = number;
      values_.emplace(number, Value{place, records_.size()});
      if (script.holds.count(number)) holding_.emplace(number, locked(place));
      for (int64_t read : reads) {
        if (read != OUTSIDE && script.remembers[at]) readers_[read].push_back(number);
      }
      ++number;
    }
    records_.push_back({std::move(record), std::move(reads), first, kind});
  }

  // What was made from these is not what it would be if it were made again.
  void invalidate(const std::unordered_set<StorageImpl*>& from) {
    for (Noted& noted : records_) noted.record.invalidate(from);
  }

  // The program has written over what a tensor looks at, and nobody can do that again.
  void give_up(const at::Tensor& tensor) {
    auto found = current_.find(tensor.storage().unsafeGetStorageImpl());
    if (found == current_.end()) return;
    values_.at(found->second).replaced = true;
    current_.erase(found);
  }

  // Whether the program can reach something that is evicted.
  bool has_away() const {
    return std::any_of(values_.begin(), values_.end(), [](const auto& one) {
      const auto& [number, value] = one;
      return !value.replaced && !value.place.storage.expired() && !bytes_of(value);
    });
  }

  // The run is over, or left. What is not needed of this must not die under a lock: storages tell Python when they do.
  Left end() {
    Left left;
    for (auto& [number, value] : values_) {
      left.keeps.insert(left.keeps.end(), value.keeps.begin(), value.keeps.end());
      left.others.push_back(std::move(value.own));
    }
    for (auto& [number, storage] : holding_) left.others.push_back(std::move(storage));
    for (Noted& noted : records_) left.records.push_back(std::move(noted.record));
    records_.clear();
    values_.clear();
    current_.clear();
    holding_.clear();
    readers_.clear();
    owners_.clear();
    back_.clear();
    obeyed_ = unplanned_ = -1;
    broken_ = false;
    return left;
  }

  Done take_done() { return std::exchange(done_, {}); }

 private:
  static constexpr int64_t OUTSIDE = -1;  // no value that the plan must know

  struct Value {
    Place place;  // where the program reaches it
    size_t record;
    bool replaced = false;  // the program has written over it
    c10::Storage own = {};  // its bytes, where no tensor of the program reaches them
    std::vector<c10::Storage> keeps = {};  // while it is away, what it will be made from
  };

  struct Noted {
    Record record;
    std::vector<int64_t> reads;  // the value that each view looked at
    int64_t first;  // of the values that it made
    Kind kind;
  };

  // The storage, if its bytes are there.
  static c10::Storage locked(const Place& place) {
    auto storage = place.storage.lock();
    return storage && (storage->nbytes() > 0 || place.bytes == 0) ? c10::Storage(std::move(storage)) : c10::Storage();
  }

  // Where a value's bytes are; nowhere if they are gone.
  static c10::Storage bytes_of(const Value& value) {
    c10::Storage storage = value.replaced ? c10::Storage() : locked(value.place);
    return storage ? storage : value.own;
  }

  c10::Storage source_of(const Noted& noted, size_t view) const {
    int64_t read = noted.reads[view];
    return read == OUTSIDE ? locked(noted.record.views[view].place) : bytes_of(values_.at(read));
  }

  void evict(int64_t number) {
    Value& value = values_.at(number);
    c10::Storage bytes = bytes_of(value);
    std::vector<c10::Storage> keeps;
    std::unordered_map<size_t, bool> known;
    if (!bytes || value.place.bytes == 0 || !can_make(value.record, keeps, known)) return;
    empty(bytes);
    value.own = {};
    if (is_needed(number)) {
      value.keeps = std::move(keeps);
      owners_.push_back(number);
    }
    ++done_.evictions;
  }

  // Whether a call can be repeated, whatever the program lets go of from now on, if it lets go of nothing that is kept.
  bool can_make(size_t index, std::vector<c10::Storage>& keeps, std::unordered_map<size_t, bool>& known) const {
    if (auto found = known.find(index); found != known.end()) return found->second;
    const Noted& noted = records_[index];
    bool can = !noted.record.invalid;
    for (size_t view = 0; can && view < noted.reads.size(); ++view) {
      int64_t read = noted.reads[view];
      size_t before = keeps.size();
      bool is_made = read != OUTSIDE && (script.lost.count(read) || !source_of(noted, view));
      if (is_made && can_make(values_.at(read).record, keeps, known)) continue;
      if (is_made) known.clear();  // what it would have needed is not kept
      keeps.erase(keeps.begin() + static_cast<std::ptrdiff_t>(before), keeps.end());
      keeps.push_back(source_of(noted, view));
      can = static_cast<bool>(keeps.back());
    }
    return known[index] = can;
  }

  // Repeat a call; what it makes and is away comes back. False if something is missing.
  bool make(size_t index, const Room& has_room) {
    const Noted& noted = records_[index];
    const Record& record = noted.record;
    if (record.invalid) return false;
    for (size_t view = 0; view < noted.reads.size(); ++view) {
      int64_t read = noted.reads[view];
      if (!source_of(noted, view) && (read == OUTSIDE || !make(values_.at(read).record, has_room))) return false;
    }
    std::vector<c10::Storage> sources;
    for (size_t view = 0; view < noted.reads.size(); ++view) {
      sources.push_back(source_of(noted, view));
      if (!sources.back()) return false;  // another was made by writing over it
    }
    if (!has_room(noted.kind.bytes)) return false;
    std::vector<c10::Storage> made;
    if (record.writes >= 0) {  // over bytes that nobody else reads
      int64_t read = noted.reads[record.writes];
      if (read == OUTSIDE || !values_.at(read).own) return false;
      made.push_back(std::exchange(values_.at(read).own, {}));
    }
    for (const at::Tensor& tensor : record.run(sources)) {
      bool is_new = is_ours(tensor, device_) && !contains(sources, tensor.storage()) && !contains(made, tensor.storage());
      if (is_new && record.writes < 0) made.push_back(tensor.storage());
    }
    if (made.size() != record.outputs.size()) return false;
    for (size_t i = 0; i < made.size(); ++i) give(noted.first + static_cast<int64_t>(i), std::move(made[i]));
    ++done_.repeated;
    done_.seconds += noted.kind.seconds;
    return true;
  }

  static bool contains(const std::vector<c10::Storage>& storages, const c10::Storage& one) {
    return std::any_of(storages.begin(), storages.end(), [&](const c10::Storage& other) { return other.is_alias_of(one); });
  }

  // The new bytes of a value, if anyone may read them.
  void give(int64_t number, c10::Storage made) {
    Value& value = values_.at(number);
    auto target = value.replaced ? c10::intrusive_ptr<StorageImpl>() : value.place.storage.lock();
    if (!target) {
      if (value.own || !is_needed(number)) return;
      value.own = std::move(made);
      owners_.push_back(number);
    } else if (target->nbytes() == 0) {
      c10::Storage place(std::move(target));
      exchange(place, made);
    }
    value.keeps.clear();
    back_.push_back(number);
  }

  // What is away and will be made from what came back keeps that, and not any more what that was made from.
  void keep_less() {
    std::unordered_set<int64_t> seen;
    while (!back_.empty()) {
      auto readers = readers_.find(back_.back());
      back_.pop_back();
      if (readers == readers_.end()) continue;
      for (int64_t reader : readers->second) {
        Value& value = values_.at(reader);
        if (bytes_of(value) || !seen.insert(reader).second) continue;
        if (!is_reached(reader) && !script.lost.count(reader)) continue;  // nobody will make it
        back_.push_back(reader);
        std::vector<c10::Storage> keeps;
        std::unordered_map<size_t, bool> known;
        if (!value.keeps.empty() && can_make(value.record, keeps, known)) value.keeps = std::move(keeps);
      }
    }
  }

  bool is_reached(int64_t number) const {
    const Value& value = values_.at(number);
    return !value.replaced && !value.place.storage.expired();
  }

  // Whether the program can reach a value, or something that is away and that the plan makes from it.
  bool is_needed(int64_t number) const {
    if (is_reached(number)) return true;
    std::vector<int64_t> stack{number};
    std::unordered_set<int64_t> seen;
    while (!stack.empty()) {
      auto readers = readers_.find(stack.back());
      stack.pop_back();
      if (readers == readers_.end()) continue;
      for (int64_t reader : readers->second) {
        if (bytes_of(values_.at(reader)) || !seen.insert(reader).second) continue;
        if (is_reached(reader)) return true;
        stack.push_back(reader);
      }
    }
    return false;
  }

  c10::Device device_;
  std::vector<Noted> records_;
  std::unordered_map<int64_t, Value> values_;
  std::unordered_map<StorageImpl*, int64_t> current_;  // the value that a storage holds
  std::unordered_map<int64_t, c10::Storage> holding_;
  std::unordered_map<int64_t, std::vector<int64_t>> readers_;  // those of the plan that were made from each
  std::vector<int64_t> owners_;  // values that have bytes of their own, or keep others'
  std::vector<int64_t> back_;  // values that came back since the last orders
  int64_t obeyed_ = -1;  // the operator for which orders were obeyed last
  int64_t unplanned_ = -1;  // the number of a value that the plan has none for; less than that were not given yet
  bool broken_ = false;  // an operator made something else than planned
  Done done_;
};

}  // namespace recoup
