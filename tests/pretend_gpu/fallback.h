// Run each operator on the CPU over the same memory, after what CUDA would have refused.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <set>
#include <string>

#include "runtime.h"

namespace pretend {

using at::Tensor;
using Stack = torch::jit::Stack;

struct OnDevice {
  explicit OnDevice(Device device) { current_device = Guard::indexed(device).index(); }
  ~OnDevice() { current_device = before; }
  const DeviceIndex before = current_device;
};

inline bool is_cuda(const Tensor& t) { return t.defined() && t.is_cuda(); }

// The same memory as a tensor of another device.
inline Tensor view_on(const Tensor& t, Device device, c10::DispatchKey key, c10::Allocator* allocator) {
  auto* owner = new c10::Storage(t.storage());
  auto release = [](void* p) { delete static_cast<c10::Storage*>(p); };
  c10::DataPtr data(owner->mutable_data(), owner, release, device);
  c10::Storage storage(c10::Storage::use_byte_size_t{}, owner->nbytes(), std::move(data), allocator, true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return made;
}
// Work that reads or writes it is launched on the current stream.
inline Tensor on_host(const Tensor& t, bool writes) {
  if (!is_cuda(t)) return t;
  const StreamKey stream = current_stream(t.device().index());
  late_copies.go_on(stream);
  late_copies.use(last_write(t.storage()), stream, writes);
  return view_on(t, Device(DeviceType::CPU), c10::DispatchKey::CPU, c10::GetCPUAllocator());
}
inline Tensor empty_as(const Tensor& t, Device device) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(device).pinned_memory(false));
}

// Random operators take the device's generator in place of the CPU's.
class DeviceRandomness {
 public:
  DeviceRandomness(const c10::OperatorHandle& op, DeviceIndex device) : device_(device) {
    for (auto tag : op.getTags()) is_random_ |= tag == at::Tag::nondeterministic_seeded;
    if (is_random_) exchange();
  }
  ~DeviceRandomness() {
    if (is_random_) exchange();
  }

 private:
  void exchange() {
    auto cpu = at::detail::getDefaultCPUGenerator();
    const Tensor state = cpu.get_state();
    cpu.set_state(generator(device_).get_state());
    generator(device_).set_state(state);
  }
  DeviceIndex device_;
  bool is_random_ = false;
};

class CpuCall {
 public:
  CpuCall(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), name_(op.operator_name().name), stack_(*stack),
        first_(stack->size() - op.schema().arguments().size()) {}

  void run() {
    if (skip_large_product()) return;
    is_hollow_ = settings.hollow && is_large();
    for (size_t i = first_; i < stack_.size(); ++i) {
      const auto* alias = op_.schema().arguments()[i - first_].alias_info();
      writes_ = alias && alias->isWrite();
      swap_argument(stack_[i]);
    }
    refuse_host_tensors();
    if (waits()) wait_for_device(name_.c_str());
    const Device device = Guard::indexed(device_.value_or(Device(DeviceType::CUDA)));
    {
      at::AutoDispatchBelowADInplaceOrView below;
      DeviceRandomness randomness(op_, device.index());
      const auto key = is_hollow_ ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
      op_.redispatchBoxed(c10::DispatchKeySet(key), &stack_);
    }
    for (auto& [given, used] : pairs_) follow_resize(given, used, device);
    for (size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i) {
      auto& value = stack_[i];
      if (value.isTensor()) value = returned(value.toTensor(), device);
      if (value.isTensorList()) {
        auto list = value.toTensorVector();
        for (auto& t : list) t = returned(t, device);
        value = c10::List<Tensor>(list);
      }
    }
  }

 private:
  // A benchmark's products would take a CPU minutes. Their results stay NaN.
  bool skip_large_product() {
    constexpr double kMostFlops = 2e11;
    if (settings.hollow || name_ != "aten::mm" || stack_.size() - first_ != 3) return false;  // of `out`
    const Tensor a = stack_[first_].toTensor(), out = stack_.back().toTensor();
    if (!is_cuda(a) || !is_cuda(out) || 2.0 * a.size(1) * out.numel() <= kMostFlops) return false;
    stack_.erase(stack_.begin() + first_, stack_.end());
    stack_.emplace_back(out);
    return true;
  }

  bool is_large() const {
    auto large = [](const Tensor& t) { return t.defined() && t.numel() > kHollowAbove; };
    for (size_t i = first_; i < stack_.size(); ++i) {
      const auto& value = stack_[i];
      if (value.isTensor() && large(value.toTensor())) return true;
      if (value.isTensorList())
        for (const auto& t : value.toTensorVector())
          if (large(t)) return true;
      if (value.isIntList() && i == first_) {  // the size of a new tensor
        int64_t numel = 1;
        for (auto length : value.toIntVector()) numel *= length;
        if (numel > kHollowAbove) return true;
      }
    }
    return false;
  }

