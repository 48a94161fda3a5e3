// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/tokenizer_json.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "dynmo/data/byte_pairs_impl.h"
#include "dynmo/data/dataset.h"
#include "dynmo/data/prepare.h"
#include "dynmo/data/split_pattern_impl.h"
#include "tests/support/mutate.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny_tokenizer.h"

namespace dynmo::data {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr std::string_view kWords = R"( ?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+)";

Expected<std::unique_ptr<const Tokenizer>> read(const Json& json) {
  return read_tokenizer_json(json.dump(), "t.json", {});
}

std::string message_of(const Json& json) {
  const auto tokenizer = read(json);
  return tokenizer ? "taken" : tokenizer.error().message;
}

Ids ids_of(const Tokenizer& tokenizer, std::string_view text) {
  Ids ids;
  tokenizer.encode(text, ids);
  return ids;
}

TEST(TokenizerJson, MergesByRankWithinPieces) {
  const auto tokenizer = read(tiny_tokenizer());
  ASSERT_TRUE(tokenizer) << tokenizer.error().message;
  EXPECT_EQ((*tokenizer)->vocabulary(), 264);
  EXPECT_EQ((*tokenizer)->end_of_document(), 262);  // the only special token
  EXPECT_EQ(ids_of(**tokenizer, "the the"), (Ids{257, 258}));
  EXPECT_EQ(ids_of(**tokenizer, "tthe he"), (Ids{'t', 257, ' ', 259}));
  EXPECT_EQ(ids_of(**tokenizer, "aaaaaaa"), (Ids{261, 260, 'a'}));
  EXPECT_EQ(ids_of(**tokenizer, "t<|mid|>he"), (Ids{'t', 263, 259}));
  EXPECT_EQ(ids_of(**tokenizer, "<|end|>"), (Ids{262}));
  EXPECT_EQ((*tokenizer)->text_of(258), " the");
  EXPECT_EQ((*tokenizer)->text_of(263), "<|mid|>");
  EXPECT_EQ((*tokenizer)->text_of(262), "");
  EXPECT_EQ((*tokenizer)->text_of(264), "");
}

TEST(TokenizerJson, IgnoresMergesOfAPieceThatIsAToken) {
  Json json = tiny_tokenizer(kWords);
  json["model"]["vocab"]["xyz"] = 264;
  EXPECT_EQ(ids_of(**read(json), "xyz xyz"), (Ids{'x', 'y', 'z', ' ', 'x', 'y', 'z'}));
  json["model"]["ignore_merges"] = true;
  EXPECT_EQ(ids_of(**read(json), "xyz xyz"), (Ids{264, ' ', 'x', 'y', 'z'}));
}

TEST(TokenizerJson, NormalizesBetweenAddedTokens) {
  const auto tokenizer = read(tiny_tokenizer(kWords));
  ASSERT_TRUE(tokenizer) << tokenizer.error().message;
  EXPECT_EQ(ids_of(**tokenizer, "e\xCC\x81"), (Ids{0xC3, 0xA9}));
  EXPECT_EQ(ids_of(**tokenizer, "e<|mid|>\xCC\x81"), (Ids{'e', 263, 0xCC, 0x81}));
}

TEST(TokenizerJson, StripsWhiteSpaceAroundTokensThatAskForIt) {
  Json json = tiny_tokenizer();
  json["added_tokens"][1]["lstrip"] = true;
  EXPECT_EQ(ids_of(**read(json), "a \xC2\xA0<|mid|> b"), (Ids{'a', 263, ' ', 'b'}));
  json["added_tokens"][1]["rstrip"] = true;
  EXPECT_EQ(ids_of(**read(json), " <|mid|> \n<|mid|>b"), (Ids{263, 263, 'b'}));
}

TEST(TokenizerJson, GivesAnyBytesBack) {
  const auto tokenizer = read(tiny_tokenizer());
  Rng rng(44);
  for (int i = 0; i < 300; ++i) {
    std::string text;
    const auto size = rng.below(i % 10 == 0 ? 3000 : 30);
    while (text.size() < size) {
      text +=
          rng.below(3) == 0 ? std::string(1, static_cast<char>(rng.below(256))) : "the \xC3\xA9";
    }
    EXPECT_EQ(decode(**tokenizer, ids_of(**tokenizer, text)), text);
  }
  EXPECT_EQ(ids_of(**tokenizer, "\xE2\x82the\xFF"), (Ids{0xE2, 0x82, 257, 0xFF}));
}

// Oracle: the lowest rank, and of equal ones the leftmost, searched for again after each merge.
TEST(BytePairs, MergesAsAPlainSearchDoes) {
  Rng rng(7);
  for (int draw = 0; draw < 200; ++draw) {
    std::array<std::int32_t, 256> bytes{};
    for (int byte = 0; byte < 256; ++byte) bytes[static_cast<std::size_t>(byte)] = byte;
    std::vector<TokenMerge> merges;
    std::map<std::pair<std::int32_t, std::int32_t>, std::size_t> ranks;
    std::vector<std::int32_t> known = {'a', 'b', 'c'};
    while (merges.size() < 40) {
      const std::pair pair(known[rng.below(known.size())], known[rng.below(known.size())]);
      const auto made = static_cast<std::int32_t>(256 + merges.size());
      if (!ranks.emplace(pair, merges.size()).second) continue;
      merges.push_back({.left = pair.first, .right = pair.second, .made = made});
      known.push_back(made);
    }
    std::ranges::reverse(merges);  // so that later tokens merge first, too
    for (auto& [pair, rank] : ranks) rank = merges.size() - 1 - rank;
    const BytePairs pairs(bytes, merges, {});
    BytePairs::Scratch scratch;
    for (const std::size_t size : {1U, 2U, 9U, 30U, 31U, 48U, 49U, 400U}) {
      std::string piece;
      while (piece.size() < size) piece += static_cast<char>('a' + rng.below(3));
      Ids wanted(piece.begin(), piece.end());
      for (;;) {
        std::size_t best = merges.size();
        std::size_t place = 0;
        for (std::size_t i = 0; i + 1 < wanted.size(); ++i) {
          const auto found = ranks.find({wanted[i], wanted[i + 1]});
          if (found == ranks.end() || found->second >= best) continue;
          best = found->second;
          place = i;
        }
        if (best == merges.size()) break;
        wanted[place] = merges[best].made;
        wanted.erase(wanted.begin() + static_cast<std::ptrdiff_t>(place) + 1);
      }
      for (int again = 0; again < 2; ++again) {  // the second time from the cache
        Ids got;
        pairs.encode(piece, scratch, got);
        EXPECT_EQ(got, wanted) << "draw " << draw << ", " << piece;
      }
    }
  }
}

TEST(SplitPattern, CutsAsWritten) {
  const auto pieces = [](std::string_view pattern, std::string_view text) {
    std::vector<std::string> made;
    SplitPattern::State state;
    const auto compiled = SplitPattern::compile(pattern);
    EXPECT_TRUE(compiled) << compiled.error().message;
    compiled->split(text, state, [&](std::string_view piece) { made.emplace_back(piece); });
    return made;
  };
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(pieces(kGpt2Pattern, "I'll  go 12x!"),
            (Pieces{"I", "'ll", " ", " go", " 12", "x", "!"}));
  EXPECT_EQ(pieces(R"(\s+)",
                   "a\xE1\xA0\x8E"
                   "b\xC2\x85"
                   "c"),
            (Pieces{"a\xE1\xA0\x8E"
                    "b",
                    "\xC2\x85", "c"}));
  EXPECT_EQ(pieces(R"((?i:'s|'t)|[^\s]+?)", "'S'\xC5\xBFx"), (Pieces{"'S", "'\xC5\xBF", "x"}));
}

TEST(SplitPattern, RefusesWhatPcre2CouldReadOtherwise) {
  for (const char* pattern :
       {R"(\w+)",      R"(a.b)",     R"(^a)",      R"(a$)",          R"((?<=a)b)", R"((a+)+)",
        R"((a*){2,})", R"(a{1,2}+)", R"([a&&b])",  R"([[:alpha:]])", R"([\S])",    R"([a-\s])",
        R"(\p{Han})",  R"(\x41)",    R"((?i:ss))", R"((?i:[a-z]))",  R"((?i:s+))", R"(a**)",
        R"(()",        R"([a)",      R"())",       R"(a{)",          R"(\)"}) {
    const auto made = translate_pattern(pattern);
    EXPECT_FALSE(made) << pattern << " became " << *made;
  }
  EXPECT_FALSE(SplitPattern::compile("a*"));
}

TEST(TokenizerJson, RefusesByNameAndValueWhatIsNotImplemented) {
  const std::pair<const char*, Json> edits[] = {
      {"/model/type", "Unigram"},
      {"/model/type", "WordPiece"},
      {"/model/dropout", 0.1},
      {"/model/byte_fallback", true},
      {"/model/end_of_word_suffix", "</w>"},
      {"/normalizer/type", "NFKC"},
      {"/pre_tokenizer/pretokenizers/0/type", "Digits"},
      {"/pre_tokenizer/pretokenizers/0/behavior", "Removed"},
      {"/pre_tokenizer/pretokenizers/0/invert", true},
      {"/pre_tokenizer/pretokenizers/1/add_prefix_space", true},
      {"/added_tokens/1/single_word", true},
      {"/added_tokens/1/id", 5},
      {"/model/vocab/the", 5},
      {"/model/merges/0", "t zz"},
  };
  for (const auto& [place, value] : edits) {
    Json json = tiny_tokenizer(kWords);
    json[Json::json_pointer(place)] = value;
    const std::string message = message_of(json);
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    const std::string said = value.is_string() ? value.get<std::string>() : value.dump();
    EXPECT_NE(message.find(said), std::string::npos) << place << ": " << message;
  }
  Json json = tiny_tokenizer(kWords);
  json["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", "\\w+"}};
  EXPECT_NE(message_of(json).find("'\\w'"), std::string::npos) << message_of(json);
  json = tiny_tokenizer();
  json["model"]["vocab"].erase("a");
  EXPECT_NE(message_of(json).find("byte 0x61"), std::string::npos) << message_of(json);
  json = tiny_tokenizer();
  json["pre_tokenizer"] = nullptr;
  EXPECT_NE(message_of(json).find("does not end with ByteLevel"), std::string::npos);
}

