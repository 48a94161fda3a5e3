// SPDX-License-Identifier: Apache-2.0
//
// How long training stands still for a checkpoint, written at once and behind its back, in turn in
// one run: checkpoint_bench [FOLDER [MIB [LAYERS [ROUNDS]]]]. FOLDER's disk is what is measured.
// A table, not a timing of code: median and range over the rounds, after one that is not counted.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "dynmo/checkpoint/background_writer.h"

namespace {

using namespace dynmo;
using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Way {
  std::string name;
  Bytes memory;
  std::vector<double> pause_s = {};
  std::vector<double> total_s = {};
};

// Writes a checkpoint; the folder of the last round is replaced.
Expected<void> save(Way& way, const std::filesystem::path& root,
                    const std::vector<std::vector<std::byte>>& layers, bool counts) {
  DYNMO_ASSIGN(const auto pending, checkpoint::begin_checkpoint(root, 1));
  checkpoint::BackgroundWriter writer(way.memory);
  const auto start = Clock::now();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    writer.add_layer(pending, {.layer = LayerId(static_cast<int>(i)),
                               .tensors = {{.name = "weights",
                                            .dtype = checkpoint::DType::kU8,
                                            .shape = {std::ssize(layers[i])},
                                            .bytes = layers[i]}},
                               .metadata = {}});
  }
  const double pause_s = since(start);
  DYNMO_ASSIGN(auto entries, writer.finish());
  DYNMO_TRY(checkpoint::commit_checkpoint(pending, 1, std::move(entries), Json::object()));
  if (counts) {
    way.pause_s.push_back(pause_s);
    way.total_s.push_back(since(start));
  }
  return {};
}

std::string spread(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return fmt::format("{:>8.1f} ms ({:.1f} to {:.1f})", 1e3 * seconds[seconds.size() / 2],
                     1e3 * seconds.front(), 1e3 * seconds.back());
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, long fallback) {
    return argc > i ? std::max(1L, std::atol(argv[i])) : fallback;
  };
  const std::filesystem::path root = argc > 1 ? argv[1] : "checkpoint_bench.tmp";
  const long mib = number(2, 256);
  const long count = number(3, 16);
  const long rounds = number(4, 7);
  const std::size_t size =
      static_cast<std::size_t>(mib) * 1024 * 1024 / static_cast<std::size_t>(count);
  std::vector<std::vector<std::byte>> layers(static_cast<std::size_t>(count),
                                             std::vector<std::byte>(size, std::byte{1}));
  const Bytes all{static_cast<std::int64_t>(size) * count};
  std::vector<Way> ways = {{"at once", Bytes{0}},
                           {"behind, memory for a quarter", Bytes{all.value / 4}},
                           {"behind, memory for all", all}};
  for (long round = 0; round <= rounds; ++round) {
    for (Way& way : ways) {
      const auto saved = save(way, root, layers, round > 0);
      if (saved) continue;
      fmt::print(stderr, "checkpoint_bench: error: {}\n", saved.error().message);
      return 2;
    }
  }
  fmt::print("{} MiB in {} layers, {} rounds in turn, in {}\n", mib, count, rounds, root.string());
  fmt::print("{:<30}{:<34}{:<34}{}\n", "", "pause", "until committed", "MiB/s");
  for (const Way& way : ways) {
    std::vector<double> total = way.total_s;
    std::nth_element(total.begin(), total.begin() + rounds / 2, total.end());
    fmt::print("{:<30}{:<34}{:<34}{:.0f}\n", way.name, spread(way.pause_s), spread(way.total_s),
               static_cast<double>(mib) / total[static_cast<std::size_t>(rounds / 2)]);
  }
  std::error_code ignored;
  std::filesystem::remove_all(root / "step-00000001", ignored);
  return 0;
}
