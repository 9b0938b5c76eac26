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

// Work is done when it is launched, so that events and streams have nothing to wait for; only the
// host's waits are told.
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
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { wait_for_device("synchronize a stream"); }
  void synchronizeDevice(DeviceIndex) const override { wait_for_device("synchronize the device"); }

  // An event is the time at which it was recorded, in milliseconds.
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    if (!*event) *event = new double;
    *static_cast<double*>(*event) = std::chrono::duration<double, std::milli>(now).count();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { wait_for_device("synchronize an event"); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<double*>(event);
  }
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    return *static_cast<double*>(end) - *static_cast<double*>(start);
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
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void deviceSynchronize(DeviceIndex) const override { wait_for_device("synchronize the device"); }
};

}  // namespace pretend
