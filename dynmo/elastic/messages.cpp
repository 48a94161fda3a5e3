// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/messages.h"

#include <bit>
#include <concepts>
#include <type_traits>

namespace dynmo::elastic {
namespace {

// One list of fields a struct serves writing and reading: `archive(a, b, ...)`. Numbers are little
// endian of their own width, sequences begin with a number of 32 bits.

template <typename T>
constexpr bool kIsVector = false;
template <typename T>
constexpr bool kIsVector<std::vector<T>> = true;
template <typename T>
constexpr bool kIsOptional = false;
template <typename T>
constexpr bool kIsOptional<std::optional<T>> = true;

class Writer {
 public:
  template <typename... Ts>
  void operator()(Ts&... values) {
    (put(values), ...);
  }
  std::string bytes;

 private:
  template <std::integral T>
  void put(T& value) {
    auto bits = static_cast<std::uint64_t>(value);
    for (std::size_t i = 0; i < sizeof(T); ++i, bits >>= 8U) {
      bytes.push_back(static_cast<char>(bits & 0xffU));
    }
  }
  void put(bool& value) { bytes.push_back(value ? '\1' : '\0'); }
  void put(double& value) {
    auto bits = std::bit_cast<std::uint64_t>(value);
    put(bits);
  }
  void put_size(std::size_t size) {
    auto count = static_cast<std::uint32_t>(size);  // the frame limit is checked at the end
    put(count);
  }
  void put(std::string& text) {
    put_size(text.size());
    bytes += text;
  }
  template <typename T>
  void put(T& value) {
    if constexpr (std::is_enum_v<T>) {
      auto number = static_cast<std::uint8_t>(value);
      put(number);
    } else if constexpr (kIsVector<T>) {
      put_size(value.size());
      for (auto& one : value) put(one);
    } else if constexpr (kIsOptional<T>) {
      bool there = value.has_value();
      put(there);
      if (there) put(*value);
    } else {
      fields(*this, value);
    }
  }
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}
  template <typename... Ts>
  void operator()(Ts&... values) {
    (get(values), ...);
  }
  void wants(bool holds) { good_ = good_ && holds; }
  [[nodiscard]] bool good() const { return good_; }
  [[nodiscard]] bool at_end() const { return left_.empty(); }

 private:
  std::string_view take(std::size_t size) {
    if (size > left_.size()) {
      good_ = false;
      left_ = {};
      return {};
    }
    const std::string_view taken = left_.substr(0, size);
    left_.remove_prefix(size);
    return taken;
  }
  template <std::integral T>
  void get(T& value) {
    std::uint64_t bits = 0;
    unsigned shift = 0;
    for (const char byte : take(sizeof(T))) {
      bits |= std::uint64_t{static_cast<unsigned char>(byte)} << shift;
      shift += 8;
    }
    value = static_cast<T>(bits);
  }
  void get(bool& value) {
    std::uint8_t number = 0;
    get(number);
    wants(number <= 1);
    value = number == 1;
  }
  void get(double& value) {
    std::uint64_t bits = 0;
    get(bits);
    value = std::bit_cast<double>(bits);
  }
  void get(std::string& text) {
    std::uint32_t size = 0;
    get(size);
    text = take(size);
  }
  template <typename T>
  void get(T& value) {
    if constexpr (std::is_enum_v<T>) {
      std::uint8_t number = 0;
      get(number);
      wants(number <= largest(T{}));
      value = static_cast<T>(number);
    } else if constexpr (kIsVector<T>) {
      std::uint32_t size = 0;
      get(size);
      wants(size <= left_.size());  // an element has a byte at least
      for (std::uint32_t i = 0; i < size && good_; ++i) get(value.emplace_back());
    } else if constexpr (kIsOptional<T>) {
      bool there = false;
      get(there);
      if (there && good_) get(value.emplace());
    } else {
      fields(*this, value);
    }
  }
  static std::uint8_t largest(CopyKind) { return static_cast<std::uint8_t>(CopyKind::kNeighbour); }
  static std::uint8_t largest(Origin) { return static_cast<std::uint8_t>(Origin::kInitial); }

