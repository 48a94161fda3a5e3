// SPDX-License-Identifier: Apache-2.0
#include "dynmo/checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <limits>

#include "dynmo/core/check.h"
#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "tests/support/mutate.h"
#include "tests/support/samples.h"
#include "tests/support/temp_folder.h"

namespace dynmo::checkpoint {
namespace {

std::span<const std::byte> bytes_of_text(std::string_view text) {
  return std::as_bytes(std::span(text));
}

TensorView tensor(std::string name, DType dtype, std::vector<std::int64_t> shape,
                  std::string_view bytes) {
  return {std::move(name), dtype, std::move(shape), bytes_of_text(bytes)};
}

// A file from its header and data, without the code under test.
std::string file_of(std::string_view header, std::string_view data = "") {
  std::string file(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return file.append(header).append(data);
}

// Made by version 0.8.0 of the reference implementation, from the tensors of `reference_tensors`.
std::string reference_file() {
  using namespace std::string_view_literals;
  return std::string(
      "p\x01\0\0\0\0\0\0"
      "{\"__metadata__\":{\"k\":\"v\"},\"\xc3\xa9\\\"\\n\x7f\":{\"dtype\":\"I64\",\"shape\":[0,3],"
      "\"data_offsets\":[0,0]},\"a2\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
      "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]},"
      "\"i\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[12,16]},"
      "\"z\":{\"dtype\":\"BF16\",\"shape\":[1,2],\"data_offsets\":[16,20]},"
      "\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[20,23]}}       "
      "\0\0@@\0\0\x80?\0\0\0@\x01\0\0\0\x01\x02\x03\x04"
      "abc"sv);
}

std::vector<TensorView> reference_tensors() {
  using namespace std::string_view_literals;
  return {tensor("b", DType::kF32, {2}, "\0\0\x80?\0\0\0@"sv),
          tensor("a", DType::kU8, {3}, "abc"),
          tensor("\xc3\xa9\"\n\x7f", DType::kI64, {0, 3}, ""),
          tensor("a2", DType::kF32, {}, "\0\0@@"sv),
          tensor("z", DType::kBF16, {1, 2}, "\x01\x02\x03\x04"),
          tensor("i", DType::kI32, {1}, "\x01\0\0\0"sv)};
}

void expect_same(const TensorView& a, const TensorView& b) {
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_EQ(a.shape, b.shape);
  EXPECT_TRUE(std::equal(a.bytes.begin(), a.bytes.end(), b.bytes.begin(), b.bytes.end()));
}

std::string why(const std::string& file) {
  const auto parsed = Safetensors::parse(bytes_of_text(file), "x");
  return parsed ? "fine" : parsed.error().message;
}

TEST(Safetensors, WritesTheBytesOfTheReferenceImplementation) {
  const TempFolder folder;
  const auto path = folder.path() / "x.safetensors";
  const auto written = write_safetensors(path, reference_tensors(), {{"k", "v"}});
  ASSERT_TRUE(written) << written.error().message;
  EXPECT_EQ(*read_file(path), reference_file());
  EXPECT_EQ(written->bytes, Bytes{399});
  EXPECT_EQ(written->digest, digest_of(reference_file()));
}

TEST(Safetensors, ReadsAFileOfTheReferenceImplementation) {
  const TempFolder folder;
  const auto file = Safetensors::open(folder.write("x.safetensors", reference_file()));
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->tensors().size(), 6U);
  EXPECT_EQ(file->metadata(), (Metadata{{"k", "v"}}));
  for (const TensorView& expected : reference_tensors()) {
    const TensorView* found = file->find(expected.name);
    ASSERT_NE(found, nullptr) << expected.name;
    expect_same(*found, expected);
  }
  EXPECT_EQ(file->find("c"), nullptr);
}

TEST(Safetensors, RandomTensorsOfEveryTypeComeBack) {
  const TempFolder folder;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Rng rng(mix_key({seed, 41}));
    std::vector<std::string> contents;
    std::vector<TensorView> tensors;
    contents.reserve(64);
    const auto count = rng.below(22);
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto dtype = static_cast<DType>((seed + i) % 22);
      std::vector<std::int64_t> shape(rng.below(4));
      for (auto& size : shape) size = static_cast<std::int64_t>(rng.below(5));
      shape.push_back(4);  // a whole number of bytes of every type
      std::string& content = contents.emplace_back(*bytes_of(dtype, shape), '\0');
      for (char& c : content) c = static_cast<char>(rng.below(256));
      tensors.push_back(tensor(fmt::format("t{}", i), dtype, shape, content));
    }
    Metadata metadata;
    for (std::uint64_t i = rng.below(3); i > 0; --i) metadata[fmt::format("k{}", i)] = "v\t\"é";
    const auto path = folder.path() / "r";
    const auto written = write_safetensors(path, tensors, metadata);
    ASSERT_TRUE(written) << "seed " << seed;
    const auto file = Safetensors::open(path);
    ASSERT_TRUE(file) << "seed " << seed << ": " << file.error().message;
    ASSERT_EQ(file->tensors().size(), tensors.size());
    EXPECT_EQ(file->metadata(), metadata);
    EXPECT_EQ(digest_of(file->bytes()), written->digest);
    // Sorted by alignment, the data area begins at a multiple of 8, every tensor at one of its
    // size.
    for (const TensorView& expected : tensors) {
      expect_same(*file->find(expected.name), expected);
      const auto offset = file->find(expected.name)->bytes.data() - file->bytes().data();
      EXPECT_EQ(offset * 8 % (bits(expected.dtype) < 8 ? 8 : bits(expected.dtype)), 0);
    }
  }
}

