// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/split_pattern_impl.h"
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <limits>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"

namespace dynmo::data {
namespace {

// White space as Unicode and Oniguruma have it. PCRE2's \s has U+180E too.
constexpr std::string_view kSpaceClass = R"(\t-\r\x{85}\p{Z})";

bool is_alnum(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }

// Translates one pattern from left to right.
class Translation {
 public:
  explicit Translation(std::string_view pattern) : rest_(pattern), size_(pattern.size()) {}

  Expected<std::string> run() {
    groups_.push_back({});
    while (!rest_.empty()) {
      DYNMO_TRY(in_class_ ? class_item() : item());
    }
    if (in_class_ || groups_.size() > 1) return refused("an end within a group or a class");
    return std::move(made_);
  }

 private:
  enum class Last { kNothing, kAtom, kGroup, kQuantifier };
  struct Group {
    bool any_case = false;
    bool repeats = false;  // holds a quantifier without an upper bound
    std::string letters;   // of a group that ignores case
  };

  [[nodiscard]] Error refused(std::string_view what) const {
    return make_error(ErrorCode::kBadInput, "{} at byte {}, which is not read here", what,
                      size_ - rest_.size());
  }
  bool skip(std::string_view text) {
    if (!rest_.starts_with(text)) return false;
    rest_.remove_prefix(text.size());
    return true;
  }
  void copy(std::size_t bytes) {
    made_ += rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
  }

  // Copies an escape that means one character or a class of them.
  Expected<void> escape() {
    const char kind = rest_.size() > 1 ? rest_[1] : '\0';
    escape_is_class_ = true;
    const bool is_class = kind == 's' || kind == 'd' || kind == 'p' || kind == 'P';
    if (in_class_ && is_class && made_.ends_with('-')) return refused("a range up to a class");
    if (kind == 's' || (kind == 'S' && !in_class_)) {
      made_ += in_class_ ? std::string(kSpaceClass)
                         : fmt::format("[{}{}]", kind == 'S' ? "^" : "", kSpaceClass);
      rest_.remove_prefix(2);
      return {};
    }
    if (kind == 'd') {
      made_ += "\\p{Nd}";
      rest_.remove_prefix(2);
      return {};
    }
    if (kind == 'p' || kind == 'P') {
      const std::size_t end = rest_.find('}');
      const std::string_view name =
          rest_.size() > 3 && rest_[2] == '{' && end != std::string_view::npos
              ? rest_.substr(3, end - 3)
              : "";
      static constexpr std::array<std::string_view, 37> kCategories = {
          "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd", "Nl",
          "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk",
          "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Cn", "Co", "Cs"};
      if (std::ranges::find(kCategories, name) == kCategories.end()) {
        return refused("a property other than a general category");
      }
      copy(end + 1);
      return {};
    }
    escape_is_class_ = false;
    const bool sign = kind > ' ' && kind < 0x7F && !is_alnum(kind);
    if (kind != 'r' && kind != 'n' && kind != 't' && !sign) {
      return refused(fmt::format("'\\{}'", is_alnum(kind) ? std::string(1, kind) : ""));
    }
    copy(2);
    return {};
  }

  Expected<void> class_item() {
    if (rest_.front() == ']' && !class_is_empty_) {
      in_class_ = false;
      last_ = Last::kAtom;
      copy(1);
      return {};
    }
    const bool behind_class = !class_is_empty_ && escape_is_class_;
    if (rest_.front() == '[' || rest_.front() == ']' || rest_.starts_with("&&") ||
        (rest_.front() == '-' && behind_class && !rest_.starts_with("-]"))) {
      return refused(fmt::format("'{}' in a class", rest_.front()));
    }
    class_is_empty_ = false;
    if (rest_.front() == '\\') return escape();
    escape_is_class_ = false;
    copy(1);
    return {};
  }

