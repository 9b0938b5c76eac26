// Device memory that is the host's, counted per device and per stream, and pinned host memory.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <array>
#include <cstdlib>

#include "late_copies.h"

namespace pretend {

using c10::Device, c10::DeviceType;

constexpr int kMostGpus = 16;
// Hollow tensors with more elements have no contents, and operators on them only make shapes.
constexpr int64_t kHollowAbove = 1 << 20;
constexpr size_t kBlock = 512;  // bytes; sizes are multiples of it, as the CUDA allocator's are

struct Settings {
  int gpus = 1;
  double bytes_per_gpu = 80e9;
  bool hollow = false;
};
inline Settings settings;

// The current device and streams are each thread's own, as in CUDA.
inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<StreamId, kMostGpus> current_streams{};
inline std::atomic<StreamId> last_stream{0};

inline StreamKey current_stream(DeviceIndex device) { return {device, current_streams[device]}; }

// Tell Python that the host waits for the device here.
using WaitCallback = void (*)(const char*);
inline std::atomic<WaitCallback> on_wait{nullptr};
template <typename Awaited>  // an event, a stream or a whole device
void wait_for_device(const char* what, const Awaited& awaited) {
  if (auto callback = on_wait.load()) callback(what);
  late_copies.host_waits(awaited);
}
inline void wait_for_device(const char* what) { wait_for_device(what, current_stream(current_device)); }

struct Pool {
  int64_t held = 0, peak = 0;  // bytes
};
// Blocks of one stream are not given to another one: a GPU reserves the sum of the pools' peaks.
struct Account {
  Pool all;
  std::map<StreamId, Pool> of_streams;
};
inline std::mutex accounts_lock;
inline std::array<Account, kMostGpus> accounts;

inline void add_bytes(DeviceIndex device, StreamId stream, int64_t bytes) {
  auto& account = accounts[device];
  for (Pool* pool : {&account.all, &account.of_streams[stream]}) {
    pool->held += bytes;
    pool->peak = std::max(pool->peak, pool->held);
  }
}

struct DeviceBlock {
  void* data;
  size_t bytes;
  DeviceIndex device;
  StreamId stream;
  Work written{};
};

// Large blocks of the host are used again, so that the kernel need not give new pages each time.
// All of them are NaN.
class FreeBlocks {
 public:
  void* take(size_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto found = blocks_.find(bytes);
    if (found == blocks_.end()) return nullptr;
    void* data = found->second;
    blocks_.erase(found);
    held_ -= bytes;
    return data;
  }
  bool keep(void* data, size_t bytes) {
    constexpr size_t kSmallest = 1 << 20, kMost = 1 << 29;
    std::lock_guard<std::mutex> guard(lock_);
    if (bytes < kSmallest || held_ + bytes > kMost) return false;
    blocks_.emplace(bytes, data);
    held_ += bytes;
    return true;
  }

 private:
  std::mutex lock_;
  std::multimap<size_t, void*> blocks_;
  size_t held_ = 0;
};
inline FreeBlocks free_blocks;

inline void free_block(void* context) {
  auto* block = static_cast<DeviceBlock*>(context);
  late_copies.before_free(block->data, block->bytes, {block->device, block->stream});
  {
    std::lock_guard<std::mutex> guard(accounts_lock);
    add_bytes(block->device, block->stream, -static_cast<int64_t>(block->bytes));
  }
  if (settings.hollow) {
    munmap(block->data, block->bytes);
  } else {
    std::memset(block->data, 0xFF, block->bytes);
    late_copies.after_free(block->data, block->bytes);
    if (!free_blocks.keep(block->data, block->bytes)) std::free(block->data);
  }
  delete block;
}

// Fresh and freed memory is NaN, or -1; hollow memory is 0 and takes none until it is written.
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const Device device(DeviceType::CUDA, current_device);
    if (bytes == 0) return {nullptr, device};
    bytes = (bytes + kBlock - 1) / kBlock * kBlock;
    const StreamId stream = current_streams[current_device];
    {
      std::lock_guard<std::mutex> guard(accounts_lock);
      const int64_t held = accounts[current_device].all.held;
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          settings.hollow || static_cast<double>(held) + static_cast<double>(bytes) <= settings.bytes_per_gpu,
          "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ",
          static_cast<int>(current_device), " has a total capacity of ", settings.bytes_per_gpu,
          " bytes of which ", settings.bytes_per_gpu - static_cast<double>(held), " are free.");
      add_bytes(current_device, stream, static_cast<int64_t>(bytes));
    }
    void* data = nullptr;
    if (settings.hollow) {
      constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    } else if (!(data = free_blocks.take(bytes))) {
      data = std::aligned_alloc(kBlock, bytes);
      if (data) std::memset(data, 0xFF, bytes);
    }
    TORCH_CHECK(data && data != MAP_FAILED, "the host lacks ", bytes, " bytes for this tensor");
    auto* block = new DeviceBlock{data, bytes, current_device, stream};
    late_copies.use(block->written, {current_device, stream}, true);
    return {data, block, &free_block, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
inline DeviceAllocator device_allocator;

inline Work& last_write(const c10::Storage& of_device) {
  static thread_local Work of_empty;
  const auto& data = of_device.data_ptr();
  return data ? static_cast<DeviceBlock*>(data.get_context())->written : of_empty;
}

// Ranges of pinned host memory, by their begin.
struct PinnedRange {
  uintptr_t end;
  Work copied{};
};
inline std::mutex pinned_lock;
inline std::map<uintptr_t, PinnedRange> pinned;

inline void pin(uintptr_t begin, size_t bytes) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned[begin] = {begin + bytes};
}
inline void unpin(uintptr_t begin) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(begin);
}
inline PinnedRange* pinned_range(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto next = pinned.upper_bound(address);
  return next != pinned.begin() && address < std::prev(next)->second.end ? &std::prev(next)->second : nullptr;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::aligned_alloc(kBlock, (bytes + kBlock - 1) / kBlock * kBlock) : nullptr;
    if (data) pin(reinterpret_cast<uintptr_t>(data), bytes);
    auto free_pinned = [](void* p) {
      if (p) unpin(reinterpret_cast<uintptr_t>(p));
      std::free(p);
    };
    return {data, data, free_pinned, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
inline PinnedAllocator pinned_allocator;

}  // namespace pretend