TEST(TokenizerJson, DamagedIsRefusedInOneLine) {
  const std::string whole = tiny_tokenizer(kWords).dump();
  Rng rng(300);
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    const auto made = read_tokenizer_json(mutate(whole, rng), "t.json", {});
    if (made) continue;
    ++refused;
    EXPECT_EQ(made.error().code, ErrorCode::kBadInput);
    EXPECT_EQ(made.error().message.find('\n'), std::string::npos) << made.error().message;
  }
  EXPECT_GT(refused, 200);
}

TEST(TokenizerJson, FindsTheEndOfADocumentBesideIt) {
  const TempFolder folder;
  Json json = tiny_tokenizer();
  json["added_tokens"][1]["special"] = true;
  const auto file = folder.write("tokenizer.json", json.dump()).string();
  const auto end = [&] {
    const auto tokenizer = open_tokenizer(folder.path().string());
    return tokenizer ? (*tokenizer)->end_of_document() : -1;
  };
  EXPECT_NE(open_tokenizer(file).error().message.find("eos_token"), std::string::npos);
  folder.write("config.json", R"({"eos_token_id": [263, 262]})");
  EXPECT_EQ(end(), 263);
  folder.write("config.json", R"({"eos_token_id": 7})");
  EXPECT_EQ(end(), 7);
  folder.write("tokenizer_config.json", R"({"eos_token": {"content": "<|end|>"}})");
  EXPECT_EQ(end(), 262);
  EXPECT_EQ((*open_tokenizer(file))->kind(), kByteLevelBpe);
  folder.write("tokenizer_config.json", R"({"eos_token": "<|no|>"})");
  EXPECT_NE(open_tokenizer(file).error().message.find("eos_token is \"<|no|>\""),
            std::string::npos);
}