TEST(Safetensors, AcceptsWhatTheFormatAllows) {
  EXPECT_EQ(why(file_of("{}")), "fine");
  EXPECT_EQ(why(file_of("{}      ")), "fine");
  EXPECT_EQ(why(file_of(R"({"__metadata__":{}})")), "fine");
  // Any order of the header, a tensor of no elements between two others.
  EXPECT_EQ(why(file_of(R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]},)"
                        R"("e":{"data_offsets":[2,2],"shape":[7,0],"dtype":"F64"},)"
                        R"("a":{"dtype":"I8","shape":[2,1],"data_offsets":[0,2]}})",
                        "abc")),
            "fine");
  EXPECT_EQ(why(file_of(R"({"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}})", "ab")), "fine");
}

TEST(Safetensors, RefusesWhatBreaksARuleAndSaysWhich) {
  const auto one = [](std::string_view fields, std::string_view data = "abcd") {
    return why(file_of(fmt::format(R"({{"a":{{{}}}}})", fields), data));
  };
  EXPECT_EQ(why("1234567"),
            "x: 7 bytes are there, a safetensors file has at least the 8 of its header's length");
  EXPECT_EQ(why(std::string("\x03\0\0\0\0\0\0\0{}", 10)),
            "x: truncated: 10 bytes are there, its header alone takes 11");
  EXPECT_EQ(
      why(std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10)),
      "x: not a safetensors file: its header would have 18446744073709551615 bytes, the format "
      "allows 100000000");
  EXPECT_EQ(why(file_of("")), "x: the header does not begin with {");
  EXPECT_EQ(why(file_of(" {}")), "x: the header does not begin with {");
  EXPECT_EQ(why(file_of("{\"a\":")), "x: the header is not JSON");
  EXPECT_EQ(why(file_of("{}", "abc")), "x: the tensors end at byte 0 of 3");
  EXPECT_EQ(why(file_of(R"({"__metadata__":{"a":1}})")),
            "x: __metadata__ holds something other than strings");
  EXPECT_EQ(why(file_of(R"({"__metadata__":[]})")), "x: __metadata__ is not an object");
  const std::string u8 = R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_EQ(why(file_of(fmt::format(R"({{"a":{},"a":{}}})", u8, u8), "a")),
            "x: the header has \"a\" twice");
  EXPECT_EQ(why(file_of(R"({"__metadata__":{"":"1","":"2"}})")), "x: the header has \"\" twice");
  EXPECT_EQ(one(R"("dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4])"),
            "x: the header has \"dtype\" twice");
  EXPECT_EQ(one(R"("dtype":"U8","shape":[4])"),
            "x: tensor \"a\" does not have dtype, shape and data_offsets and nothing else");
  EXPECT_EQ(one(R"("dtype":"U8","shape":[4],"data_offsets":[0,4],"extra":1)"),
            "x: tensor \"a\" does not have dtype, shape and data_offsets and nothing else");
  EXPECT_EQ(one(R"("dtype":"U9","shape":[4],"data_offsets":[0,4])"),
            "x: tensor \"a\" is of an unknown dtype");
  for (const char* shape : {"[-4]", "[4.0]", "[9223372036854775808]", "4", "[\"4\"]", "[null]"}) {
    EXPECT_EQ(one(fmt::format(R"("dtype":"U8","shape":{},"data_offsets":[0,4])", shape)),
              "x: tensor \"a\" has a shape that is not of whole numbers");
  }
  EXPECT_EQ(one(R"("dtype":"U8","shape":[4],"data_offsets":[0,2,4])"),
            "x: tensor \"a\" has data_offsets that are not two numbers");
  EXPECT_EQ(one(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4])"),
            "x: tensor \"a\" has a shape that overflows or is no whole number of bytes");
  EXPECT_EQ(one(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])", ""),
            "x: tensor \"a\" has a shape that overflows or is no whole number of bytes");
  EXPECT_EQ(one(R"("dtype":"F4","shape":[3],"data_offsets":[0,1])", "a"),
            "x: tensor \"a\" has a shape that overflows or is no whole number of bytes");
  EXPECT_EQ(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"),
            "x: tensor \"a\" needs 8 bytes, its data_offsets are 0 and 4");
  EXPECT_EQ(one(R"("dtype":"U8","shape":[4],"data_offsets":[4,0])"),
            "x: tensor \"a\" needs 4 bytes, its data_offsets are 4 and 0");
  EXPECT_EQ(one(R"("dtype":"U8","shape":[5],"data_offsets":[0,5])"),
            "x: truncated: 65 bytes are there, wanted 66 by its header");
  EXPECT_EQ(one(R"("dtype":"U8","shape":[3],"data_offsets":[1,4])"),
            "x: tensor \"a\" has bytes 1 to 4 of 4, wanted it to begin at 0");
  const auto two = [](std::string_view first, std::string_view second) {
    return why(file_of(
        fmt::format(R"({{"a":{{"dtype":"U8",{}}},"b":{{"dtype":"U8",{}}}}})", first, second),
        "abcd"));
  };
  EXPECT_EQ(two(R"("shape":[1],"data_offsets":[0,1])", R"("shape":[2],"data_offsets":[2,4])"),
            "x: tensor \"b\" has bytes 2 to 4 of 4, wanted it to begin at 1");
  EXPECT_EQ(two(R"("shape":[3],"data_offsets":[0,3])", R"("shape":[2],"data_offsets":[2,4])"),
            "x: tensor \"b\" has bytes 2 to 4 of 4, wanted it to begin at 3");
}

