// SPDX-License-Identifier: Apache-2.0
// Text to token shards: MB of text a second by tokenizer and jobs. The baseline, one job, is in the
// same run. Every number of jobs must write the same tokens.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "dynmo/core/rng.h"
#include "dynmo/data/prepare.h"

namespace {

namespace fs = std::filesystem;
using namespace dynmo;

constexpr std::int64_t kBytes = std::int64_t{24} << 20;
constexpr std::int64_t kFiles = 240;

// Files of made-up words, frequent ones shorter, and a tokenizer trained on them.
struct Corpus {
  fs::path folder;

  Corpus() {
    std::string name = (fs::temp_directory_path() / "dynmo-bench-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    folder = name;
    fs::create_directory(folder / "text");
    Rng rng(1);
    std::vector<std::string> words;
    for (int i = 0; i < 20000; ++i) {
      std::string word;
      for (auto n = 2 + i / 4000 + static_cast<int>(rng.below(4)); n > 0; --n) {
        word += static_cast<char>('a' + rng.below(26));
      }
      words.push_back(word);
    }
    for (std::int64_t file = 0; file < kFiles; ++file) {
      std::ofstream out(folder / "text" / (std::to_string(file) + ".txt"));
      for (std::int64_t bytes = 0; bytes < kBytes / kFiles;) {
        // The product of two draws: the first words are the most frequent.
        const std::string& word = words[rng.below(1 + rng.below(words.size()))];
        out << word << (rng.below(12) == 0 ? '\n' : ' ');
        bytes += static_cast<std::int64_t>(word.size()) + 1;
      }
    }
    data::PrepareOptions options;
    options.out = folder / "trained";
    options.tokenizer = "sentencepiece";
    options.training.vocabulary = 8000;
    options.training_bytes = std::int64_t{4} << 20;
    if (!data::prepare(std::vector{folder / "text"}, options)) std::abort();
  }
  ~Corpus() {
    std::error_code ignored;
    fs::remove_all(folder, ignored);
  }
};

const Corpus& corpus() {
  static const Corpus made;
  return made;
}

void prepare(benchmark::State& state, const char* tokenizer) {
  data::PrepareOptions options;
  options.out = corpus().folder / "out";
  options.tokenizer = std::string(tokenizer) == "bytes"
                          ? tokenizer
                          : (corpus().folder / "trained" / "tokenizer.model").string();
  options.jobs = static_cast<int>(state.range(0));
  static std::map<std::string, Digest> first;  // by tokenizer, of the first number of jobs that ran
  std::int64_t bytes = 0;
  for (auto _ : state) {
    const auto report = data::prepare(std::vector{corpus().folder / "text"}, options);
    if (!report) return state.SkipWithError(report.error().message.c_str());
    const Digest expected = first.try_emplace(tokenizer, report->train.bin).first->second;
    if (report->train.bin != expected) return state.SkipWithError("tokens differ between jobs");
    bytes += report->bytes;
  }
  state.SetBytesProcessed(bytes);
}

void jobs(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgName("jobs")->RangeMultiplier(2)->Range(1, 8)->UseRealTime();
  benchmark->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(prepare, bytes, "bytes")->Apply(jobs);
BENCHMARK_CAPTURE(prepare, sentencepiece, "sentencepiece")->Apply(jobs);

}  // namespace
