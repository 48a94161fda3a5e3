// SPDX-License-Identifier: Apache-2.0
#pragma once

// A value, or an `Error` that a correct caller has an `if` for. Examples are bad input, no feasible
// plan, a lost peer. Bugs are `DYNMO_CHECK`s (check.h), not `Error`s. Members have the names of
// C++23's std::expected, so that this class can become it.

#include <fmt/format.h>

#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace dynmo {

// Each code has one exit code of the command line (`exit_code`).
enum class ErrorCode {
  kBadInput,      // flags, config, files: the user can correct it
  kInfeasible,    // no plan fits memory or ranks
  kNoCheckpoint,  // nothing on disk that verifies
  kPeerLost,      // a rank was lost, or does not answer
  kInterrupted,   // Ctrl-C or SIGTERM
  kInternal,      // an internal error that was caught before harm
};

// Returns the documented exit code: 1 internal, 2 bad input, 3 infeasible, 4 no checkpoint, 5 ranks
// lost, 130 interrupted.
[[nodiscard]] int exit_code(ErrorCode code);

struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;  // what was given, what was wanted, what to change; one line

  friend bool operator==(const Error&, const Error&) = default;
};

namespace internal {
// Replaces line ends and other control characters, which may come from a file, by spaces.
[[nodiscard]] std::string one_line(std::string text);
}  // namespace internal

template <typename... Args>
[[nodiscard]] Error make_error(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  return Error{code, internal::one_line(fmt::format(format, std::forward<Args>(args)...))};
}

namespace internal {
// Throws CheckFailure, because reading the wrong half of an Expected is a bug.
[[noreturn]] void throw_bad_access(const Error* error);
}  // namespace internal

template <typename T>
class [[nodiscard]] Expected {
 public:
  Expected(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT
  Expected(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT

  [[nodiscard]] bool has_value() const { return state_.index() == 0; }
  explicit operator bool() const { return has_value(); }

  [[nodiscard]] T& value() & { return require(), std::get<0>(state_); }
  [[nodiscard]] const T& value() const& { return require(), std::get<0>(state_); }
  [[nodiscard]] T&& value() && { return require(), std::get<0>(std::move(state_)); }
  [[nodiscard]] const Error& error() const {
    if (has_value()) internal::throw_bad_access(nullptr);
    return std::get<1>(state_);
  }

  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  void require() const {
    if (!has_value()) internal::throw_bad_access(&std::get<1>(state_));
  }
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Expected<void> {
 public:
  Expected() = default;
  Expected(Error error) : error_(std::move(error)), ok_(false) {}  // NOLINT

  [[nodiscard]] bool has_value() const { return ok_; }
  explicit operator bool() const { return ok_; }
  void value() const {
    if (!ok_) internal::throw_bad_access(&error_);
  }
  [[nodiscard]] const Error& error() const {
    if (ok_) internal::throw_bad_access(nullptr);
    return error_;
  }

 private:
  Error error_;
  bool ok_ = true;
};

// Returns the error for an exception. The code is kBadInput for causes that the user can change:
// too little memory (also in libtorch), no more threads, a refused path. Otherwise it is kInternal
// with the first line of the exception's text.
[[nodiscard]] Error error_of(const std::exception& fault);

}  // namespace dynmo

// Evaluates an Expected, and returns its error from the calling function if it has one.
#define DYNMO_TRY(expression)                                          \
  do {                                                                 \
    if (auto dynmo_result = (expression); !dynmo_result.has_value()) { \
      return dynmo_result.error();                                     \
    }                                                                  \
  } while (false)

#define DYNMO_CONCAT_INNER(a, b) a##b
#define DYNMO_CONCAT(a, b) DYNMO_CONCAT_INNER(a, b)

// Evaluates an Expected: `DYNMO_ASSIGN(auto x, f())` sets x to the value of f(), or returns its
// error.
#define DYNMO_ASSIGN(declaration, expression)                  \
  auto DYNMO_CONCAT(dynmo_expected_, __LINE__) = (expression); \
  if (!DYNMO_CONCAT(dynmo_expected_, __LINE__).has_value()) {  \
    return DYNMO_CONCAT(dynmo_expected_, __LINE__).error();    \
  }                                                            \
  declaration = std::move(DYNMO_CONCAT(dynmo_expected_, __LINE__)).value()
