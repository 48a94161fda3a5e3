// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/token_shard.h"

#include <gtest/gtest.h>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "tests/support/mutate.h"
#include "tests/support/temp_folder.h"

namespace dynmo::data {
namespace {

// Little-endian bytes of numbers, written down without the code under test.
struct Bytes {
  std::string text;
  Bytes& raw(std::string_view bytes) { return text += bytes, *this; }
  Bytes& number(std::uint64_t value, int width) {
    for (int i = 0; i < width; ++i) text += static_cast<char>(value >> (8 * i) & 0xff);
    return *this;
  }
};

// Two documents, of tokens 10 11 12 and 65535, as Megatron's IndexedDatasetBuilder writes them.
Bytes golden_index() {
  Bytes index;
  index.raw(std::string_view("MMIDIDX\0\0", 9)).number(1, 8).number(8, 1).number(2, 8).number(3, 8);
  index.number(3, 4).number(1, 4);               // sizes
  index.number(0, 8).number(6, 8);               // pointers
  index.number(0, 8).number(1, 8).number(2, 8);  // documents
  return index;
}
Bytes golden_tokens() {
  Bytes bin;
  return bin.number(10, 2).number(11, 2).number(12, 2).number(65535, 2);
}

std::filesystem::path write_golden(const TempFolder& folder) {
  folder.write("g.idx", golden_index().text);
  folder.write("g.bin", golden_tokens().text);
  return folder.path() / "g";
}

std::vector<std::int32_t> all_tokens(const TokenShard& shard) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(shard.tokens()));
  shard.read(0, tokens);
  return tokens;
}

// Uses all that an opened shard offers, so that asan sees any read outside the maps.
void use(const TokenShard& shard) {
  (void)all_tokens(shard);
  std::int64_t tokens = 0;
  for (std::int64_t i = 0; i < shard.documents(); ++i) tokens += shard.document(i).count;
  EXPECT_EQ(tokens, shard.tokens());
  (void)shard.summary();
}

TEST(TokenShard, ReadsWhatMegatronWrites) {
  const TempFolder folder;
  const auto shard = TokenShard::open(write_golden(folder));
  ASSERT_TRUE(shard) << shard.error().message;
  EXPECT_EQ(shard->type(), TokenType::kUint16);
  EXPECT_EQ(shard->documents(), 2);
  EXPECT_EQ(all_tokens(*shard), (std::vector<std::int32_t>{10, 11, 12, 65535}));
  EXPECT_EQ(shard->document(1).first, 3);
  EXPECT_EQ(shard->document(1).count, 1);
}

TEST(TokenShard, WritesMegatronsBytes) {
  const TempFolder folder;
  auto writer = TokenShardWriter::create(folder.path() / "w");
  ASSERT_TRUE(writer);
  ASSERT_TRUE(writer->append(std::vector<std::int32_t>{10, 11}));
  ASSERT_TRUE(writer->append(std::vector<std::int32_t>{12}));
  writer->end_document();
  ASSERT_TRUE(writer->append(std::vector<std::int32_t>{65535}));
  writer->end_document();
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "w.bin")) << "visible before it is whole";
  const auto summary = writer->finish();
  ASSERT_TRUE(summary);
  EXPECT_EQ(*read_file(folder.path() / "w.idx"), golden_index().text);
  EXPECT_EQ(*read_file(folder.path() / "w.bin"), golden_tokens().text);
  EXPECT_EQ(summary->idx, digest_of(golden_index().text));
  EXPECT_EQ(summary->bin, digest_of(golden_tokens().text));
  EXPECT_EQ(*summary, TokenShard::open(folder.path() / "w")->summary());
}

TEST(TokenShard, OfRandomDocumentsComesBack) {
  const TempFolder folder;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Rng rng(mix_key({seed, 31}));
    auto writer = TokenShardWriter::create(folder.path() / "r");
    ASSERT_TRUE(writer);
    std::vector<std::int32_t> expected;
    std::vector<std::int64_t> ends;
    const auto documents = rng.below(40);
    for (std::uint64_t d = 0; d < documents; ++d) {
      // Some documents are longer than the writer's buffer of 2^19 tokens.
      const auto size = 1 + rng.below(seed == 0 && d == 3 ? 1 << 21 : 50);
      std::vector<std::int32_t> tokens(size);
      for (auto& token : tokens) token = static_cast<std::int32_t>(rng.below(1 << 16));
      ASSERT_TRUE(writer->append(tokens));
      writer->end_document();
      expected.insert(expected.end(), tokens.begin(), tokens.end());
      ends.push_back(static_cast<std::int64_t>(expected.size()));
    }
    ASSERT_TRUE(writer->finish());
    const auto shard = TokenShard::open(folder.path() / "r");
    ASSERT_TRUE(shard) << "seed " << seed << ": " << shard.error().message;
    EXPECT_EQ(all_tokens(*shard), expected) << "seed " << seed;
    ASSERT_EQ(shard->documents(), static_cast<std::int64_t>(documents));
    for (std::size_t d = 0; d < documents; ++d) {
      const auto range = shard->document(static_cast<std::int64_t>(d));
      EXPECT_EQ(range.first + range.count, ends[d]) << "seed " << seed;
    }
  }
}