TEST(Safetensors, AFileCutAnywhereIsCalledTruncated) {
  const std::string whole = file_of(R"({"b":{"dtype":"U8","shape":[3],"data_offsets":[2,5]},)"
                                    R"("a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}})",
                                    "abcde");
  ASSERT_EQ(why(whole), "fine");
  for (std::size_t size = 8; size < whole.size(); ++size) {
    const std::string said = why(whole.substr(0, size));
    EXPECT_NE(said.find(fmt::format("truncated: {} bytes are there, ", size)), std::string::npos)
        << said;
  }
}

TEST(Safetensors, AFileOfAnotherFormatIsNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
       "a Git LFS pointer, which stands for the file: get that by `git lfs pull`"},
      {"<!DOCTYPE html><html></html>", "an HTML page"},
      {"PK\x03\x04 and more of it", "a zip archive, such as torch.save writes"},
      {"\x80\x02}q\x01(X\x05 and more", "a pickle, such as torch.save writes"},
      {std::string("GGUF\x03\0\0\0 and more", 17), "a GGUF file"},
      {"\x93NUMPY and more", "a NumPy file"},
      {"\x1f\x8b", "compressed by gzip"}};
  for (const auto& [bytes, name] : cases) {
    EXPECT_TRUE(why(bytes).starts_with("x: not a safetensors file but " + name)) << why(bytes);
  }
}

