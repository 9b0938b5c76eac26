// What PyTorch asks of a CUDA runtime: devices, streams, events, generators.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <vector>

#include "memory.h"

namespace pretend {

using c10::Stream;

// Work is done when it is launched, but for late copies: what streams, events and the host wait for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Device indexed(Device device) {
    return {DeviceType::CUDA, device.index() < 0 ? current_device : device.index()};
  }
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(settings.gpus);
  }
  Device getDevice() const override { return {DeviceType::CUDA, current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < settings.gpus, "CUDA error: invalid device ordinal");
    current_device = indexed(device).index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = indexed(device).index();
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }

  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, indexed(device), current_streams[indexed(device).index()]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, indexed(device), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, indexed(device), ++last_stream);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  static StreamKey key(const Stream& stream) { return {stream.device_index(), stream.id()}; }
  bool queryStream(const Stream& stream) const override {
    late_copies.host_waits(key(stream));  // so that it is done
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    wait_for_device("synchronize a stream", key(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    wait_for_device("synchronize the device", device);
  }

  static Event& known(void* event) { return *static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    if (!*event) *event = new Event;
    known(*event) = late_copies.record(key(stream), std::chrono::duration<double, std::milli>(now).count());
  }
  void block(void* event, const Stream& stream) const override {
    late_copies.make_stream_wait(key(stream), known(event));
  }
  bool queryEvent(void* event) const override {
    late_copies.host_waits(known(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    wait_for_device("synchronize an event", known(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete &known(event); }
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    return known(end).milliseconds - known(start).milliseconds;
  }
};

// Each device has random numbers of its own, made by a CPU's generator.
inline at::Generator& generator(DeviceIndex device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMostGpus; ++i) made.push_back(at::detail::createCPUGenerator());
    return made;
  }();
  return generators[device];
}

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  // A build for CUDA asks for cuDNN before it finds that no fused attention may run.
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return settings.gpus; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(settings.gpus); }
  DeviceIndex current_device() const override { return pretend::current_device; }
  DeviceIndex getCurrentDevice() const override { return pretend::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { pretend::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(pretend::current_device, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return pinned_range(data); }
  void deviceSynchronize(DeviceIndex device) const override {
    wait_for_device("synchronize the device", device);
  }
};

}  // namespace pretend
