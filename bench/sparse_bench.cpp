// SPDX-License-Identifier: Apache-2.0
// The products of a pruned matrix [1024, 1024] with 512 tokens in fp32, against the dense products
// of libtorch in the same rounds and the sparse one of MKL in the same run: medians of times and of
// the ratios of each round, with their range. Then the sparsity from which on the sparse product is
// faster.
//
//   sparse_bench [ROUNDS] [THREADS]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/kernels/sparse_products.h"

// libtorch_cpu.so exports these functions of MKL (mkl_spblas.h, 32-bit sizes); null with another
// BLAS.
extern "C" {
struct matrix_descr {  // NOLINT: MKL's name
  int type;
  int mode;
  int diag;
};
[[gnu::weak]] int mkl_sparse_s_create_csr(void** matrix, int base, int rows, int columns,
                                          int* starts, int* ends, int* column, float* values);
[[gnu::weak]] int mkl_sparse_s_mm(int operation, float alpha, void* matrix, matrix_descr form,
                                  int layout, const float* x, int columns, int ldx, float beta,
                                  float* y, int ldy);
[[gnu::weak]] int mkl_sparse_destroy(void* matrix);
}

namespace {

using namespace dynmo;                      // NOLINT: a program
namespace sparse = dynmo::kernels::sparse;  // NOLINT

constexpr std::int64_t kSize = 1024;
constexpr std::int64_t kTokens = 512;
constexpr int kMklRounds = 5;

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

at::Tensor normal(at::IntArrayRef shape, std::uint64_t key) {
  Rng rng(key);
  at::Tensor tensor = at::empty(shape);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.data_ptr<float>()[i] = static_cast<float>(rng.normal());
  }
  return tensor;
}

struct Range {
  explicit Range(std::vector<double> all) {
    std::sort(all.begin(), all.end());
    median = all[all.size() / 2];
    low = all.front();
    high = all.back();
  }
  double median;
  double low;
  double high;
};

// One pruned matrix with its activations, and MKL's view of it.
struct Matrices {
  explicit Matrices(double density) : weight(normal({kSize, kSize}, 1)) {
    Rng rng(2);
    mask = at::zeros({kSize, kSize}, at::kBool);
    for (std::int64_t i = 0; i < mask.numel(); ++i) {
      mask.data_ptr<bool>()[i] = rng.uniform() < density;
    }
    weight.mul_(mask);
    pattern = sparse::make_pattern(mask);
    values = weight.masked_select(mask);
    starts = at::zeros({kSize + 1}, at::kInt);
    starts.narrow(0, 1, kSize).copy_(mask.sum(1).cumsum(0));
    columns = mask.nonzero().select(1, 1).to(at::kInt).contiguous();
    gradient = at::zeros_like(values);
    if (mkl_sparse_s_mm != nullptr) {
      auto* start = starts.data_ptr<int>();
      mkl_sparse_s_create_csr(&handle, 0, kSize, kSize, start, start + 1, columns.data_ptr<int>(),
                              values.data_ptr<float>());
    }
  }
  Matrices(const Matrices&) = delete;
  Matrices& operator=(const Matrices&) = delete;
  ~Matrices() {
    if (handle != nullptr) mkl_sparse_destroy(handle);
  }

  // Y^T = W X^T or W^T X^T, where X^T is given row-major [D, N], as MKL is fastest: its transposes
  // are not counted.
  void mkl_times(bool transposed) {
    constexpr int kNone = 10;  // of operation; 11 transposes
    constexpr int kRowMajor = 101;
    constexpr int kGeneral = 20;
    mkl_sparse_s_mm(kNone + (transposed ? 1 : 0), 1, handle, {kGeneral, 0, 0}, kRowMajor,
                    x_DN.const_data_ptr<float>(), kTokens, kTokens, 0, y_DN.data_ptr<float>(),
                    kTokens);
  }

