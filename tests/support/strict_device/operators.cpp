// SPDX-License-Identifier: Apache-2.0
// Operators of the strict device: the CPU's, on the same bytes.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "machine_impl.h"
#include "operators_impl.h"

namespace dynmo::strict {

extern const std::set<std::string_view> kNotOfCuda;

namespace {

using at::Tensor;
using c10::IValue;

// Facts about an operator, found once.
struct Known {
  std::string name;
  std::vector<bool> writes;   // by argument
  std::vector<int> returned;  // by result: the argument that it is, or -1
  bool is_view = false;
  bool draws = false;  // random numbers
  bool waits = false;  // its result, or its shape, depends on data
  bool on_cpu = false;
  bool used = false;
};

std::mutex known_mutex;
std::unordered_map<const void*, Known>& all_known() {
  static auto* const known = new std::unordered_map<const void*, Known>();
  return *known;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

Known& known(const c10::OperatorHandle& op) {
  const std::lock_guard lock(known_mutex);
  const c10::FunctionSchema& schema = op.schema();
  const auto [found, fresh] = all_known().try_emplace(&schema);
  Known& k = found->second;
  if (!fresh) return k;
  k.name = full_name(op.operator_name());
  const auto& arguments = schema.arguments();
  for (const c10::Argument& argument : arguments) {
    k.writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  }
  k.draws = op.hasTag(at::Tag::nondeterministic_seeded);
  k.waits = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  for (const c10::Argument& result : schema.returns()) {
    k.returned.push_back(-1);
    if (!result.type()->isSubtypeOf(*c10::TensorType::get()) &&
        result.type()->kind() != c10::TypeKind::ListType) {
      k.waits = true;
    }
    if (result.alias_info() == nullptr) continue;
    if (!result.alias_info()->isWrite()) k.is_view = true;
    for (std::size_t a = 0; a < arguments.size(); ++a) {
      if (k.writes[a] && *arguments[a].alias_info() == *result.alias_info()) {
        k.returned.back() = static_cast<int>(a);
      }
    }
  }
  k.on_cpu = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  return k;
}

// A call of an operator: what it reads and writes, and its arguments on the CPU.
struct Call {
  const Known& op;
  std::vector<Block*> read = {};
  std::vector<Block*> written = {};
  std::vector<std::pair<const at::TensorImpl*, Tensor>> seen = {};
  // Outputs without memory yet, ours and the CPU's.
  std::vector<std::pair<Tensor, Tensor>> grown = {};
  std::optional<at::DeviceIndex> device = {};
  bool masked = false;  // chosen by a mask: the shape depends on data
  bool chosen = false;  // by places

  [[noreturn]] void refuse(const Tensor& tensor, const char* why) const {
    TORCH_CHECK(false, "strict device: ", op.name, " of a tensor of shape ", tensor.sizes(), " on ",
                tensor.device(), ": ", why);
  }

  Tensor on_cpu(const Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      if (!tensor.device().is_cpu() || tensor.dim() != 0 || writes) {
        refuse(tensor, "its other tensors are on the device");
      }
      return mode() == Mode::kLate ? tensor.clone() : tensor;
    }
    if (device && *device != tensor.device().index()) refuse(tensor, "there are two devices");
    device = tensor.device().index();
    for (const auto& [impl, cpu] : seen) {
      if (impl == tensor.unsafeGetTensorImpl()) {
        if (writes && block_of(tensor) != nullptr) written.push_back(block_of(tensor));
        return cpu;
      }
    }
    Tensor cpu = opened(tensor);
    if (Block* const block = block_of(tensor)) {
      (writes ? written : read).push_back(block);
    } else if (writes) {
      grown.emplace_back(tensor, cpu);
    }
    seen.emplace_back(tensor.unsafeGetTensorImpl(), cpu);
    return cpu;
  }

  IValue on_cpu(const IValue& value, bool writes) {
    if (value.isTensor()) return on_cpu(value.toTensor(), writes);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(on_cpu(tensor, writes));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      chosen = true;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        masked |= tensor && tensor->defined() &&
                  (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte);
        list.push_back(tensor ? std::optional(on_cpu(*tensor, writes)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_privateuseone()) return at::Device(at::kCPU);
    return value;
  }

  // An index by places has the tag of one by a mask, and does not wait.
  [[nodiscard]] bool waits() const { return chosen ? masked : op.waits; }
};

Tensor like(const Tensor& result, at::DeviceIndex device) {
  return at::empty_strided(result.sizes(), result.strides(),
                           result.options().device(at::Device(at::kPrivateUse1, device)));
}

// Returns an operator's results with their shapes and without their numbers. `meta`: by what
// libtorch knows of shapes; else it runs on zeros.
std::vector<IValue> shapes_by(const c10::OperatorHandle& op, const std::vector<IValue>& arguments,
                              bool meta) {
  const auto changed = [&](const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    return at::empty_strided(
        tensor.sizes(), tensor.strides(),
        tensor.options().device(meta ? at::kMeta : at::kCPU).pinned_memory(false));
  };
  const auto empty = [&](const Tensor& tensor) {
    Tensor other = changed(tensor);
    return meta || !other.defined() ? other : other.zero_();
  };
  std::vector<IValue> stack;
  for (const IValue& value : arguments) {
    if (value.isTensor()) {
      stack.emplace_back(empty(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(empty(tensor));
      stack.emplace_back(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(empty(*tensor)) : std::nullopt);
      }
      stack.emplace_back(list);
    } else if (value.isDevice()) {
      stack.emplace_back(at::Device(meta ? at::kMeta : at::kCPU));
    } else {
      stack.push_back(value);
    }
  }
  op.callBoxed(&stack);
  return stack;
}

std::vector<IValue> shapes_of(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  if (op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    try {
      return shapes_by(op, arguments, /*meta=*/true);
    } catch (const c10::NotImplementedError&) {  // by one that it calls
    }
  }
  return shapes_by(op, arguments, /*meta=*/false);
}

void refuse_unknown(const Known& k) {
  TORCH_CHECK(!kNotOfCuda.contains(k.name), "strict device: CUDA does not have ", k.name);
  TORCH_CHECK(!k.is_view, "strict device: ", k.name, " is a view that it does not know");
  TORCH_CHECK(k.on_cpu, "strict device: ", k.name, " has no kernel of the CPU to compute it");
}

void note_use(Known& k) {
  last_operator() = k.name.c_str();
  const std::lock_guard lock(known_mutex);
  k.used = true;
}

// Returns the device's tensor for a result of the CPU, with `fill` for its numbers.
template <typename Fill>
IValue adopted(const IValue& result, at::DeviceIndex device, const Fill& fill) {
  if (result.isTensor()) {
    if (!result.toTensor().defined()) return result;
    Tensor ours = like(result.toTensor(), device);
    fill(ours, result.toTensor());
    return ours;
  }
  if (!result.isTensorList()) return result;
  c10::List<Tensor> list;
  for (const Tensor& tensor : result.toTensorVector()) {
    list.push_back(adopted(IValue(tensor), device, fill).toTensor());
  }
  return list;
}

// Copies what an operator has grown to the device's tensors.
void keep_grown(const Call& call, at::DeviceIndex device) {
  for (const auto& [ours, cpu] : call.grown) {
    if (cpu.numel() == 0) continue;
    const Tensor& output = ours.resize_(cpu.sizes());
    Block* const block = block_of(output);
    Machine::get().launch(device, call.op.name.c_str(), {}, {&block, 1},
                          [from = cpu, to = opened(output)]() mutable { to.copy_(from); });
  }
}

// While it lives, the CPU's kernels draw the device's random numbers: not all of them can be given
// a generator.
class DeviceDraws {
 public:
  explicit DeviceDraws(at::DeviceIndex device)
      : device_(generator_of(device)), hosts_(state_of(host_)) {
    set_state(host_, state_of(device_));
  }
  ~DeviceDraws() {
    set_state(device_, state_of(host_));
    set_state(host_, hosts_);
  }
  DeviceDraws(const DeviceDraws&) = delete;
  DeviceDraws& operator=(const DeviceDraws&) = delete;

 private:
  static Tensor state_of(at::Generator& generator) {
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }
  static void set_state(at::Generator& generator, const Tensor& state) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }

  inline static std::mutex one_at_a_time_;
  std::lock_guard<std::mutex> lock_{one_at_a_time_};
  at::Generator host_ = at::detail::getDefaultCPUGenerator();
  at::Generator device_;
  Tensor hosts_;
};

void run_now(const c10::OperatorHandle& op, Call& call, std::vector<IValue>& cpu,
             at::DeviceIndex device) {
  const char* const name = call.op.name.c_str();
  Machine::get().launch(device, name, call.read, call.written, [] {});
  if (call.waits()) Machine::get().wait_for_current_stream(device, name);
  {
    std::optional<DeviceDraws> draws;
    if (call.op.draws) draws.emplace(device);
    op.callBoxed(&cpu);
  }
  keep_grown(call, device);
  std::size_t r = 0;
  for (IValue& result : cpu) {
    if (call.op.returned[r++] >= 0) continue;
    result = adopted(result, device, [&](const Tensor& ours, const Tensor& from) {
      if (from.numel() == 0) return;
      Block* const block = block_of(ours);
      Machine::get().launch(device, name, {}, {&block, 1},
                            [from, to = opened(ours)]() mutable { to.copy_(from); });
    });
  }
}

void run_late(const c10::OperatorHandle& op, Call& call, const std::vector<IValue>& given,
              std::vector<IValue>& cpu, at::DeviceIndex device) {
  std::vector<IValue> results = shapes_of(op, cpu);
  for (std::size_t r = 0; r < results.size() && !call.grown.empty(); ++r) {
    const int a = call.op.returned[r];
    if (a < 0 || !given[static_cast<std::size_t>(a)].isTensor()) continue;
    Tensor output = given[static_cast<std::size_t>(a)].toTensor();
    if (block_of(output) != nullptr) continue;
    output.resize_(results[r].toTensor().sizes());
    if (block_of(output) != nullptr) call.written.push_back(block_of(output));
    cpu[static_cast<std::size_t>(a)] = opened(output);
  }
  std::vector<std::pair<std::size_t, Tensor>> to;  // results and where they go
  std::vector<IValue> adopted_results;
  for (std::size_t r = 0; r < results.size(); ++r) {
    if (call.op.returned[r] >= 0) {
      adopted_results.emplace_back();
      continue;
    }
    adopted_results.push_back(
        adopted(results[r], device, [&](const Tensor& ours, const Tensor& /*shape*/) {
          to.emplace_back(r, opened(ours));
          if (Block* const block = block_of(ours)) call.written.push_back(block);
        }));
  }
  Machine::get().launch(device, call.op.name.c_str(), call.read, call.written,
                        [op, stack = cpu, to]() mutable {
                          op.callBoxed(&stack);
                          std::size_t i = 0;
                          for (std::size_t r = 0; r < stack.size(); ++r) {
                            if (i == to.size() || to[i].first != r) continue;
                            if (stack[r].isTensor()) {
                              to[i++].second.copy_(stack[r].toTensor());
                              continue;
                            }
                            for (const Tensor& one : stack[r].toTensorVector()) {
                              if (one.defined()) to[i++].second.copy_(one);
                            }
                          }
                        });
  cpu = std::move(adopted_results);
}

void run_on_device(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                   torch::jit::Stack* stack) {
  Known& k = known(op);
  note_use(k);
  refuse_unknown(k);
  const std::size_t count = op.schema().arguments().size();
  const std::vector<IValue> given(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  Call call{.op = k};
  std::vector<IValue> cpu;
  for (std::size_t a = 0; a < count; ++a) cpu.push_back(call.on_cpu(given[a], k.writes[a]));
  const at::DeviceIndex device = call.device.value_or(current_device());
  const at::AutoDispatchBelowADInplaceOrView below;
  // Random numbers are those of the generator's state now, which the host may change.
  if (k.draws) Machine::get().run_current_stream(device);
  if (mode() == Mode::kLate && !call.waits() && !k.draws) {
    run_late(op, call, given, cpu, device);
  } else {
    run_now(op, call, cpu, device);
  }
  for (std::size_t r = 0; r < cpu.size(); ++r) {
    if (k.returned[r] >= 0) cpu[r] = given[static_cast<std::size_t>(k.returned[r])];
  }
  stack->erase(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  stack->insert(stack->end(), cpu.begin(), cpu.end());
}

// libtorch prefers an operator's composition to the fallback: bits of another kernel than the
// CPU's. So what has a kernel on the CPU is registered by name.
void register_compositions(torch::Library& library, const std::set<std::string>& own) {
  using c10::DispatchKey;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!name.name.starts_with("aten::") || own.contains(full_name(name)) || !op ||
        !op->hasSchema() || !op->hasKernelForDispatchKey(DispatchKey::CPU)) {
      continue;
    }
    const bool composed =
        op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
        op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
    if (!composed || known(*op).is_view) continue;
    library.impl(full_name(name).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
  }
}

}  // namespace

void register_operators() {
  static torch::Library fallback(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__,
                                 __LINE__);
  fallback.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
  static torch::Library own(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__,
                            __LINE__);
  register_own(own);
  register_fused(own);
  register_compositions(own, {"aten::empty.memory_format", "aten::empty_strided", "aten::resize_",
                              "aten::_local_scalar_dense", "aten::copy_"});
}

namespace {

std::set<std::string>& own_operators_used() {
  static std::set<std::string> names;
  return names;
}

}  // namespace

void note_own_use(const char* name) {
  const std::lock_guard lock(known_mutex);
  own_operators_used().insert(name);
}

std::set<std::string> operators_used() {
  const std::lock_guard lock(known_mutex);
  std::set<std::string> names = own_operators_used();
  for (const auto& [schema, k] : all_known()) {
    if (k.used) names.insert(k.name);
  }
  return names;
}

at::Device open(int local_rank) {
  static const bool kRegistered = [] {
    c10::register_privateuse1_backend("strict");
    catch_faults();
    register_guard();
    register_operators();
    at::globalContext().setSDPUseCuDNN(false);  // equal bits, as a run's default
    return true;
  }();
  static_cast<void>(kRegistered);
  const at::Device device(at::kPrivateUse1, static_cast<at::DeviceIndex>(local_rank % kDevices));
  current_device() = device.index();
  return device;
}

}  // namespace dynmo::strict

// For tests/support/tested_device.h.
extern "C" int dynmo_open_tested_device() { return dynmo::strict::open(0).index(); }