TEST(TokenShard, ReadsEveryIntegerType) {
  const TempFolder folder;
  const auto write = [&](int code, int width, std::initializer_list<std::int64_t> values) {
    Bytes index;
    index.raw(std::string_view("MMIDIDX\0\0", 9)).number(1, 8).number(std::uint64_t(code), 1);
    index.number(1, 8).number(2, 8).number(values.size(), 4).number(0, 8).number(0, 8).number(1, 8);
    Bytes bin;
    for (const auto value : values) bin.number(static_cast<std::uint64_t>(value), width);
    folder.write("t.idx", index.text);
    folder.write("t.bin", bin.text);
    const auto shard = TokenShard::open(folder.path() / "t");
    EXPECT_TRUE(shard) << shard.error().message;
    return all_tokens(*shard);
  };
  using Tokens = std::vector<std::int32_t>;
  EXPECT_EQ(write(1, 1, {0, 255}), (Tokens{0, 255}));
  EXPECT_EQ(write(2, 1, {127, -1}), (Tokens{127, -1}));
  EXPECT_EQ(write(3, 2, {32767, -2}), (Tokens{32767, -2}));
  EXPECT_EQ(write(4, 4, {2147483647, 5}), (Tokens{2147483647, 5}));
  EXPECT_EQ(write(5, 8, {50256, 1LL << 32, -7}), (Tokens{50256, -1, -1}));
  EXPECT_EQ(write(8, 2, {65535}), (Tokens{65535}));
}

TEST(TokenShard, FaultsNameTheFileAndWhatIsWrong) {
  const TempFolder folder;
  const auto prefix = write_golden(folder);
  const auto message_of = [&](std::size_t offset, std::uint64_t value, int width) {
    std::string index = golden_index().text;
    index.replace(offset, static_cast<std::size_t>(width), Bytes().number(value, width).text);
    folder.write("g.idx", index);
    const auto shard = TokenShard::open(prefix);
    EXPECT_FALSE(shard);
    EXPECT_EQ(shard.error().code, ErrorCode::kBadInput);
    const std::string name = prefix.string() + ".idx: ";
    EXPECT_EQ(shard.error().message.substr(0, name.size()), name);
    return shard.error().message.substr(std::min(name.size(), shard.error().message.size()));
  };
  EXPECT_EQ(message_of(0, 'X', 1), "not a token index: wanted a file that begins with MMIDIDX");
  EXPECT_EQ(message_of(9, 2, 8), "index version 2, wanted 1");
  EXPECT_EQ(message_of(17, 7, 1), "tokens of type code 7, wanted an integer type");
  EXPECT_EQ(message_of(18, 3, 8),
            "truncated: 82 bytes are there, wanted 94 for 3 sequences and 3 document boundaries");
  EXPECT_EQ(message_of(18, 1, 8),
            "82 bytes are there, wanted 70 for 1 sequences and 3 document boundaries");
  EXPECT_EQ(message_of(18, ~0ULL, 8),
            "18446744073709551615 sequences and 3 document boundaries, more than a file can hold");
  EXPECT_EQ(message_of(34, 0x80000000, 4), "sequence 0 has -2147483648 tokens");
  EXPECT_EQ(message_of(50, 4, 8), "sequence 1 begins at byte 4, wanted 6");
  EXPECT_EQ(message_of(58, 1, 8), "document boundary 0 is sequence 1, wanted 0 to 0");
  EXPECT_EQ(message_of(66, 9, 8), "document boundary 1 is sequence 9, wanted 0 to 2");
  EXPECT_EQ(message_of(74, 1, 8), "the documents end at sequence 1 of 2");
  folder.write("g.idx", golden_index().text);
  folder.write("g.bin", golden_tokens().text + "x");
  EXPECT_EQ(TokenShard::open(prefix).error().message,
            prefix.string() + ".bin: 9 bytes are there, wanted 8 by its index");
  folder.write("g.bin", golden_tokens().text.substr(0, 7));
  EXPECT_EQ(TokenShard::open(prefix).error().message,
            prefix.string() + ".bin: truncated: 7 bytes are there, wanted 8 by its index");
  for (std::size_t size = 0; size < golden_index().text.size(); ++size) {
    folder.write("g.idx", golden_index().text.substr(0, size));
    EXPECT_NE(TokenShard::open(prefix).error().message.find(
                  fmt::format(".idx: truncated: {} bytes are there, ", size)),
              std::string::npos)
        << TokenShard::open(prefix).error().message;
  }
  EXPECT_NE(TokenShard::open(folder.path() / "none").error().message.find("none.idx"),
            std::string::npos);
}

