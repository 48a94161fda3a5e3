// SPDX-License-Identifier: Apache-2.0
// An exchange as bytes: the fields in their order, numbers of eight bytes in the machine's order,
// which all ranks of a run share, and before each list its length.
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "dynmo/runtime/exchange.h"

namespace dynmo::runtime {
namespace {

// Calls `archive` with all fields of an exchange.
template <typename Archive, typename Self>
void all_fields(Archive& archive, Self& exchanged) {
  archive(exchanged.layers);
  archive(exchanged.squared_norms);
  archive(exchanged.figures);
  archive(exchanged.losses);
  archive(exchanged.rows);
  archive(exchanged.busy_s);
  archive(exchanged.stats.overhead.overhead_s);
  archive(exchanged.stats.overhead.action_s);
  archive(exchanged.stats.overhead.message_s);
  archive(exchanged.stats.overhead.reduction_bytes_per_s);
  archive(exchanged.stats.plan_s);
  archive(exchanged.stats.migrate_s);
  archive(exchanged.asked);
  archive(exchanged.refused);
}

template <typename Archive, typename Self>
void sample_fields(Archive& archive, Self& sample) {
  archive(sample.time.forward_s);
  archive(sample.time.input_gradient_s);
  archive(sample.time.weight_gradient_s);
  archive(sample.update_s);
  archive(sample.stash_bytes.value);
  archive(sample.boundary_bytes.value);
}

class Writer {
 public:
  void operator()(std::int64_t number) {
    const std::size_t before = bytes_.size();
    bytes_.resize(before + sizeof number);
    std::memcpy(bytes_.data() + before, &number, sizeof number);
  }
  void operator()(double number) { (*this)(std::bit_cast<std::int64_t>(number)); }
  void operator()(bool yes) { (*this)(std::int64_t{yes}); }
  void operator()(const std::optional<double>& number) {
    (*this)(number.has_value());
    (*this)(number.value_or(0));
  }
  void operator()(const cost::LayerSample& sample) { sample_fields(*this, sample); }
  template <typename T>
  void operator()(const std::vector<T>& list) {
    (*this)(std::int64_t{std::ssize(list)});
    for (const T& each : list) (*this)(each);
  }

  [[nodiscard]] std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads the fields. After the first fault all numbers are 0.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}

  void operator()(std::int64_t& number) {
    number = 0;
    if (left_.size() < sizeof number) return fail();
    std::memcpy(&number, left_.data(), sizeof number);
    left_.remove_prefix(sizeof number);
  }
  void operator()(double& number) {
    std::int64_t bits = 0;
    (*this)(bits);
    number = std::bit_cast<double>(bits);
  }
  void operator()(bool& yes) {
    std::int64_t number = 0;
    (*this)(number);
    if (number != 0 && number != 1) fail();
    yes = number == 1;
  }
  void operator()(std::optional<double>& number) {
    bool there = false;
    (*this)(there);
    double value = 0;
    (*this)(value);
    number = there ? std::optional(value) : std::nullopt;
  }
  void operator()(cost::LayerSample& sample) { sample_fields(*this, sample); }
  template <typename T>
  void operator()(std::vector<T>& list) {
    std::int64_t length = 0;
    (*this)(length);
    // Each element takes at least eight bytes.
    if (length < 0 || static_cast<std::uint64_t>(length) > left_.size() / 8) return fail();
    list.resize(static_cast<std::size_t>(length));
    for (T& each : list) (*this)(each);
  }

  [[nodiscard]] bool complete() const { return !failed_ && left_.empty(); }

 private:
  void fail() {
    failed_ = true;
    left_ = {};
  }

  std::string_view left_;
  bool failed_ = false;
};

}  // namespace

bool fits(const Exchange& exchanged, const model::Model& model, const transport::Axes& axes) {
  const std::size_t layers = model.size();
  const bool rows = exchanged.rows.size() == (model::drops_rows(model) ? layers : 0);
  bool figures = exchanged.figures.size() == layers;
  for (std::size_t i = 0; figures && i < layers; ++i) {
    figures = exchanged.figures[i].size() == model[i]->figures().size();
  }
  return exchanged.layers.size() == layers && exchanged.squared_norms.size() == layers && figures &&
         rows && !exchanged.losses.empty() && std::ssize(exchanged.busy_s) == axes.ranks();
}

std::string pack(const Exchange& exchanged) {
  Writer writer;
  all_fields(writer, exchanged);
  return writer.take();
}

Expected<Exchange> parse_exchange(std::string_view bytes) {
  Exchange exchanged;
  Reader reader(bytes);
  all_fields(reader, exchanged);
  if (reader.complete()) return exchanged;
  return make_error(ErrorCode::kBadInput, "{} bytes that are no exchange of a step", bytes.size());
}

}  // namespace dynmo::runtime
