// Copies between a device and pinned host memory, made as late as a GPU may make them.
//
// All other work is done when it is launched. A copy that does not block reads or writes the device
// when its stream goes on: when more work is launched there, or on a stream that waits for it. The
// host finds the bytes in its memory once it has waited for such a stream, and a copy back to the
// device once it comes later on one.
//
// Work with memory that another stream has written last is refused, unless its own stream or the host
// has waited for that: the numbers would be right here, where the other work is done already.
#pragma once
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <vector>

namespace pretend {

using c10::DeviceIndex, c10::StreamId;
using StreamKey = std::pair<DeviceIndex, StreamId>;

// How much of each stream's work comes before a moment of a stream, of an event or of the host.
using Clock = std::map<StreamKey, uint64_t>;

struct Event {
  double milliseconds;
  Clock before;
};

// A piece of work: a copy, or the last one that wrote or copied some memory.
struct Work {
  StreamKey stream;
  uint64_t number = 0;

  bool is_before(const Clock& clock) const {
    const auto found = clock.find(stream);
    return number == 0 || (found != clock.end() && number <= found->second);
  }
};

struct LateCopy {
  char *to, *from;
  size_t bytes;
  bool to_host;
  c10::Storage host;         // kept, as CUDA keeps pinned memory that is in use
  Work work{};
  std::vector<char> read{};  // from the device, for the host
  bool goes_back = false;    // a later copy brings it to the device

  bool brings_back(const LateCopy& earlier) const {
    return !to_host && earlier.to_host && from < earlier.to + earlier.bytes && earlier.to < from + bytes;
  }
  bool is_of(const void* begin, size_t size) const {
    const char* device = to_host ? from : to;
    return device >= begin && device < static_cast<const char*>(begin) + size;
  }
};

class LateCopies {
 public:
  // Work on this stream reads or writes a block of memory that was last written so.
  void use(Work& written, StreamKey stream, bool writes) {
    std::lock_guard<std::mutex> guard(lock_);
    require_order(written, stream);
    if (writes) written = next(stream);
  }
  void launch(LateCopy copy, StreamKey stream, Work& written, Work& copied) {
    std::lock_guard<std::mutex> guard(lock_);
    require_order(written, stream);
    for (auto& earlier : copies_)
      if (copy.brings_back(earlier) && earlier.work.is_before(clocks_[stream])) earlier.goes_back = true;
    copy.work = copied = next(stream);
    if (!copy.to_host) written = copy.work;
    copies_.push_back(std::move(copy));
    waiting_ = copies_.size();
  }
  void before_unpin(const Work& copied) {
    std::lock_guard<std::mutex> guard(lock_);
    TORCH_CHECK(
        copied.is_before(host_), "host memory is unpinned while a copy on stream ", copied.stream.second,
        " may use it, for which the host has not waited - call synchronize first");
  }
  Event record(StreamKey stream, double milliseconds) {
    std::lock_guard<std::mutex> guard(lock_);
    return {milliseconds, clocks_[stream]};
  }
  // More work is launched on this stream.
  void go_on(StreamKey stream) {
    take([&](const LateCopy& copy) { return copy.work.is_before(clocks_[stream]); }, false);
  }
  void make_stream_wait(StreamKey stream, const Event& event) { wait_for(event.before, &stream); }
  void host_waits(const Event& event) { wait_for(event.before); }
  void host_waits(StreamKey stream) { wait_for(clocks()[stream]); }
  void host_waits(DeviceIndex device) {
    for (const auto& [stream, clock] : clocks())
      if (stream.first == device) wait_for(clock);
  }
  // A block is given back by its stream: what copies it before then has read it, all else reads it
  // too late.
  void before_free(const void* data, size_t bytes, StreamKey stream) {
    take([&](const LateCopy& copy) { return copy.is_of(data, bytes) && copy.work.is_before(clocks_[stream]); }, false);
  }
  void after_free(const void* data, size_t bytes) {
    take([&](const LateCopy& copy) { return copy.is_of(data, bytes); }, false);
  }

 private:
  std::map<StreamKey, Clock> clocks() {
    std::lock_guard<std::mutex> guard(lock_);
    return clocks_;
  }
  void wait_for(const Clock& work, const StreamKey* stream = nullptr) {  // without one the host
    {
      std::lock_guard<std::mutex> guard(lock_);
      Clock& waiting = stream ? clocks_[*stream] : host_;
      for (const auto& [other, number] : work) waiting[other] = std::max(waiting[other], number);
    }
    take([&](const LateCopy& copy) { return copy.work.is_before(work); }, !stream);
  }
  void require_order(const Work& written, StreamKey stream) {
    TORCH_CHECK(
        written.is_before(clocks_[stream]) || written.is_before(host_), "work on stream ", stream.second,
        " uses memory that stream ", written.stream.second, " has written last, and did not wait for it - ",
        "call wait_stream first");
  }
  Work next(StreamKey stream) { return {stream, ++clocks_[stream][stream]}; }

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
  std::map<StreamKey, Clock> clocks_;  // that of a stream has the number of its own last work, too
  Clock host_;
};
inline LateCopies& late_copies = *new LateCopies;  // not destroyed at the end of the process

}  // namespace pretend