  at::Tensor weight;
  at::Tensor mask;
  std::shared_ptr<const sparse::Pattern> pattern;
  at::Tensor values;
  at::Tensor starts;
  at::Tensor columns;
  at::Tensor gradient;
  at::Tensor gradient_OI = at::zeros({kSize, kSize});
  at::Tensor x = normal({kTokens, kSize}, 3);
  at::Tensor dy = normal({kTokens, kSize}, 4);
  at::Tensor x_DN = x.t().contiguous();
  at::Tensor y_DN = at::zeros({kSize, kTokens});
  void* handle = nullptr;
};

struct Contest {
  const char* name;
  std::function<void(Matrices&)> dense;
  std::function<void(Matrices&)> ours;
  std::function<void(Matrices&)> mkl;  // empty if MKL has none
};

std::vector<Contest> contests() {
  const bool mkl = mkl_sparse_s_mm != nullptr;
  std::vector<Contest> all = {
      {"forward", [](Matrices& m) { at::linear(m.x, m.weight); },
       [](Matrices& m) { static_cast<void>(sparse::times(*m.pattern, m.values, m.x)); },
       [](Matrices& m) { m.mkl_times(false); }},
      {"input gradient", [](Matrices& m) { at::mm(m.dy, m.weight); },
       [](Matrices& m) { static_cast<void>(sparse::times_transposed(*m.pattern, m.values, m.dy)); },
       [](Matrices& m) { m.mkl_times(true); }},
      {"weight gradient",
       [](Matrices& m) { m.gradient_OI.addmm_(m.dy.t(), m.x); },
       [](Matrices& m) { sparse::add_product(*m.pattern, m.gradient, m.dy, m.x); },
       {}}};
  if (!mkl) {
    for (Contest& contest : all) contest.mkl = {};
  }
  return all;
}

bool same(const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, 1e-4, 1e-3); }

bool check(Matrices& m) {
  m.gradient.zero_();
  sparse::add_product(*m.pattern, m.gradient, m.dy, m.x);
  bool right = same(sparse::times(*m.pattern, m.values, m.x), at::linear(m.x, m.weight)) &&
               same(sparse::times_transposed(*m.pattern, m.values, m.dy), at::mm(m.dy, m.weight)) &&
               same(m.gradient, at::mm(m.dy.t(), m.x).masked_select(m.mask));
  if (m.handle != nullptr) {
    m.mkl_times(false);
    right = right && same(m.y_DN.t(), at::linear(m.x, m.weight));
  }
  return right;
}

// The median ratio of dense to sparse time.
double compare(const Contest& contest, Matrices& m, double sparsity, int rounds, bool print) {
  std::vector<double> dense;
  std::vector<double> ours;
  std::vector<double> mkl;
  std::vector<double> ratios;
  for (int round = 0; round <= rounds; ++round) {
    const double dense_s = seconds([&] { contest.dense(m); });
    const double ours_s = seconds([&] { contest.ours(m); });
    if (round == 0) continue;  // warms up
    dense.push_back(1e3 * dense_s);
    ours.push_back(1e3 * ours_s);
    ratios.push_back(dense_s / ours_s);
  }
  const Range ratio(ratios);
  if (print) {
    const Range d(dense);
    const Range o(ours);
    fmt::print("{:<16}{:>4.0f} %{:>7.2f} ({:.2f} to {:.2f}){:>7.2f} ({:.2f} to {:.2f})",
               contest.name, 100 * sparsity, d.median, d.low, d.high, o.median, o.low, o.high);
    fmt::print("{:>7.2f} ({:.2f} to {:.2f})", ratio.median, ratio.low, ratio.high);
    if (contest.mkl) {
      // Apart from the rounds, few, as its transposed product is far slower than all others.
      for (int round = 0; round < kMklRounds; ++round) {
        mkl.push_back(1e3 * seconds([&] { contest.mkl(m); }));
      }
      const Range k(mkl);
      fmt::print("{:>9.2f} ({:.2f} to {:.2f})", k.median, k.low, k.high);
    }
    fmt::print("\n");
  }
  return ratio.median;
}

