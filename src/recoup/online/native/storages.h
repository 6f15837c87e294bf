// What is known of storages: what was made from which, by whom, and who knows.
#pragma once

#include <unordered_map>
#include <unordered_set>

#include "scan.h"

namespace recoup {

constexpr size_t CROWDED = 2048;  // records, or storages, before those that nobody can need are dropped
constexpr int64_t SMALL = 100;  // a gradient of less than the budget by that is not worth a backward to evict
constexpr int64_t TINY = 100'000;  // what is less than the budget by that is not worth knowing
constexpr int64_t STAYING = 40;  // all of those together may be the budget by that

// What is known of a storage.
struct Entry {
  Weak storage;
  bool made = false;  // by a call that can be repeated, so that it may be evicted
  bool told = false;  // to Python
  bool pending = false;  // a record that Python has not read needs it
  bool mourned = false;  // Python remembers by its address what it held
  bool rewritten = false;  // what was made from it may be from before that
  double last = -1;  // when it was last used, if Python does not know
  std::vector<StorageImpl*> readers;  // what was made from it, since it was last written to
};

class Storages {
 public:
  Storages(c10::Device device, int64_t budget) : device_(device), budget_(budget) {}

  void use(Entry& entry, double now, StorageImpl* key) {
    if (entry.last < 0) noted.push_back(key);
    entry.last = now;
  }

  void use(const at::Tensor& tensor, double now) {
    StorageImpl* key = tensor.storage().unsafeGetStorageImpl();
    Entry* entry = known(key);
    use(entry != nullptr ? *entry : at(Place(tensor)), now, key);
  }

  // A record that Python has not read needs it.
  void await(const Place& place) {
    Entry& entry = at(place);
    if (!entry.pending && entry.last < 0) noted.push_back(place.key);
    entry.pending = true;
  }

  // When what Python knows was last used. No record needs anything any more, as far as this goes.
  std::vector<std::pair<Weak, double>> take_used() {
    std::vector<std::pair<Weak, double>> used;
    for (StorageImpl* key : std::exchange(noted, {})) {
      Entry* entry = known(key);
      if (entry == nullptr) continue;
      entry->pending = false;
      if (entry->made && !entry->told && entry->last >= 0) {
        noted.push_back(key);  // Python does not know it yet
        continue;
      }
      if (entry->made && entry->last >= 0) used.emplace_back(entry->storage, entry->last);
      entry->last = -1;
    }
    return used;
  }

  Entry& at(const Place& place) { return entries_.try_emplace(place.key, Entry{place.storage}).first->second; }

  Entry* known(StorageImpl* key) {
    auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : &found->second;
  }

  // Whether all that a call writes to is one tensor that can be made again, up to here and with the call. `unseen`: and if
  // Python does not know it.
  bool may_write_over(const Traits& traits, Arguments args, bool unseen = false) const {
    if (traits.makes || traits.writes.size() != 1 || !args[traits.writes[0]].isTensor()) return false;
    const at::Tensor& tensor = args[traits.writes[0]].toTensor();
    if (!tensor.defined() || !is_ours(tensor, device_) || (tensor.requires_grad() && tensor.is_leaf())) return false;
    auto found = entries_.find(tensor.storage().unsafeGetStorageImpl());
    if (found == entries_.end() || !found->second.made) return false;
    return !found->second.told || (!unseen && found->second.readers.empty());  // else Python must know now what is made from which
  }