TEST(Safetensors, RefusesToWriteWhatItCouldNotRead) {
  const TempFolder folder;
  const auto path = folder.path() / "w";
  const std::vector<TensorView> twice = {tensor("a", DType::kU8, {1}, "a"),
                                         tensor("a", DType::kI8, {1}, "b")};
  EXPECT_EQ(write_safetensors(path, twice).error().message,
            path.string() + ": two tensors are called 'a'");
  EXPECT_FALSE(write_safetensors(path, std::vector{tensor("__metadata__", DType::kU8, {1}, "a")}));
  EXPECT_FALSE(write_safetensors(path, std::vector{tensor("\xff", DType::kU8, {1}, "a")}));
  EXPECT_FALSE(write_safetensors(path, {}, {{"k", "\xff"}}));
  EXPECT_THROW((void)write_safetensors(path, std::vector{tensor("a", DType::kF32, {2}, "abcd")}),
               CheckFailure);
  EXPECT_THROW((void)write_safetensors(path, std::vector{tensor("a", DType::kU8, {-1}, "")}),
               CheckFailure);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_FALSE(write_safetensors(folder.path() / "no" / "w", {}));
}

TEST(Safetensors, TruncatedAtAnyByteIsAnError) {
  const std::string file = reference_file();
  for (std::size_t size = 0; size < file.size(); ++size) {
    // A copy of exactly this size, so that asan sees a read behind it.
    const std::string cut = file.substr(0, size);
    EXPECT_FALSE(Safetensors::parse(bytes_of_text(cut), "x")) << size;
  }
}

TEST(Safetensors, NoDamageMakesItReadOutsideTheFile) {
  int parsed = 0;
  for (std::uint64_t seed = 0; seed < samples(20000U); ++seed) {
    Rng rng(mix_key({seed, 42}));
    const std::string damaged = mutate(reference_file(), rng);
    const std::vector<char> exact(damaged.begin(), damaged.end());
    const auto bytes = std::as_bytes(std::span(exact));
    const auto file = Safetensors::parse(bytes, "x");
    if (!file) {
      EXPECT_EQ(file.error().message.find('\n'), std::string::npos) << "seed " << seed;
      continue;
    }
    ++parsed;
    std::size_t total = 0;
    for (const TensorView& tensor : file->tensors()) {
      EXPECT_EQ(tensor.bytes.size(), bytes_of(tensor.dtype, tensor.shape)) << "seed " << seed;
      total += tensor.bytes.size();
      (void)digest_of(tensor.bytes);
    }
    EXPECT_LT(total, exact.size()) << "seed " << seed;
  }
  EXPECT_GT(parsed, samples(100)) << "the mutations are too coarse to get past the header";
}

// In quadratic time it would not end before the test is given up.
TEST(Safetensors, ReadsAHeaderOfManyTensors) {
  std::string header = "{";
  for (int i = 0; i < samples(100000); ++i) {
    header += fmt::format(R"({}"t{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
                          i == 0 ? "" : ",", i);
  }
  EXPECT_EQ(why(file_of(header + "}")), "fine");
}

}  // namespace
}  // namespace dynmo::checkpoint
