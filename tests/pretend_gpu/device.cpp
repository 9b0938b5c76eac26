// A CUDA device without a GPU: tensors are on cuda:N, and their memory is the host's.
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>

#include "fallback.h"

namespace pretend {
namespace {

using Format = std::optional<at::MemoryFormat>;
using Layout = std::optional<at::Layout>;
using Sizes = c10::SymIntArrayRef;
using Type = std::optional<at::ScalarType>;

// Operators that make and view tensors, and those that bring numbers to the host.

Tensor empty(Sizes size, Type dtype, Layout, std::optional<Device> device, std::optional<bool>, Format format) {
  const OnDevice on(device.value_or(Device(DeviceType::CUDA)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      at::dtype_or_default(dtype), format);
}
Tensor empty_strided(Sizes size, Sizes stride, Type dtype, Layout, std::optional<Device> device, std::optional<bool>) {
  const OnDevice on(device.value_or(Device(DeviceType::CUDA)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype));
}
Tensor as_strided(const Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  const auto begin = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), begin);
}
Tensor view(const Tensor& self, Sizes size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
Tensor reshape_alias(const Tensor& self, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const Tensor& resize_(const Tensor& self, Sizes size, Format format) {
  const OnDevice on(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set_storage_part(Tensor& self, at::Storage source, c10::SymInt offset, Sizes size, Sizes stride) {
  return at::native::set_storage_cpu_(
      self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, source, 0, {numel}, {});
}
Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  const OnDevice on(self.is_cuda() ? self.device() : from.device());
  const bool to_host = !self.is_cuda(), from_host = !from.is_cuda();
  const Tensor &host = to_host ? self : from, &device = to_host ? from : self;
  PinnedRange* const range = to_host || from_host ? pinned_range(host.data_ptr()) : nullptr;
  // The driver copies without the host only where that memory is pinned.
  const bool blocks = (to_host || from_host) && !(non_blocking && range);
  const bool same_layout = self.dtype() == from.dtype() && self.sizes() == from.sizes() &&
      self.is_contiguous() && from.is_contiguous();
  // Others pass through a kernel, which is done when it is launched.
  if (range && !blocks && same_layout && !settings.hollow) {
    if (self.numel())
      late_copies.launch(
          {static_cast<char*>(self.data_ptr()), static_cast<char*>(from.data_ptr()), self.nbytes(), to_host, host.storage()},
          current_stream(current_device), last_write(device.storage()), range->copied);
    return self;
  }
  const Tensor to = on_host(self, true), source = on_host(from, false);
  if (blocks) wait_for_device(to_host ? "a copy to the host" : "a copy from the host");
  if (!(settings.hollow && self.numel() > kHollowAbove)) to.copy_(source);
  return self;
}
at::Scalar local_scalar_dense(const Tensor& self) {
  const Tensor host = on_host(self, false);
  wait_for_device("a number that the host reads");
  return at::_local_scalar_dense(host);
}

struct Quiet final : c10::WarningHandler {  // PyTorch warns that a kernel is replaced
  void process(const c10::Warning&) override {}
};

// A build for CUDA has kernels of its own, which would come before the fallback. Of two kernels the
// later one counts: those below are registered behind these.
struct TakeKernels {
  std::vector<c10::RegistrationHandleRAII> handles;
  TakeKernels() {
    Quiet quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findSchema(name);
      const bool is_taken = name.name.rfind("aten::", 0) == 0 || name.name.rfind("fsdp::", 0) == 0;
      if (!is_taken || !op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
      handles.push_back(dispatcher.registerImpl(
          name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>(), {}, nullptr, "pretended"));
    }
  }
} take_kernels;

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_part);
  m.impl("set_.source_Storage", set_storage);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

// For Python.

using Pools = c10::Dict<int64_t, int64_t>;  // the peaks, by stream

std::tuple<int64_t, int64_t, Pools> memory(int64_t device) {
  std::lock_guard<std::mutex> guard(accounts_lock);
  Pools peaks;
  for (const auto& [stream, pool] : accounts.at(device).of_streams) peaks.insert(stream, pool.peak);
  return {accounts.at(device).all.held, accounts.at(device).all.peak, peaks};
}
void reset_peak(int64_t device) {
  std::lock_guard<std::mutex> guard(accounts_lock);
  accounts.at(device).all.peak = accounts.at(device).all.held;
}
void empty_cache(int64_t device) {
  std::lock_guard<std::mutex> guard(accounts_lock);
  for (auto& [_, pool] : accounts.at(device).of_streams) pool.peak = pool.held;
}
void resize_storage(const Tensor& whole, int64_t bytes) {
  const OnDevice on(whole.device());
  at::native::resize_bytes_cpu(whole.storage().unsafeGetStorageImpl(), static_cast<size_t>(bytes));
}

TORCH_LIBRARY(pretend, m) {
  m.def("configure(int gpus, float bytes_per_gpu, bool hollow) -> ()", [](int64_t gpus, double bytes, bool hollow) {
    TORCH_CHECK(gpus >= 1 && gpus <= kMostGpus, "1 to ", kMostGpus, " GPUs can be pretended");
    settings = {static_cast<int>(gpus), bytes, hollow};
  });
  m.def("device() -> int", []() -> int64_t { return current_device; });
  m.def("set_device(int device) -> ()", [](int64_t device) { Guard().setDevice({DeviceType::CUDA, static_cast<DeviceIndex>(device)}); });
  m.def("on_host(Tensor x) -> Tensor", [](const Tensor& x) { return on_host(x, false); });
  m.def("on_device(Tensor x, int device) -> Tensor", [](const Tensor& x, int64_t device) -> Tensor {
    const auto made = empty_as(x.contiguous(), {DeviceType::CUDA, static_cast<DeviceIndex>(device)});
    on_host(made, true).copy_(x);
    return made;
  });
  m.def("memory(int device) -> (int, int, Dict(int, int))", memory);
  m.def("reset_peak(int device) -> ()", reset_peak);
  m.def("empty_cache(int device) -> ()", empty_cache);
  m.def("synchronize(int device) -> ()", [](int64_t device) {
    wait_for_device("synchronize the device", static_cast<DeviceIndex>(device));
  });
  m.def("gpus() -> int", []() -> int64_t { return settings.gpus; });
  m.def("bytes_per_gpu() -> float", []() { return settings.bytes_per_gpu; });
  m.def("hollow() -> bool", []() { return settings.hollow; });
  m.def("resize_storage(Tensor whole, int bytes) -> ()", resize_storage);
  m.def("pin(int begin, int bytes) -> ()", [](int64_t begin, int64_t bytes) { pin(begin, bytes); });
  m.def("unpin(int begin) -> ()", [](int64_t begin) {
    if (PinnedRange* range = pinned_range(reinterpret_cast<void*>(begin))) late_copies.before_unpin(range->copied);
    unpin(begin);
  });
  m.def("random_state(int device) -> Tensor", [](int64_t device) { return generator(device).get_state(); });
  m.def("set_random_state(int device, Tensor state) -> ()", [](int64_t device, const Tensor& state) { generator(device).set_state(state); });
  m.def("seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) { generator(device).set_current_seed(seed); });
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// PyTorch's own kernels of the collectives, under which gloo is called.
torch::Library& take_collectives() {
  static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("c10d::", 0) != 0 || !op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    collectives.emplace(name.name, op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA));
    library.impl(name.name.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_collective>());
  }
  return library;
}

struct Install {
  Install() {
    c10::SetAllocator(DeviceType::CUDA, &device_allocator, 255);
    // PyTorch may have made its hooks for "no CUDA" already. They have no members, so with another
    // class's table of functions they are of that class.
    static Hooks hooks;
    auto* present = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
    *reinterpret_cast<void**>(present) = *reinterpret_cast<void**>(static_cast<at::CUDAHooksInterface*>(&hooks));
    take_collectives();
  }
} install;

}  // namespace
}  // namespace pretend

extern "C" void pretend_on_wait(pretend::WaitCallback callback) { pretend::on_wait = callback; }