  // Whether what a call writes to may change unseen: nothing that is evicted was made from it. What was made from it, and
  // is there, is not made again any more: of what Python does not know that comes back in `from`, the rest it is told later.
  // What can be made again itself is only given up if `gives_up` says so.
  bool may_write(const Traits& traits, Arguments args, bool gives_up, std::unordered_set<StorageImpl*>& from) {
    std::vector<at::Tensor> written;
    if (traits.updates(args)) {
      collect(args[STATISTICS], written);
      collect(args[STATISTICS + 1], written);
    }
    for (size_t i : traits.writes) collect(args[i], written);
    std::vector<StorageImpl*> changed;
    std::unordered_set<StorageImpl*> waiting;
    std::unordered_set<const Entry*> seen;
    for (const at::Tensor& tensor : written) {
      if (tensor.device() != device_) continue;
      auto found = entries_.find(tensor.storage().unsafeGetStorageImpl());
      if (found == entries_.end()) continue;
      Entry& entry = found->second;
      if (entry.made && (!gives_up || is_awaited(entry, seen))) return false;
      if (!all_made_from(entry, from, waiting, seen)) return false;
      if (entry.made) (entry.told ? waiting : from).insert(found->first);
      changed.push_back(found->first);
    }
    for (StorageImpl* key : changed) entries_.find(key)->second.readers.clear();
    for (StorageImpl* key : from) known(key)->made = false;
    for (StorageImpl* key : waiting) {
      Entry* entry = known(key);
      entry->made = false;
      entry->pending = true;
      noted.push_back(key);
      fixed.emplace_back(key, entry->storage);
    }
    return true;
  }

  // Whether a result that is there had better stay for good, so that nobody needs to know how it was made: a tiny thing
  // that came with another one, or a gradient that waits for an optimizer. Not if that comes to much in all.
  bool had_better_stay(const Record& record, const Place& place, bool is_recent) {
    int64_t bytes = static_cast<int64_t>(place.bytes);
    if (bytes > 0 && place.storage.lock()->nbytes() == 0) return false;  // it is evicted
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

  // Forget storages that are no more, and that nothing was made from that is there and may be made again.
  void tidy() {
    if (entries_.size() < many_) return;
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
      bool over = entry->second.storage.expired() && readers.empty() && !entry->second.mourned;
      entry = over ? entries_.erase(entry) : std::next(entry);
    }
    auto gone = [&](StorageImpl* key) { return known(key) == nullptr; };
    noted.erase(std::remove_if(noted.begin(), noted.end(), gone), noted.end());
    many_ = std::max(CROWDED, 2 * entries_.size());
  }

  // Those that were used since Python last read; what it knows, and does not know to be fixed.
  std::vector<StorageImpl*> noted;
  std::vector<std::pair<StorageImpl*, Weak>> fixed;

 private:
  // Whether something that is evicted was made from a storage, if only by way of others. Nothing was from those `seen`.
  bool is_awaited(const Entry& first, std::unordered_set<const Entry*>& seen) {
    std::vector<const Entry*> stack{&first};
    while (!stack.empty()) {
      const Entry* top = stack.back();
      stack.pop_back();
      if (!seen.insert(top).second) continue;
      for (StorageImpl* key : top->readers) {
        const Entry* reader = known(key);
        if (reader == nullptr) continue;
        auto storage = reader->storage.lock();
        if (storage && reader->made && storage->nbytes() == 0) return true;
        stack.push_back(reader);
      }
    }
    return false;
  }

  // All that was made from a storage: what is known here, and what Python knows and can be told later because it is there,
  // and nothing that is evicted was made from that. False if there is more.
  bool all_made_from(const Entry& first, std::unordered_set<StorageImpl*>& from,
                     std::unordered_set<StorageImpl*>& waiting, std::unordered_set<const Entry*>& seen) {
    std::vector<const Entry*> stack{&first};
    while (!stack.empty()) {
      const Entry* top = stack.back();
      stack.pop_back();
      for (StorageImpl* key : top->readers) {
        Entry* reader = known(key);
        if (reader == nullptr || from.count(key)) continue;
        bool is_there = !reader->storage.expired();
        if (is_there && reader->made && reader->storage.lock()->nbytes() == 0) return false;  // it is evicted
        if (is_there && reader->made && is_awaited(*reader, seen)) return false;
        if (is_there && reader->made && reader->told) {
          if (reader->rewritten) return false;
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

  c10::Device device_;
  int64_t budget_;
  std::unordered_map<StorageImpl*, Entry> entries_;
  size_t many_ = CROWDED;
  std::vector<Place> staying_;
  int64_t staying_bytes_ = 0;
};

}  // namespace recoup
