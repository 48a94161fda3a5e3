// SPDX-License-Identifier: Apache-2.0
// The only file that knows utf8proc.
#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "dynmo/core/check.h"
#include "dynmo/data/tokenizer_parts_impl.h"

namespace dynmo::data {
namespace {

// Returns whether a byte of UTF-8 begins a character below U+0300, or continues a character. Those
// below U+0300 compose with nothing before them, and are their own normal forms.
bool stays(char byte) { return static_cast<unsigned char>(byte) < 0xCC; }

struct Free {
  void operator()(utf8proc_uint8_t* made) const { std::free(made); }
};

}  // namespace

std::string_view normal_form_c(std::string_view text, std::string& room) {
  if (std::ranges::all_of(text, stays)) return text;
  utf8proc_uint8_t* made = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), std::ssize(text), &made,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, Free> owner(made);
  DYNMO_CHECK(size >= 0, "UTF-8 that utf8proc takes, got {}", utf8proc_errmsg(size));
  room.assign(reinterpret_cast<const char*>(made), static_cast<std::size_t>(size));
  return room;
}

}  // namespace dynmo::data