TEST(TokenShard, TruncatedAtAnyByteIsAnError) {
  const TempFolder folder;
  const auto prefix = write_golden(folder);
  const std::string index = golden_index().text;
  for (std::size_t size = 0; size < index.size(); ++size) {
    folder.write("g.idx", index.substr(0, size));
    EXPECT_FALSE(TokenShard::open(prefix)) << size;
  }
  folder.write("g.idx", index);
  const std::string bin = golden_tokens().text;
  for (std::size_t size = 0; size < bin.size(); ++size) {
    folder.write("g.bin", bin.substr(0, size));
    EXPECT_FALSE(TokenShard::open(prefix)) << size;
  }
}

TEST(TokenShard, NoDamageMakesItReadOutsideItsFiles) {
  const TempFolder folder;
  const auto prefix = write_golden(folder);
  int opened = 0;
  for (std::uint64_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mix_key({seed, 32}));
    folder.write("g.idx", mutate(golden_index().text, rng));
    if (seed % 4 == 0) folder.write("g.bin", mutate(golden_tokens().text, rng));
    if (seed % 4 == 1) folder.write("g.bin", golden_tokens().text);
    const auto shard = TokenShard::open(prefix);
    if (!shard) {
      EXPECT_EQ(shard.error().message.find('\n'), std::string::npos);
      continue;
    }
    ++opened;
    use(*shard);
  }
  EXPECT_LT(opened, 400);
}

TEST(TokenShard, OfALargeVocabularyHasFourBytesAToken) {
  const TempFolder folder;
  EXPECT_EQ(token_type_for(65536), TokenType::kUint16);
  EXPECT_EQ(token_type_for(65537), TokenType::kInt32);
  auto writer = TokenShardWriter::create(folder.path() / "i", TokenType::kInt32);
  ASSERT_TRUE(writer);
  const std::vector<std::int32_t> tokens = {70000, 1, 2147483647};
  ASSERT_TRUE(writer->append(tokens));
  writer->end_document();
  ASSERT_TRUE(writer->finish());
  Bytes bin;
  bin.number(70000, 4).number(1, 4).number(2147483647, 4);
  EXPECT_EQ(*read_file(folder.path() / "i.bin"), bin.text);
  const auto shard = TokenShard::open(folder.path() / "i");
  ASSERT_TRUE(shard) << shard.error().message;
  EXPECT_EQ(shard->type(), TokenType::kInt32);
  EXPECT_EQ(all_tokens(*shard), tokens);
}

TEST(TokenShard, MayBeEmpty) {
  const TempFolder folder;
  auto writer = TokenShardWriter::create(folder.path() / "e");
  ASSERT_TRUE(writer);
  ASSERT_TRUE(writer->finish());
  const auto shard = TokenShard::open(folder.path() / "e");
  ASSERT_TRUE(shard) << shard.error().message;
  EXPECT_EQ(shard->documents(), 0);
  EXPECT_EQ(shard->tokens(), 0);
}

TEST(TokenShard, ReadingBehindTheEndIsABug) {
  const TempFolder folder;
  const auto shard = TokenShard::open(write_golden(folder));
  std::vector<std::int32_t> two(2);
  EXPECT_THROW(shard->read(3, two), CheckFailure);
  EXPECT_THROW(shard->read(-1, two), CheckFailure);
  EXPECT_THROW((void)shard->document(2), CheckFailure);
}

TEST(TokenShardWriter, LeavesNothingBehindWhenDroppedOrStopped) {
  const TempFolder folder;
  {
    auto writer = TokenShardWriter::create(folder.path() / "d");
    ASSERT_TRUE(writer);
    ASSERT_TRUE(writer->append(std::vector<std::int32_t>{1}));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_FALSE(TokenShardWriter::create(folder.path() / "no" / "folder"));
}

}  // namespace
}  // namespace dynmo::data
