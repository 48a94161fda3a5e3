// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "dynmo/data/added_tokens_impl.h"

namespace dynmo::data {
namespace {

// The white space of Unicode.
constexpr std::array<std::string_view, 25> kWhiteSpace = {
    "\t",           "\n",           "\v",           "\f",           "\r",           " ",
    "\xC2\x85",     "\xC2\xA0",     "\xE1\x9A\x80", "\xE2\x80\x80", "\xE2\x80\x81", "\xE2\x80\x82",
    "\xE2\x80\x83", "\xE2\x80\x84", "\xE2\x80\x85", "\xE2\x80\x86", "\xE2\x80\x87", "\xE2\x80\x88",
    "\xE2\x80\x89", "\xE2\x80\x8A", "\xE2\x80\xA8", "\xE2\x80\xA9", "\xE2\x80\xAF", "\xE2\x81\x9F",
    "\xE3\x80\x80"};

std::size_t white_space_at_end(std::string_view text) {
  const std::size_t size = text.size();
  for (bool more = true; more;) {
    const auto* found =
        std::ranges::find_if(kWhiteSpace, [&](std::string_view s) { return text.ends_with(s); });
    more = found != kWhiteSpace.end();
    if (more) text.remove_suffix(found->size());
  }
  return size - text.size();
}

std::size_t white_space_at_start(std::string_view text) {
  const std::size_t size = text.size();
  for (bool more = true; more;) {
    const auto* found =
        std::ranges::find_if(kWhiteSpace, [&](std::string_view s) { return text.starts_with(s); });
    more = found != kWhiteSpace.end();
    if (more) text.remove_prefix(found->size());
  }
  return size - text.size();
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const std::string& content = tokens_[i].content;
    if (content.empty() || !by_content_.emplace(content, i).second) continue;
    auto& sizes = sizes_[static_cast<unsigned char>(content.front())];
    if (std::ranges::find(sizes, content.size()) == sizes.end()) sizes.push_back(content.size());
  }
  for (auto& sizes : sizes_) std::ranges::sort(sizes, std::greater());
}

const AddedToken* AddedTokens::at(std::string_view text, std::size_t place) const {
  for (const std::size_t size : sizes_[static_cast<unsigned char>(text[place])]) {
    if (size > text.size() - place) continue;
    const auto found = by_content_.find(text.substr(place, size));
    if (found != by_content_.end()) return &tokens_[found->second];
  }
  return nullptr;
}

void AddedTokens::split(std::string_view text,
                        const std::function<void(std::string_view)>& take_text,
                        const std::function<void(std::int32_t)>& take_token) const {
  std::size_t done = 0;
  for (std::size_t i = 0; i < text.size();) {
    const AddedToken* token = at(text, i);
    if (token == nullptr) {
      ++i;
      continue;
    }
    std::size_t begin = i;
    std::size_t end = i + token->content.size();
    i = end;
    if (token->left_strip) {
      begin = std::max(done, begin - white_space_at_end(text.substr(0, begin)));
    }
    if (token->right_strip) end += white_space_at_start(text.substr(end));
    if (begin > done) take_text(text.substr(done, begin - done));
    take_token(token->id);
    done = end;
  }
  if (done < text.size()) take_text(text.substr(done));
}

}  // namespace dynmo::data
