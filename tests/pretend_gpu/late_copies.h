// Copies between a device and pinned host memory, made as late as a GPU may make them.
//
// All other work is done when it is launched. A copy that does not block reads or writes the device
// when its stream goes on: when more work is launched there, or on a stream that waits for it. The
// host finds the bytes in its memory once it has waited for such a stream, and a copy back to the
// device once it comes later on one.
#pragma once
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <vector>

namespace pretend {

using c10::DeviceIndex, c10::StreamId;
using StreamKey = std::pair<DeviceIndex, StreamId>;

struct Event {
  double milliseconds;
  StreamKey stream;
  uint64_t moment;
};

struct LateCopy {
  char *to, *from;
  size_t bytes;
  bool to_host;
  c10::Storage host;                        // kept, as CUDA keeps pinned memory that is in use
  std::map<StreamKey, uint64_t> followers;  // streams, and since when their work comes after it
  std::vector<char> read{};                 // from the device, for the host
  bool goes_back = false;                   // a later copy brings it to the device

  bool is_before(const Event& event) const {
    const auto found = followers.find(event.stream);
    return found != followers.end() && found->second <= event.moment;
  }
  bool is_behind(const LateCopy& earlier, StreamKey stream) const {
    return !to_host && earlier.to_host && earlier.followers.count(stream) > 0 &&
        from < earlier.to + earlier.bytes && earlier.to < from + bytes;
  }
  bool is_of(const void* begin, size_t size) const {
    const char* device = to_host ? from : to;
    return device >= begin && device < static_cast<const char*>(begin) + size;
  }
};

class LateCopies {
 public:
  void launch(LateCopy copy, StreamKey stream) {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto& earlier : copies_)
      if (copy.is_behind(earlier, stream)) earlier.goes_back = true;
    copy.followers[stream] = ++clock_;
    copies_.push_back(std::move(copy));
    waiting_ = copies_.size();
  }
  Event record(StreamKey stream, double milliseconds) {
    std::lock_guard<std::mutex> guard(lock_);
    return {milliseconds, stream, ++clock_};
  }
  // More work is launched on this stream.
  void go_on(StreamKey stream) {
    take([&](const LateCopy& copy) { return copy.followers.count(stream) > 0; }, false);
  }
  void make_stream_wait(StreamKey stream, const Event& event) {
    auto follows = [&](LateCopy& copy) {
      if (!copy.is_before(event)) return false;
      copy.followers.try_emplace(stream, ++clock_);
      return true;
    };
    take(follows, false);
  }
  void host_waits(const Event& event) {
    take([&](const LateCopy& copy) { return copy.is_before(event); }, true);
  }
  void host_waits(StreamKey stream) {
    take([&](const LateCopy& copy) { return copy.followers.count(stream) > 0; }, true);
  }
  void host_waits(DeviceIndex device) {
    take([&](const LateCopy& copy) { return copy.followers.begin()->first.first == device; }, true);
  }
  // A block is given back by its stream: what copies it before then has read it, all else reads it
  // too late.
  void before_free(const void* data, size_t bytes, StreamKey stream) {
    take([&](const LateCopy& copy) { return copy.is_of(data, bytes) && copy.followers.count(stream) > 0; }, false);
  }
  void after_free(const void* data, size_t bytes) {
    take([&](const LateCopy& copy) { return copy.is_of(data, bytes); }, false);
  }

 private:
  template <typename Chosen>
  void take(const Chosen& chosen, bool host_waits) {
    if (waiting_ == 0) return;
    std::list<LateCopy> done;  // destroyed without the lock: memory may be given back to Python
    std::lock_guard<std::mutex> guard(lock_);
    for (auto next = copies_.begin(); next != copies_.end();) {
      auto copy = next++;
      if (!chosen(*copy)) continue;
      if (copy->to_host && copy->read.empty()) copy->read.assign(copy->from, copy->from + copy->bytes);
      if (copy->to_host && !host_waits && !copy->goes_back) continue;
      std::memcpy(copy->to, copy->to_host ? copy->read.data() : copy->from, copy->bytes);
      done.splice(done.end(), copies_, copy);
    }
    waiting_ = copies_.size();
  }

  std::mutex lock_;
  std::list<LateCopy> copies_;  // in the order of their launches
  std::atomic<size_t> waiting_{0};
  uint64_t clock_ = 0;
};
inline LateCopies& late_copies = *new LateCopies;  // not destroyed at the end of the process

}  // namespace pretend
