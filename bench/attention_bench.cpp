// SPDX-License-Identifier: Apache-2.0
// Attention on the tokens of buckets in fp32, 12 heads of 64, against whole sequences by the same
// loop and by libtorch, in the same rounds: medians of seconds, forward and forward + backward. The
// gathers of rows and the keys made of queries count; the hashing has a row of its own. `peak` is
// the most that libtorch's allocator held at once in forward + backward, inputs and the gradient
// included. Then buckets of growing skew: seconds by pair; and the most that the process had
// resident.
//
//   attention_bench [TOKENS] [ROUNDS] [THREADS]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/kernels/angular_hashes.h"
#include "dynmo/model/attention_pattern.h"
#include "dynmo/model/memory.h"

namespace {

using namespace dynmo;  // NOLINT: a program

constexpr std::int64_t kHeads = 12;
constexpr std::int64_t kSize = 64;
constexpr std::size_t kBuckets = 16;

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

at::Tensor normal(std::int64_t tokens, std::uint64_t key) {
  Rng rng(key);
  at::Tensor x = at::empty({1, tokens, kHeads, kSize});
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    x.data_ptr<float>()[i] = static_cast<float>(rng.normal());
  }
  return x;
}

// Buckets with shares of a geometric series, of ratio 1 even, in each head by draws of its own.
kernels::Selection buckets_of(std::int64_t tokens, double ratio) {
  std::vector<std::int64_t> rows;
  std::vector<std::int64_t> offsets = {0};
  double all = 0;
  for (std::size_t u = 0; u < kBuckets; ++u) all += std::pow(ratio, static_cast<double>(u));
  for (std::int64_t h = 0; h < kHeads; ++h) {
    std::vector<std::vector<std::int64_t>> bucket(kBuckets);
    Rng rng(mix_key({7, static_cast<std::uint64_t>(h)}));
    for (std::int64_t t = 0; t < tokens; ++t) {
      double left = rng.uniform() * all;
      std::size_t u = 0;
      while (u + 1 < kBuckets && left >= std::pow(ratio, static_cast<double>(u))) {
        left -= std::pow(ratio, static_cast<double>(u++));
      }
      bucket[u].push_back(t * kHeads + h);
    }
    for (const auto& own : bucket) {
      rows.insert(rows.end(), own.begin(), own.end());
      offsets.push_back(std::ssize(rows));
    }
  }
  const auto tensor = [](const std::vector<std::int64_t>& numbers) {
    return at::tensor(numbers, at::kLong);
  };
  kernels::Selection selection{.queries = tensor(rows),
                               .query_offsets = tensor(offsets),
                               .keys = {},
                               .key_offsets = {},
                               .mask = kernels::Mask::kStrict};
  selection.keys = selection.queries;
  selection.key_offsets = selection.query_offsets;
  return selection;
}

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + std::ssize(times) / 2, times.end());
  return times[times.size() / 2];
}

struct Kind {
  const char* name;
  std::function<void(bool backward)> run;
  std::vector<double> forward = {};
  std::vector<double> both = {};
  std::int64_t peak = 0;  // bytes, beside the inputs
};

double mebibytes(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// Returns the peak of this process so far, in KiB.
std::int64_t most_resident() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::int64_t value = 0;
    if (word == "VmHWM:" && status >> value) return value;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t tokens = argc > 1 ? std::atoi(argv[1]) : 4096;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 5;
  at::set_num_threads(argc > 3 ? std::atoi(argv[3]) : 1);
  const at::Tensor q = normal(tokens, 1);
  const at::Tensor k = normal(tokens, 2);
  const at::Tensor v = normal(tokens, 3);
  const at::Tensor slope = normal(tokens, 4);
  const auto selected = [&](const kernels::Selection& selection) {
    return [&, selection](bool backward) {
      const auto attention = kernels::selected_attention(q, {}, v, selection);
      if (backward) {
        (void)kernels::selected_attention_gradient(slope, q, {}, v, attention, selection);
      }
    };
  };
  std::int64_t inputs = 0;
  for (const at::Tensor* one : {&q, &k, &v, &slope}) {
    inputs += static_cast<std::int64_t>(one->nbytes());
  }
  std::vector<Kind> kinds = {
      {"libtorch, whole sequence",
       [&](bool backward) {
         std::vector<at::Tensor> x;
         for (const at::Tensor* one : {&q, &k, &v}) {
           x.push_back(one->transpose(1, 2).detach().set_requires_grad(backward));
         }
         const at::Tensor out = at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0, true);
         if (backward) out.backward(slope.transpose(1, 2));
       }},
      {"own, whole sequence",
       [&](bool backward) {
         const auto attention = kernels::causal_attention(q, k, v);
         if (backward) (void)kernels::causal_attention_gradient(slope, q, k, v, attention);
       }},
      {"16 even buckets", selected(buckets_of(tokens, 1))},
      {"hashing alone", [&](bool) {
         (void)kernels::angular_hashes(q, at::randn({kHeads, kSize, 8}, at::kDouble));
       }}};
  std::vector<kernels::Selection> skewed;
  for (const double ratio : {1.0, 0.9, 0.8, 0.65, 0.5, 1.0 / 3}) {
    skewed.push_back(buckets_of(tokens, ratio));
  }
  const std::size_t first_skewed = kinds.size();
  for (const kernels::Selection& selection : skewed)
    kinds.push_back({"skewed", selected(selection)});
  for (int round = 0; round <= rounds; ++round) {
    for (Kind& kind : kinds) {
      const double forward = seconds([&] { kind.run(false); });
      if (round == 0) {
        const model::AllocationMeter meter;
        kind.run(true);
        kind.peak = meter.peak().value;
        continue;
      }
      const double both = seconds([&] { kind.run(true); });
      kind.forward.push_back(forward);
      kind.both.push_back(both);
    }
  }
  fmt::print("{} tokens, {} heads of {}, {} rounds, {} threads\n", tokens, kHeads, kSize, rounds,
             at::get_num_threads());
  for (std::size_t i = 0; i < first_skewed; ++i) {
    fmt::print(
        "{:<26} forward {:8.4f} s   with backward {:8.4f} s   libtorch / it {:5.2f} {:5.2f}   peak "
        "{:5.0f} MiB\n",
        kinds[i].name, median(kinds[i].forward), median(kinds[i].both),
        median(kinds[0].forward) / median(kinds[i].forward),
        median(kinds[0].both) / median(kinds[i].both), mebibytes(inputs + kinds[i].peak));
  }
  fmt::print("the process had at most {:.0f} MiB resident\n", mebibytes(most_resident() << 10));
  double first = 0;
  for (std::size_t i = 0; i < skewed.size(); ++i) {
    const double pairs = model::pattern_figures_of(q, skewed[i])[model::kPairs];
    const double by_pair = median(kinds[first_skewed + i].both) / pairs;
    if (i == 0) first = by_pair;
    fmt::print("skew {:5.2f}   {:8.4f} s   {:6.2f} ns by pair, {:5.2f} of the first\n",
               2 * kBuckets * pairs / (kHeads * static_cast<double>(tokens * tokens)),
               median(kinds[first_skewed + i].both), 1e9 * by_pair, by_pair / first);
  }
  return 0;
}
