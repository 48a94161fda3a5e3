// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/device/nvrtc.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>

#include "dynmo/core/digest.h"
#include "dynmo/core/files.h"
#include "dynmo/kernels/device/launcher.h"

namespace dynmo::kernels::device {

// The files that CMake puts into the library.
extern const std::string_view kExponentialText;
extern const std::string_view kKernelsText;

namespace {

// The functions of nvrtc.h. Each returns 0 or the number of an error.
struct Nvrtc {
  void* library = nullptr;
  int (*version)(int* major, int* minor) = nullptr;
  int (*create)(void** program, const char* text, const char* name, int headers,
                const char* const* header_texts, const char* const* header_names) = nullptr;
  int (*destroy)(void** program) = nullptr;
  int (*compile)(void* program, int count, const char* const* options) = nullptr;
  int (*log_size)(void* program, std::size_t* size) = nullptr;
  int (*log)(void* program, char* text) = nullptr;
  int (*cubin_size)(void* program, std::size_t* size) = nullptr;
  int (*cubin)(void* program, char* bytes) = nullptr;
  const char* (*error)(int result) = nullptr;
};

template <typename Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  return function != nullptr;
}

// Loads NVRTC, which stays loaded.
Expected<Nvrtc> loaded(const std::filesystem::path& path) {
  Nvrtc nvrtc;
  nvrtc.library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (nvrtc.library == nullptr) return make_error(ErrorCode::kBadInput, "{}", ::dlerror());
  const bool whole = find(nvrtc.library, "nvrtcVersion", nvrtc.version) &&
                     find(nvrtc.library, "nvrtcCreateProgram", nvrtc.create) &&
                     find(nvrtc.library, "nvrtcDestroyProgram", nvrtc.destroy) &&
                     find(nvrtc.library, "nvrtcCompileProgram", nvrtc.compile) &&
                     find(nvrtc.library, "nvrtcGetProgramLogSize", nvrtc.log_size) &&
                     find(nvrtc.library, "nvrtcGetProgramLog", nvrtc.log) &&
                     find(nvrtc.library, "nvrtcGetCUBINSize", nvrtc.cubin_size) &&
                     find(nvrtc.library, "nvrtcGetCUBIN", nvrtc.cubin) &&
                     find(nvrtc.library, "nvrtcGetErrorString", nvrtc.error);
  if (whole) return nvrtc;
  return make_error(ErrorCode::kBadInput, "'{}' is no NVRTC: {}", path.string(), ::dlerror());
}

// Returns the first line of a log with "error", or its first line.
std::string first_error(std::string_view log) {
  const auto at = std::min(log.find("error"), log.size());
  const auto begin = at == log.size() ? 0 : log.rfind('\n', at) + 1;  // npos + 1 is 0
  return std::string(log.substr(begin, log.find('\n', begin) - begin));
}

std::string text_of_kernels() {
  std::string text = fmt::format(
      "#define DYNMO_INLINE __device__ __forceinline__\nconstexpr int kThreads = {};\n", kThreads);
  // Pastes the text without `#pragma once`, which is a warning in a main file.
  const auto once = kExponentialText.find("#pragma once");
  text += kExponentialText.substr(0, once);
  text += kExponentialText.substr(once + std::string_view("#pragma once").size());
  return text + std::string(kKernelsText);
}

Expected<std::string> compiled(const Nvrtc& nvrtc, std::string_view architecture) {
  const std::string text = text_of_kernels();
  void* program = nullptr;
  if (const int result = nvrtc.create(&program, text.c_str(), "kernels.cu", 0, nullptr, nullptr)) {
    return make_error(ErrorCode::kBadInput, "NVRTC: {}", nvrtc.error(result));
  }
  const auto closing = [&nvrtc](void* open) { nvrtc.destroy(&open); };
  const std::unique_ptr<void, decltype(closing)> owner(program, closing);
  const std::string target = fmt::format("--gpu-architecture={}", architecture);
  const std::array<const char*, 3> options = {target.c_str(), "--std=c++17", "--fmad=false"};
  if (const int result = nvrtc.compile(program, static_cast<int>(options.size()), options.data())) {
    std::size_t size = 0;
    nvrtc.log_size(program, &size);
    std::string log(size, '\0');
    nvrtc.log(program, log.data());
    return make_error(ErrorCode::kBadInput, "NVRTC for {}: {}: {}", architecture,
                      nvrtc.error(result), first_error(log.c_str()));
  }
  std::size_t size = 0;
  nvrtc.cubin_size(program, &size);
  std::string cubin(size, '\0');
  if (const int result = nvrtc.cubin(program, cubin.data())) {
    return make_error(ErrorCode::kBadInput, "NVRTC for {}: {}", architecture, nvrtc.error(result));
  }
  return cubin;
}

}  // namespace

Expected<std::string> compile_kernels(const std::filesystem::path& library,
                                      std::string_view architecture) {
  DYNMO_ASSIGN(const Nvrtc nvrtc, loaded(library));
  return compiled(nvrtc, architecture);
}

Expected<std::string> kept_kernels(const std::vector<std::filesystem::path>& libraries,
                                   std::string_view architecture,
                                   const std::filesystem::path& cache) {
  Error missing = make_error(ErrorCode::kBadInput, "no place to look for NVRTC");
  std::optional<Error> refused;
  for (const std::filesystem::path& library : libraries) {
    const auto nvrtc = loaded(library);
    if (!nvrtc) {
      missing = nvrtc.error();
      continue;
    }
    int major = 0;
    int minor = 0;
    nvrtc->version(&major, &minor);
    const std::string name = fmt::format("{}-{}.{}-{}.cubin", digest_of(text_of_kernels()).hex(),
                                         major, minor, architecture);
    if (auto kept = read_file(cache / name)) return kept;
    auto cubin = compiled(*nvrtc, architecture);
    if (!cubin) {  // a newer NVRTC knows old devices no more
      if (!refused) refused = cubin.error();
      continue;
    }
    // Several ranks of a host may write at the same time, because each renames a whole file.
    if (make_directories(cache)) static_cast<void>(write_file_durably(cache / name, *cubin));
    return cubin;
  }
  return refused.value_or(missing);
}

std::vector<std::filesystem::path> nvrtc_libraries(const std::filesystem::path& torch_lib) {
  // The wheels of NVIDIA are in the folder that has that of PyTorch, and fit its driver. So those
  // of the system come later.
  const std::filesystem::path wheels = (torch_lib / "../../nvidia").lexically_normal();
  return {wheels / "cu13/lib/libnvrtc.so.13", wheels / "cuda_nvrtc/lib/libnvrtc.so.12",
          "libnvrtc.so.13", "libnvrtc.so.12"};
}

}  // namespace dynmo::kernels::device
