// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/mutate.h"

#include <array>
#include <cctype>
#include <vector>

namespace dynmo::fuzz {
namespace {

constexpr std::array<std::string_view, 48> kExtremes = {"0",
                                                        "-0",
                                                        "1",
                                                        "-1",
                                                        "2",
                                                        "1e-300",
                                                        "4.9e-324",
                                                        "0.1",
                                                        "1e6",
                                                        "1000001",
                                                        "1e15",
                                                        "1e18",
                                                        "1e300",
                                                        "-1e300",
                                                        "1e400",
                                                        "1.7976931348623157e308",
                                                        "127",
                                                        "65536",
                                                        "131072",
                                                        "1048576",
                                                        "1048577",
                                                        "2147483647",
                                                        "2147483648",
                                                        "4294967296",
                                                        "1125899906842624",
                                                        "4503599627370496",
                                                        "4611686018427387904",
                                                        "9223372036854775807",
                                                        "-9223372036854775808",
                                                        "9223372036854775808",
                                                        "18446744073709551615",
                                                        "18446744073709551616",
                                                        "NaN",
                                                        "nan",
                                                        "inf",
                                                        "-inf",
                                                        "Infinity",
                                                        "null",
                                                        "true",
                                                        "false",
                                                        "\"\"",
                                                        "\"a\"",
                                                        "\"\\u0000\"",
                                                        "[]",
                                                        "{}",
                                                        "[{}]",
                                                        "\"\xC3\xA9\"",
                                                        "1979-05-27T07:32:00Z"};

std::size_t pick(std::size_t bound, Rng& rng) { return static_cast<std::size_t>(rng.below(bound)); }

struct Span {
  std::size_t begin = 0;
  std::size_t end = 0;
  [[nodiscard]] std::size_t size() const { return end - begin; }
};

bool in_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '-' || c == '_' ||
         c == '+';
}

// Numbers, words and quoted strings.
std::vector<Span> values(std::string_view text) {
  std::vector<Span> found;
  for (std::size_t i = 0; i < text.size();) {
    std::size_t end = i;
    if (text[i] == '"') {
      const std::size_t close = text.find('"', i + 1);
      end = close == std::string_view::npos ? text.size() : close + 1;
    } else {
      while (end < text.size() && in_word(text[end])) ++end;
    }
    if (end > i) found.push_back({i, end});
    i = end > i ? end : i + 1;
  }
  return found;
}

// From a bracket to its partner, or a line where there are no brackets.
std::vector<Span> parts(std::string_view text) {
  std::vector<Span> found;
  std::vector<std::size_t> open;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '{' || text[i] == '[') open.push_back(i);
    if ((text[i] == '}' || text[i] == ']') && !open.empty()) {
      found.push_back({open.back(), i + 1});
      open.pop_back();
    }
  }
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size() - 1) + 1;
    if (end < text.size() || begin > 0) found.push_back({begin, end});
    begin = end;
  }
  return found;
}

void flip_bytes(std::string& text, Rng& rng) {
  const std::size_t at = pick(text.size(), rng);
  switch (rng.below(4)) {
    case 0:
      text[at] = static_cast<char>(text[at] ^ (1 << rng.below(8)));
      break;
    case 1:
      text.insert(at, 1, static_cast<char>(rng.below(256)));
      break;
    case 2:
      text.erase(at, 1 + pick(16, rng));
      break;
    default:
      text.resize(at);
  }
}

void change_value(std::string& text, Rng& rng) {
  const std::vector<Span> found = values(text);
  if (found.empty()) return;
  const Span at = found[pick(found.size(), rng)];
  const Span from = found[pick(found.size(), rng)];
  switch (rng.below(4)) {
    case 0:
      text.replace(at.begin, at.size(), text.substr(from.begin, from.size()));
      break;
    case 1: {  // deeper than any reader goes
      const std::size_t depth = 1 + pick(200, rng);
      const bool list = rng.below(2) == 0;
      std::string nested;
      for (std::size_t i = 0; i < depth; ++i) nested += list ? "[" : "{\"a\":";
      nested += "1" + std::string(depth, list ? ']' : '}');
      text.replace(at.begin, at.size(), nested);
      break;
    }
    default:
      text.replace(at.begin, at.size(), kExtremes[pick(kExtremes.size(), rng)]);
  }
}

void change_part(std::string& text, Rng& rng) {
  const std::vector<Span> found = parts(text);
  if (found.empty()) return;
  const Span at = found[pick(found.size(), rng)];
  const Span from = found[pick(found.size(), rng)];
  const std::string copy = text.substr(from.begin, from.size());
  switch (rng.below(4)) {
    case 0:
      text.erase(at.begin, at.size());
      break;
    case 1:
      text.insert(at.end, (copy.ends_with('\n') ? "" : ",") + copy);
      break;
    case 2:
      text.replace(at.begin, at.size(), copy);
      break;
    default:
      text.replace(at.begin, at.size(), kExtremes[pick(kExtremes.size(), rng)]);
  }
}

void splice(std::string& text, std::string_view other, Rng& rng) {
  if (other.empty()) return;
  const std::size_t from = pick(other.size(), rng);
  text.insert(pick(text.size() + 1, rng), other.substr(from, 1 + pick(64, rng)));
}

}  // namespace

std::string mutate(std::string text, std::string_view other, Rng& rng) {
  std::uint64_t edits = rng.below(2) == 0 ? 1 : 1 + rng.below(4);
  for (; edits > 0; --edits) {
    if (text.empty()) text = other.empty() ? " " : other;
    const std::uint64_t kind = rng.below(8);
    if (kind == 0) {
      splice(text, other, rng);
    } else if (kind == 1) {
      flip_bytes(text, rng);
    } else if (kind <= 3) {
      change_part(text, rng);
    } else {
      change_value(text, rng);
    }
  }
  if (text.size() > kMaxBytes) text.resize(kMaxBytes);
  return text;
}

}  // namespace dynmo::fuzz