// The dense products with nothing else in between: in the rounds below they should take as long.
void print_alone(const std::vector<Contest>& all, int rounds) {
  Matrices m(1);
  for (const Contest& contest : all) {
    std::vector<double> times;
    for (int round = 0; round < rounds; ++round) {
      times.push_back(1e3 * seconds([&] { contest.dense(m); }));
    }
    const Range t(times);
    fmt::print("{:<16} alone{:>7.2f} ({:.2f} to {:.2f})\n", contest.name, t.median, t.low, t.high);
  }
}

// Sparsity at which the ratio passes 1, linear between the measured ones.
void print_break_even(const std::vector<Contest>& all, int rounds) {
  constexpr double kSparsities[] = {0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8};
  std::vector<double> before(all.size(), 0);
  std::vector<double> even(all.size(), 1);
  double last = 0;
  for (const double sparsity : kSparsities) {
    Matrices m(1 - sparsity);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const double ratio = compare(all[i], m, sparsity, rounds, false);
      if (ratio >= 1 && even[i] == 1) {
        even[i] = before[i] == 0 ? sparsity
                                 : last + (sparsity - last) * (1 - before[i]) / (ratio - before[i]);
      }
      before[i] = ratio;
    }
    last = sparsity;
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (even[i] == 1) {
      fmt::print("{:<16} not faster than dense up to {:.0f} %\n", all[i].name, 100 * last);
    } else {
      fmt::print("{:<16} faster than dense from {:.0f} % sparsity on\n", all[i].name,
                 100 * even[i]);
    }
  }
}

// Ranks of one thread each, all busy: the ratio of dense to sparse time of a rank.
void print_ranks(const std::vector<Contest>& all, double sparsity, int ranks, int rounds) {
  std::vector<std::vector<double>> ratios(all.size());
  std::vector<std::vector<double>> own(static_cast<std::size_t>(ranks));
  std::barrier<> together(ranks);
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        at::set_num_threads(1);
        Matrices m(1 - sparsity);
        for (const Contest& contest : all) {
          for (int round = 0; round < rounds; ++round) {
            together.arrive_and_wait();
            const double dense_s = seconds([&] { contest.dense(m); });
            together.arrive_and_wait();
            const double ours_s = seconds([&] { contest.ours(m); });
            own[static_cast<std::size_t>(rank)].push_back(dense_s / ours_s);
          }
        }
      });
    }
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (const std::vector<double>& of_rank : own) {
      const auto first = of_rank.begin() + static_cast<std::ptrdiff_t>(i) * rounds;
      ratios[i].insert(ratios[i].end(), first + 1, first + rounds);
    }
    const Range ratio(ratios[i]);
    fmt::print("{:<16}{:>4.0f} %{:>7.2f} ({:.2f} to {:.2f})\n", all[i].name, 100 * sparsity,
               ratio.median, ratio.low, ratio.high);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::max(2, std::atoi(arguments[1])) : 40;
  const int threads = count > 2 ? std::max(1, std::atoi(arguments[2])) : 2;
  at::set_num_threads(threads);
  const std::vector<Contest> all = contests();
  fmt::print("[{0}, {0}], {1} tokens, fp32, {2} threads, {3} rounds; median (range)\n", kSize,
             kTokens, threads, rounds);
  if (mkl_sparse_s_mm == nullptr) fmt::print("no mkl_sparse_s_mm in this libtorch\n");
  fmt::print("{:<16}{:>6}{:>23}{:>23}{:>23}{:>23}\n", "product", "zeros", "dense, ms", "sparse, ms",
             "dense / sparse", "MKL's sparse, ms");
  print_alone(all, rounds);
  for (const double sparsity : {0.8, 0.9, 0.95}) {
    Matrices m(1 - sparsity);
    if (!check(m)) {
      fmt::print(stderr, "sparse_bench: products differ at {}\n", sparsity);
      return 1;
    }
    for (const Contest& contest : all) compare(contest, m, sparsity, rounds, true);
  }
  print_break_even(all, rounds);
  fmt::print("{} ranks of one thread, dense / sparse; median (range)\n", threads);
  for (const double sparsity : {0.8, 0.9, 0.95}) print_ranks(all, sparsity, threads, rounds);
  return 0;
}