  Expected<void> item() {
    const char c = rest_.front();
    Group& group = groups_.back();
    if (c == '(') return open_group();
    if (c == ')') {
      if (groups_.size() == 1) return refused("')' without '('");
      if (!same_case(group.letters)) return refused("a group for any case whose letters may fold");
      group_repeats_ = group.repeats;
      groups_.pop_back();
      groups_.back().repeats |= group_repeats_;
      last_ = Last::kGroup;
      copy(1);
      return {};
    }
    if (c == '*' || c == '+' || c == '?' || c == '{') return quantifier();
    if (c == '|') {
      last_ = Last::kNothing;
      group.letters += ' ';
      copy(1);
      return {};
    }
    if (c == '.' || c == '^' || c == '$' || c == ']' || c == '}') {
      return refused(fmt::format("'{}'", c));
    }
    last_ = Last::kAtom;
    const bool plain = is_alnum(c) || c == '\'' || c == ' ';
    if (group.any_case && !plain) return refused("a group for any case with more than letters");
    if (c == '[') {
      in_class_ = class_is_empty_ = true;
      copy(rest_.starts_with("[^") ? 2 : 1);
      return {};
    }
    if (c == '\\') return escape();
    group.letters += c;
    copy(1);
    while (!rest_.empty() && (rest_.front() & 0xC0) == 0x80) copy(1);
    return {};
  }

  Expected<void> open_group() {
    if (groups_.back().any_case) return refused("a group within one for any case");
    Group group;
    if (skip("(?:") || !rest_.starts_with("(?")) {
      skip("(");
      made_ += "(?:";
    } else if (skip("(?i:")) {
      group.any_case = true;
      made_ += "(?i:";
    } else if (rest_.starts_with("(?!") || rest_.starts_with("(?=")) {
      copy(3);
    } else {
      return refused(fmt::format("'{}'", rest_.size() > 2 && is_alnum(rest_[2]) ? "(?" : "("));
    }
    last_ = Last::kNothing;
    groups_.push_back(std::move(group));
    return {};
  }

  Expected<void> quantifier() {
    if (last_ == Last::kNothing || last_ == Last::kQuantifier) {
      return refused("a quantifier of nothing");
    }
    if (groups_.back().any_case) return refused("a repetition within a group for any case");
    std::size_t size = 1;
    bool bounded = rest_.front() == '?';
    const bool range = rest_.front() == '{';
    if (range) {
      const std::size_t end = rest_.find('}');
      const std::string_view inside = end == std::string_view::npos ? "" : rest_.substr(1, end - 1);
      const std::size_t comma = inside.find(',');
      const auto digits = [](std::string_view text) {
        return !text.empty() && text.size() <= 3 &&
               text.find_first_not_of("0123456789") == std::string_view::npos;
      };
      bounded = comma == std::string_view::npos || comma + 1 < inside.size();
      if (!digits(inside.substr(0, comma)) ||
          (bounded && comma != std::string_view::npos && !digits(inside.substr(comma + 1)))) {
        return refused("'{'");
      }
      size = end + 1;
    }
    if (last_ == Last::kGroup && group_repeats_ && (!bounded || range)) {
      return refused("a repeated group with a repetition in it");
    }
    copy(size);
    if (!rest_.empty() && rest_.front() == '+' && range) return refused("'+' behind '}'");
    if (!rest_.empty() && (rest_.front() == '+' || rest_.front() == '?')) copy(1);
    if (!bounded) groups_.back().repeats = true;
    last_ = Last::kQuantifier;
    return {};
  }

  // Returns whether PCRE2 and Oniguruma match `letters` alike. In a group that ignores case they do
  // not if letters fold to one character, as "ss" does.
  [[nodiscard]] bool same_case(std::string letters) const {
    if (!groups_.back().any_case) return true;
    std::ranges::transform(letters, letters.begin(),
                           [](unsigned char c) { return std::tolower(c); });
    return letters.find('f') == std::string::npos && letters.find("ss") == std::string::npos &&
           letters.find("st") == std::string::npos;
  }