TEST(TokenizerJson, OfAPreparedFolderIsFoundByItsDescription) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 3000; ++i) text += "the thing " + std::to_string(i) + "\n";
  for (int i = 0; i < 9; ++i) folder.write("text/" + std::to_string(i) + ".txt", text);
  folder.write("tokenizer.json", tiny_tokenizer().dump());
  const std::vector<std::filesystem::path> paths = {folder.path() / "text"};
  PrepareOptions options;
  options.tokenizer = folder.path().string();
  std::vector<std::string> made;
  for (const int jobs : {1, 3}) {
    options.out = folder.path() / ("out" + std::to_string(jobs));
    options.jobs = jobs;
    ASSERT_TRUE(prepare(paths, options));
    for (const char* name : {"train.bin", "dataset.json", "tokenizer.json"}) {
      made.push_back(*read_file(options.out / name));
    }
  }
  EXPECT_TRUE(std::equal(made.begin(), made.begin() + 3, made.begin() + 3));
  const auto description = read_description(options.out);
  ASSERT_TRUE(description) << description.error().message;
  EXPECT_EQ(description->tokenizer, "byte-level-bpe");
  EXPECT_EQ(description->end_of_document, 262);
  EXPECT_EQ(tokenizer_name(*description), tokenizer_name(**open_tokenizer(options.tokenizer)));
  EXPECT_EQ((*open_tokenizer(options.out.string()))->end_of_document(), 262);
  // Its tokenizer_config.json says the same to others, and to ourselves without dataset.json.
  EXPECT_EQ((*open_tokenizer((options.out / "tokenizer.json").string()))->end_of_document(), 262);
  folder.write("out3/tokenizer.json", tiny_tokenizer(kWords).dump());
  EXPECT_NE(tokenizer_of(options.out, *description).error().message.find("its digest is not"),
            std::string::npos);
}

}  // namespace
}  // namespace dynmo::data