  std::string_view left_;
  bool good_ = true;
};

// Checks a value that was read.
template <typename T>
void check(Writer&, const T&) {}
// Numbers that grow by one at a time stay far from their end.
void check(Reader& reader, std::int64_t number) {
  reader.wants(number >= -1 && number < std::int64_t{1} << 62);
}
void check(Reader& reader, const Losses& losses) {
  check(reader, losses.step);
  reader.wants(losses.count >= 0 && losses.count < 1000);
}
void check(Reader& reader, const View& view) {
  check(reader, view.generation);
  for (std::size_t i = 1; i < view.members.size(); ++i) {
    reader.wants(view.members[i - 1].number < view.members[i].number);
  }
}
void check(Reader& reader, const std::vector<MemberId>& ids) {
  for (std::size_t i = 1; i < ids.size(); ++i) reader.wants(ids[i - 1] < ids[i]);
}
void check(Reader& reader, const Holding& held) {
  check(reader, held.step);
  reader.wants(held.layer.value >= 0);
}

template <typename A>
void fields(A& archive, MemberId& id) {
  archive(id.value);
}
template <typename A>
void fields(A& archive, LayerId& layer) {
  archive(layer.value);
}
template <typename A>
void fields(A& archive, Member& member) {
  archive(member.id, member.number, member.host, member.pid, member.address);
}
template <typename A>
void fields(A& archive, View& view) {
  archive(view.generation, view.members);
  check(archive, view);
}
template <typename A>
void fields(A& archive, Ballot& ballot) {
  archive(ballot.number, ballot.proposer);
  check(archive, ballot.number);
}
template <typename A>
void fields(A& archive, Losses& losses) {
  archive(losses.step, losses.count);
  check(archive, losses);
}
template <typename A>
void fields(A& archive, Standing& standing) {
  archive(standing.installed, standing.earlier, standing.attempts, standing.gone, standing.losses);
  check(archive, standing.gone);
}
template <typename A>
void fields(A& archive, Holding& held) {
  archive(held.layer, held.step, held.kind);
  check(archive, held);
}
template <typename A>
void fields(A& archive, UpdateRecord& record) {
  archive(record.step, record.exchange);
  check(archive, record.step);
}
template <typename A>
void fields(A& archive, Report& report) {
  archive(report.member, report.step, report.gradients_complete, report.updated, report.holdings,
          report.checkpoint);
  check(archive, report.step);
}
template <typename A>
void fields(A& archive, Decision& decision) {
  archive(decision.origin, decision.step, decision.finish);
  check(archive, decision.step);
}
template <typename A>
void fields(A& archive, Notice& notice) {
  archive(notice.promised, notice.in_trouble);
}
template <typename A>
void fields(A& archive, Prepare& prepare) {
  archive(prepare.ballot);
}
template <typename A>
void fields(A& archive, Refuse& refuse) {
  archive(refuse.ballot, refuse.seen);
  check(archive, refuse.seen);
}
template <typename A>
void fields(A& archive, Reported& reported) {
  archive(reported.ballot, reported.standing, reported.report);
}
template <typename A>
void fields(A& archive, Form& form) {
  archive(form.ballot, form.view, form.before, form.gone, form.losses, form.decision);
  check(archive, form.gone);
}
template <typename A>
void fields(A& archive, Out& out) {
  archive(out.ballot);
}
template <typename A>
void fields(A& archive, OutAcknowledged& acknowledged) {
  archive(acknowledged.ballot);
}
template <typename A>
void fields(A& archive, End& end) {
  archive(end.ballot, end.code, end.reason);
}

// Reads the alternative of that number.
template <std::size_t... I>
bool read_alternative(Reader& reader, std::size_t number, Message& message,
                      std::index_sequence<I...>) {
  return ((number == I && (reader(message.emplace<I>()), true)) || ...);
}

}  // namespace

Expected<std::string> encode(const Message& message) {
  Writer writer;
  auto kind = static_cast<std::uint8_t>(message.index());
  writer(kind);
  std::visit(
      [&](auto copy) {  // a writer takes what a reader fills
        writer(copy);
      },
      message);
  if (writer.bytes.size() > kFrameLimit) {
    return make_error(ErrorCode::kBadInput,
                      "a message about views and layers has {} bytes, {} are allowed: the model "
                      "has too many layers, or the run too many ranks, to change its size",
                      writer.bytes.size(), kFrameLimit);
  }
  return std::move(writer.bytes);
}

Expected<Message> decode(std::string_view bytes) {
  const auto bad = [&](const char* what) {
    return make_error(ErrorCode::kBadInput,
                      "{} bytes are no message between members of a run: {}; do all run the same "
                      "build?",
                      bytes.size(), what);
  };
  if (bytes.size() > kFrameLimit) return bad("longer than any");
  Reader reader(bytes);
  std::uint8_t kind = 0;
  reader(kind);
  Message message;
  constexpr std::size_t kKinds = std::variant_size_v<Message>;
  if (!reader.good() || kind >= kKinds) return bad("of no known kind");
  read_alternative(reader, kind, message, std::make_index_sequence<kKinds>());
  if (!reader.good()) return bad("cut off, or a value out of its range");
  if (!reader.at_end()) return bad("something follows its end");
  return message;
}

}  // namespace dynmo::elastic