  std::string_view rest_;
  std::size_t size_;
  std::string made_;
  std::vector<Group> groups_;
  Last last_ = Last::kNothing;
  bool group_repeats_ = false;  // of the group that was closed last
  bool in_class_ = false;
  bool class_is_empty_ = false;
  bool escape_is_class_ = false;  // the last escape
};

std::string message_of(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return {text.begin(), std::ranges::find(text, PCRE2_UCHAR{0})};
}

PCRE2_SPTR units(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

}  // namespace

Expected<std::string> translate_pattern(std::string_view pattern) {
  return Translation(pattern).run();
}

struct SplitPattern::Code {
  explicit Code(pcre2_code* compiled)
      : code(compiled), jit(pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE) == 0) {}
  ~Code() { pcre2_code_free(code); }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;

  pcre2_code* code;
  bool jit;
};

struct SplitPattern::State::Memory {
  Memory()
      : match(pcre2_match_data_create(1, nullptr)), context(pcre2_match_context_create(nullptr)) {
    DYNMO_CHECK(match != nullptr && context != nullptr, "memory for PCRE2, got none");
    // The patterns take polynomial time, which may be many steps for a long text.
    pcre2_set_match_limit(context, std::numeric_limits<std::uint32_t>::max());
    pcre2_set_depth_limit(context, std::numeric_limits<std::uint32_t>::max());
  }
  ~Memory() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(match);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  pcre2_match_data* match;
  pcre2_match_context* context;
  pcre2_jit_stack* stack = nullptr;  // for a match that needs more than the default 32 KiB
};

SplitPattern::State::State() : memory_(std::make_unique<Memory>()) {}
SplitPattern::State::~State() = default;
SplitPattern::State::State(State&& other) noexcept = default;
SplitPattern::State& SplitPattern::State::operator=(State&& other) noexcept = default;

Expected<SplitPattern> SplitPattern::compile(std::string_view pattern) {
  DYNMO_ASSIGN(const std::string translated, translate_pattern(pattern));
  int code = 0;
  std::size_t offset = 0;
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  DYNMO_CHECK(context != nullptr, "memory for PCRE2, got none");
  pcre2_set_parens_nest_limit(context, 32);
  pcre2_code* compiled = pcre2_compile(units(translated), translated.size(), PCRE2_UTF | PCRE2_UCP,
                                       &code, &offset, context);
  pcre2_compile_context_free(context);
  if (compiled == nullptr) {
    return make_error(ErrorCode::kBadInput, "a fault that PCRE2 calls '{}'", message_of(code));
  }
  SplitPattern made;
  made.code_ = std::make_shared<const Code>(compiled);
  std::uint32_t empty = 0;
  pcre2_pattern_info(compiled, PCRE2_INFO_MATCHEMPTY, &empty);
  if (empty != 0) {
    return make_error(ErrorCode::kBadInput, "a match of the empty text, which is not read here");
  }
  return made;
}

void SplitPattern::split(std::string_view text, State& state,
                         const std::function<void(std::string_view)>& take) const {
  State::Memory& memory = *state.memory_;
  const PCRE2_SIZE* range = pcre2_get_ovector_pointer(memory.match);
  const auto match = [&](std::size_t from) {
    return code_->jit ? pcre2_jit_match(code_->code, units(text), text.size(), from, 0,
                                        memory.match, memory.context)
                      : pcre2_match(code_->code, units(text), text.size(), from, PCRE2_NO_UTF_CHECK,
                                    memory.match, memory.context);
  };
  for (std::size_t done = 0; done < text.size();) {
    int found = match(done);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT && memory.stack == nullptr) {
      memory.stack = pcre2_jit_stack_create(std::size_t{1} << 15, std::size_t{1} << 28, nullptr);
      pcre2_jit_stack_assign(memory.context, nullptr, memory.stack);
      found = match(done);
    }
    if (found == PCRE2_ERROR_NOMATCH) return take(text.substr(done));
    DYNMO_CHECK(found >= 0, "PCRE2 to match, got {}", message_of(found));
    const std::size_t begin = range[0];
    const std::size_t end = range[1];
    if (begin > done) take(text.substr(done, begin - done));
    take(text.substr(begin, end - begin));
    done = end;
  }
}

}  // namespace dynmo::data
