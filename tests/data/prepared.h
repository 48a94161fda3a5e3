// SPDX-License-Identifier: Apache-2.0
#pragma once

// Helpers of tests of preparations: options that replace a data set, and its documents as text.

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "dynmo/data/prepare.h"
#include "dynmo/data/token_shard.h"
#include "dynmo/data/tokenizer.h"
#include "tests/support/temp_folder.h"

namespace dynmo::data {

using Paths = std::vector<std::filesystem::path>;

inline std::vector<std::string> documents_of(const TokenShard& shard, const Tokenizer& tokenizer) {
  std::vector<std::string> documents;
  for (std::int64_t i = 0; i < shard.documents(); ++i) {
    const auto range = shard.document(i);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(range.count));
    shard.read(range.first, tokens);
    EXPECT_EQ(tokens.back(), tokenizer.end_of_document());
    tokens.pop_back();
    documents.push_back(decode(tokenizer, tokens));
  }
  return documents;
}
inline std::vector<std::string> documents_of(const TokenShard& shard) {
  return documents_of(shard, *make_byte_tokenizer());
}

inline PrepareOptions options_for(const TempFolder& folder, double validation = 0) {
  PrepareOptions options;
  options.out = folder.path() / "out";
  options.overwrite = true;
  options.validation = validation;
  return options;
}

}  // namespace dynmo::data
