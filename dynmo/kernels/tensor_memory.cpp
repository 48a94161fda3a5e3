// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/tensor_memory.h"

#include <ATen/ATen.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <new>
#include <span>
#include <utility>

namespace dynmo::kernels {
namespace {

constexpr std::size_t kAlignment = 64;  // as in libtorch
constexpr std::size_t kLargePage = std::size_t{2} << 20;

std::size_t rounded_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// Gives the system advice on the whole pages in `bytes`. Errors are ignored.
void advise(std::span<std::byte> bytes, int advice) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* start = bytes.data();
  std::size_t left = bytes.size();
  if (std::align(page, page, start, left) == nullptr) return;
  (void)madvise(start, left / page * page, advice);
}

// Owns new zeroed pages, aligned to a large page. Any thread may free them.
//
// The first write of 64 MiB takes 42 ms in small pages, and 11 ms in large ones. The end also has a
// large page if it fills more than half of one.
class Run {
 public:
  Run(std::size_t bytes, int tensors) : tensors_(tensors) {
    const std::size_t ends = bytes % kLargePage;
    const std::size_t large = bytes - ends + (2 * ends > kLargePage ? kLargePage : 0);
    bytes_ = std::max(rounded_up(bytes, static_cast<std::size_t>(sysconf(_SC_PAGESIZE))), large);
    const std::size_t room = bytes_ + kLargePage;
    void* const at =
        mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    void* start = at;
    std::size_t left = room;
    std::align(kLargePage, bytes_, start, left);
    start_ = static_cast<std::byte*>(start);
    auto* const begin = static_cast<std::byte*>(at);
    const auto before = static_cast<std::size_t>(start_ - begin);
    if (before > 0) munmap(begin, before);
    if (room > before + bytes_) munmap(start_ + bytes_, room - before - bytes_);
    if (large > 0) advise({start_, large}, MADV_HUGEPAGE);
  }
  ~Run() { munmap(start_, bytes_); }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  [[nodiscard]] std::byte* start() const { return start_; }
  void free_one(std::span<std::byte> bytes) {
    if (--tensors_ > 0) advise(bytes, MADV_DONTNEED);
  }

 private:
  std::byte* start_ = nullptr;
  std::size_t bytes_ = 0;
  std::atomic<int> tensors_;
};

}  // namespace

std::vector<at::Tensor> allocate_together(const std::vector<std::vector<std::int64_t>>& shapes,
                                          std::size_t zeros) {
  std::vector<std::size_t> places;
  std::size_t bytes = 0;
  for (const auto& shape : shapes) {
    places.push_back(bytes);
    bytes += rounded_up(static_cast<std::size_t>(c10::multiply_integers(shape)) * sizeof(float),
                        kAlignment);
  }
  std::vector<at::Tensor> tensors;
  if (bytes < kLargePage) {
    const at::Tensor run = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      std::byte* const at = static_cast<std::byte*>(run.data_ptr()) + places[i];
      tensors.push_back(at::from_blob(
          at, shapes[i], [run](void*) {}, at::kFloat));
      if (i + zeros >= shapes.size()) tensors.back().zero_();
    }
    return tensors;
  }
  const auto run = std::make_shared<Run>(bytes, static_cast<int>(shapes.size()));
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const std::size_t next = i + 1 < shapes.size() ? places[i + 1] : bytes;
    const std::span<std::byte> own(run->start() + places[i], next - places[i]);
    tensors.push_back(at::from_blob(
        own.data(), shapes[i], [run, own](void*) { run->free_one(own); }, at::kFloat));
  }
  return tensors;
}

void back_memory(const at::Tensor& tensor) {
  advise({static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()}, MADV_POPULATE_WRITE);
}

}  // namespace dynmo::kernels