  Tensor swapped(const Tensor& t, bool in_list, bool is_index = false) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      // CUDA's kernels take numbers from the host, but not in lists.
      if ((t.dim() > 0 || in_list) && !t.is_meta()) {
        if (is_index) wait_for_device("indices of the host");
        else host_tensors_ = true;
      }
      return is_hollow_ && t.dim() > 0 ? meta(t) : t;
    }
    TORCH_CHECK(!device_ || *device_ == t.device(),
        "Expected all tensors to be on the same device, but found at least two devices, ",
        *device_, " and ", t.device(), "! (", name_, ")");
    device_ = t.device();
    masks_ |= is_index && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
    pairs_.emplace_back(t, is_hollow_ ? meta(t) : on_host(t, writes_));
    return pairs_.back().second;
  }
  static Tensor meta(const Tensor& t) {
    return at::empty_strided(t.sizes(), t.strides(), t.options().device(DeviceType::Meta).pinned_memory(false));
  }

  void swap_argument(c10::IValue& value) {
    if (value.isTensor()) {
      value = swapped(value.toTensor(), false);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& t : list) t = swapped(t, true);
      value = c10::List<Tensor>(list);
    } else if (value.isOptionalTensorList()) {  // of indices
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> t : value.toOptionalTensorList())
        list.push_back(t ? std::optional<Tensor>(swapped(*t, true, true)) : t);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      device_ = Guard::indexed(value.toDevice());
      value = Device(is_hollow_ ? DeviceType::Meta : DeviceType::CPU);
    } else if (value.isGenerator() && value.toGenerator().defined()) {
      TORCH_CHECK(false, "Expected a 'cuda' device type for generator but found 'cpu' (", name_, ")");
    }
  }

  void refuse_host_tensors() const {
    TORCH_CHECK(!host_tensors_ || !device_,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        device_.value_or(Device(DeviceType::CUDA)), " and cpu! (", name_, ")");
  }

  // Operators whose result has a size, or is a number, that only the device knows.
  bool waits() const {
    static const std::set<std::string> always = {
        "aten::nonzero", "aten::equal", "aten::masked_select", "aten::bincount", "aten::_unique",
        "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "c10d::barrier"};
    if (name_ == "aten::repeat_interleave" && op_.operator_name().overload_name == "Tensor")
      return stack_.back().isNone();  // without output_size
    return masks_ || always.count(name_) > 0;
  }

  // An output that the operator has resized.
  static void follow_resize(const Tensor& given, const Tensor& used, Device device) {
    if (given.sizes() == used.sizes()) return;
    const OnDevice on(device);
    const Tensor made = empty_as(used, device);
    if (!used.is_meta()) on_host(made, true).copy_(used);
    given.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
    given.unsafeGetTensorImpl()->set_sizes_and_strides(used.sizes(), used.strides(), 0);
  }

  Tensor returned(const Tensor& t, Device device) const {
    if (!t.defined() || !(t.is_cpu() || t.is_meta())) return t;
    for (const auto& [given, used] : pairs_)
      if (used.is_same(t)) return given;
    const OnDevice on(device);
    if (t.is_meta()) return empty_as(t, device);
    for (const auto& [given, used] : pairs_) {
      if (!t.storage().data() || used.storage().data() != t.storage().data()) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(given.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), t.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      return view;
    }
    const Tensor made = empty_as(t, device);
    on_host(made, true).copy_(t);
    return made;
  }

  const c10::OperatorHandle& op_;
  const std::string name_;
  Stack& stack_;
  const size_t first_;
  bool is_hollow_ = false, host_tensors_ = false, masks_ = false, writes_ = false;
  std::optional<Device> device_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // the device's tensor, and what the CPU is given
};

inline void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  CpuCall(op, stack).run();
}

// NCCL's collectives: gloo's, on the same memory. Hollow tensors stay as they are, for the group
// that only pretends to be one.
inline std::map<std::string, c10::SafeKernelFunction> collectives;

inline void run_collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  std::vector<Tensor> given;
  auto host = [&](const Tensor& t) {
    if (settings.hollow || !is_cuda(t)) return t;
    given.push_back(t);
    return on_host(t, true);
  };
  auto device = [&](const Tensor& t) {
    for (const auto& each : given)
      if (each.data_ptr() == t.data_ptr() && each.sizes() == t.sizes()) return each;
    return t;
  };
  auto each_tensor = [](c10::IValue& value, const auto& change) {
    if (value.isTensor()) {
      value = change(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& t : list) t = change(t);
      value = c10::List<Tensor>(list);
    } else if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
      auto lists = value.to<std::vector<std::vector<Tensor>>>();
      for (auto& list : lists)
        for (auto& t : list) t = change(t);
      value = lists;
    }
  };
  const auto name = op.operator_name().name;
  if (name == "c10d::barrier") wait_for_device("a barrier");
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i)
    each_tensor((*stack)[i], host);
  collectives.at(name).callBoxed(op, keys, stack);
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
    each_tensor((*stack)[i], device);
}

}  // namespace pretend
