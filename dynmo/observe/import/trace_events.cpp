// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/observe/import/trace_events_impl.h"
#include "dynmo/observe/import/trace_stream_impl.h"

namespace dynmo::observe {
namespace {

// Prefix of the engine's event around a node's own event. It includes the engine's work for the
// node.
constexpr std::string_view kNode = "autograd::engine::evaluate_function: ";

bool is_kernel(std::string_view category) {
  return category == "kernel" || category == "gpu_memcpy" || category == "gpu_memset";
}

// A value of an event. Text and JSON are valid for their kinds alone.
struct Value {
  enum Kind { kAbsent, kInteger, kNumber, kText, kOther };
  Kind kind = kAbsent;
  std::int64_t integer = 0;
  double number = 0;
  std::string text;  // of kText; JSON of kOther
};

// The values that are read of an event. The names of the keys are in the same order.
enum Field {
  kPhase,
  kCategory,
  kName,
  kProcess,
  kThread,
  kStart,
  kDuration,
  kSequence,  // the first in "args"
  kForwardThread,
  kCorrelation,
  kFields,
};
constexpr std::array<std::string_view, kFields> kKeys = {
    "ph",         "cat", "name", "pid", "tid", "ts", "dur", "Sequence number", "Fwd thread id",
    "correlation"};
constexpr int kNoField = kFields;

class Collector {
 public:
  explicit Collector(std::string_view origin) : origin_(origin) { names_.emplace("", 0); }

  Value& value(int field) { return fields_[static_cast<std::size_t>(field)]; }

  void clear() {
    for (Value& field : fields_) field.kind = Value::kAbsent;
  }

  // Takes the event whose fields were set.
  Expected<void> add(std::size_t index) {
    index_ = index;
    if (text(kPhase) != "X") return {};
    const std::string_view category = text(kCategory);
    const auto correlation = whole(kCorrelation);
    if (category == "cpu_op") return add_operation();
    if (category == "user_annotation") return put(events_.ranges, {}, text(kName));
    if (!correlation) return {};
    if (is_kernel(category)) {
      DYNMO_ASSIGN(const TraceEvent kernel, read());
      events_.kernel_us[*correlation] += kernel.duration_us;
    } else if (category == "cuda_runtime" || category == "cuda_driver") {
      return put(events_.launches, correlation, "");
    }
    return {};
  }

  TraceEvents finish() && {
    for (auto* list : {&events_.ranges, &events_.operations, &events_.nodes, &events_.launches}) {
      std::stable_sort(list->begin(), list->end(), [](const TraceEvent& a, const TraceEvent& b) {
        return a.start_us != b.start_us ? a.start_us < b.start_us : a.duration_us > b.duration_us;
      });
    }
    for (auto& [thread, starts] : events_.starts_us) std::sort(starts.begin(), starts.end());
    events_.names.resize(names_.size());
    for (const auto& [name, number] : names_) {
      events_.names[static_cast<std::size_t>(number)] = name;
    }
    return std::move(events_);
  }

 private:
  std::string_view text(int field) {
    const Value& read = value(field);
    return read.kind == Value::kText ? std::string_view(read.text) : std::string_view();
  }

  std::optional<std::int64_t> whole(int field) {
    const Value& read = value(field);
    return read.kind == Value::kInteger ? std::optional(read.integer) : std::nullopt;
  }

  // Adds an operation, or a backward node. Operations inside a node have the thread of their
  // forward operation; those of the forward pass have 0.
  Expected<void> add_operation() {
    const auto sequence = whole(kSequence);
    const std::string_view name = text(kName);
    if (name.starts_with(kNode)) {
      DYNMO_TRY(put(events_.nodes, sequence, name.substr(kNode.size())));
      events_.starts_us[events_.nodes.back().thread].push_back(events_.nodes.back().start_us);
      return {};
    }
    DYNMO_ASSIGN(TraceEvent event, read());
    events_.starts_us[event.thread].push_back(event.start_us);
    event.number = sequence;
    if (sequence && whole(kForwardThread).value_or(0) == 0) events_.operations.push_back(event);
    return {};
  }

  Expected<void> put(std::vector<TraceEvent>& list, std::optional<std::int64_t> number,
                     std::string_view name) {
    DYNMO_ASSIGN(TraceEvent event, read());
    event.number = number;
    key_ = name;  // messages have one line
    std::replace_if(
        key_.begin(), key_.end(), [](char c) { return c >= 0 && c < ' '; }, ' ');
    event.name = names_.emplace(key_, static_cast<int>(names_.size())).first->second;
    list.push_back(event);
    return {};
  }

  Expected<TraceEvent> read() {
    TraceEvent event;
    event.thread = thread();
    DYNMO_ASSIGN(event.start_us, microseconds(kStart));
    DYNMO_ASSIGN(event.duration_us, microseconds(kDuration));
    return event;
  }

  Expected<double> microseconds(int field) {
    const Value& read = value(field);
    const bool is_number = read.kind == Value::kNumber || read.kind == Value::kInteger;
    constexpr double kMaxMicroseconds = 1e18;
    if (is_number && read.number >= 0 && read.number <= kMaxMicroseconds) return read.number;
    return make_error(ErrorCode::kBadInput,
                      "{}: /traceEvents/{}/{} is {}, wanted microseconds, 0 to {}", origin_, index_,
                      kKeys[static_cast<std::size_t>(field)], printed(read), kMaxMicroseconds);
  }

  static std::string printed(const Value& value) {
    if (value.kind == Value::kAbsent) return "missing";
    if (value.kind == Value::kText)
      return Json(value.text.substr(0, 60)).dump(-1, ' ', true, Json::error_handler_t::replace);
    return value.kind == Value::kOther ? value.text : fmt::format("{}", value.number);
  }

  // Returns the number of the event's thread. In a trace, process and thread may be numbers or
  // names.
  int thread() {
    key_.clear();
    for (const int field : {kProcess, kThread}) {
      const Value& read = value(field);
      if (read.kind == Value::kInteger) {
        fmt::format_to(std::back_inserter(key_), "{}/", read.integer);
      } else if (read.kind != Value::kAbsent) {
        fmt::format_to(std::back_inserter(key_), "'{}'/", read.text);
      }
    }
    return threads_.emplace(key_, static_cast<int>(threads_.size())).first->second;
  }

  std::string origin_;
  std::array<Value, kFields> fields_;
  std::size_t index_ = 0;
  std::string key_;  // of the last look-up
  std::unordered_map<std::string, int> threads_;
  std::unordered_map<std::string, int> names_;
  TraceEvents events_;
};

// Follows the parser to the events of a trace, which are the elements of its root, or of the root's
// key "traceEvents". Other values are passed over.
class EventHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  EventHandler(TraceStream& stream, std::string_view origin)
      : stream_(stream), origin_(origin), collector_(origin) {}

  bool null() override { return other("null"); }
  bool boolean(bool value) override { return other(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override {
    return whole_number(value, static_cast<double>(value));
  }
  bool number_unsigned(number_unsigned_t value) override {
    constexpr auto kMax = static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max());
    if (value > kMax) return number_float(static_cast<double>(value), "");
    return whole_number(static_cast<std::int64_t>(value), static_cast<double>(value));
  }
  bool number_float(number_float_t number, const string_t&) override {
    if (Value* value = begin_value()) {
      value->kind = Value::kNumber;
      value->number = number;
    }
    return true;
  }
  bool string(string_t& text) override {
    if (Value* value = begin_value()) {
      value->kind = Value::kText;
      value->text.swap(text);
    }
    return true;
  }
  bool binary(binary_t&) override { return true; }

  bool key(string_t& name) override {
    field_ = kNoField;
    if (depths_.now == 1 && depths_.root == Root::kObject) is_list_ = name == "traceEvents";
    if (depths_.event == 0) return true;
    const int level = depths_.now - depths_.event;
    if (level == 0) is_arguments_ = name == "args";
    const bool arguments = level == 1 && is_arguments_;
    if (level != 0 && !arguments) return true;
    const int begin = arguments ? int{kSequence} : 0;
    const int end = arguments ? int{kFields} : int{kSequence};
    for (int field = begin; field < end; ++field) {
      if (name == kKeys[static_cast<std::size_t>(field)]) field_ = field;
    }
    if (field_ == kNoField || collector_.value(field_).kind == Value::kAbsent) return true;
    return fail("{}: /traceEvents/{}{}/{} is given twice, wanted each key once", origin_,
                elements_ - 1, arguments ? "/args" : "", name);
  }

  bool start_object(std::size_t) override { return begin_level(Root::kObject); }
  bool start_array(std::size_t) override { return begin_level(Root::kArray); }
  bool end_object() override {
    const bool whole = depths_.event != 0 && depths_.now == depths_.event;
    end_level();
    if (!whole) return true;
    depths_.event = 0;
    const auto added = collector_.add(elements_ - 1);
    if (!added) fault_ = added.error();
    return added.has_value();
  }
  bool end_array() override {
    end_level();
    return true;
  }

  bool parse_error(std::size_t, const std::string&,
                   const nlohmann::detail::exception& fault) override {
    constexpr std::size_t kLongest = 300;
    std::string why = fault.what();
    if (const auto start = why.find("] "); start != std::string::npos) why.erase(0, start + 2);
    std::replace(why.begin(), why.end(), '\n', ' ');
    if (why.size() > kLongest) why = why.substr(0, kLongest) + "...";
    return fail("{}: wanted JSON: {}", origin_, why);
  }

  Expected<TraceEvents> finish() && {
    if (fault_) return *fault_;
    if (has_list_) return std::move(collector_).finish();
    return make_error(ErrorCode::kBadInput,
                      "{}: /traceEvents is {}, wanted the events of a trace as PyTorch's "
                      "export_chrome_trace writes them",
                      origin_, wrong_list_.empty() ? "missing" : wrong_list_);
  }

 private:
  enum class Root { kNone, kObject, kArray };
  struct Depths {
    Root root = Root::kNone;
    int now = 0;
    int list = 0;   // of the events' list; 0 outside of it
    int event = 0;  // 0 outside of an event
  };

  template <typename... Parts>
  bool fail(fmt::format_string<Parts...> text, Parts&&... parts) {
    fault_ = make_error(ErrorCode::kBadInput, text, std::forward<Parts>(parts)...);
    return false;
  }

  // Notes a value. Returns the field that it belongs to, or nullptr.
  Value* begin_value() {
    stream_.note_value();
    if (depths_.now == 1 && is_list_ && depths_.root == Root::kObject) wrong_list_ = "no list";
    count_element();
    const int field = std::exchange(field_, kNoField);
    return field == kNoField ? nullptr : &collector_.value(field);
  }

  bool other(const char* json) {
    if (Value* value = begin_value()) {
      value->kind = Value::kOther;
      value->text = json;
    }
    return true;
  }

  bool whole_number(std::int64_t integer, double number) {
    if (Value* value = begin_value()) {
      value->kind = Value::kInteger;
      value->integer = integer;
      value->number = number;
    }
    return true;
  }

  void count_element() {
    if (depths_.list != 0 && depths_.now == depths_.list) ++elements_;
  }

  bool begin_level(Root kind) {
    constexpr int kMaxLevels = 64;
    if (depths_.now >= kMaxLevels)
      return fail("{}: wanted JSON of at most {} levels", origin_, kMaxLevels);
    const bool object = kind == Root::kObject;
    const bool list = !object && (depths_.now == 0 || (depths_.now == 1 && is_list_));
    const bool event = object && depths_.list != 0 && depths_.now == depths_.list;
    if (list && has_list_) return fail("{}: /traceEvents is given twice, wanted one", origin_);
    if (Value* value = begin_value()) {
      value->kind = Value::kOther;
      value->text = object ? "an object" : "a list";
    }
    if (depths_.now == 0) depths_.root = kind;
    ++depths_.now;
    if (list) {
      has_list_ = true;
      depths_.list = depths_.now;
    }
    if (event) {
      is_arguments_ = false;
      depths_.event = depths_.now;
      collector_.clear();
    }
    return true;
  }

  void end_level() {
    if (depths_.now == depths_.list) depths_.list = 0;
    --depths_.now;
  }

  TraceStream& stream_;
  std::string origin_;
  Collector collector_;
  std::optional<Error> fault_;
  std::string wrong_list_;
  Depths depths_;
  int field_ = kNoField;
  bool is_list_ = false;  // of the root's key
  bool has_list_ = false;
  bool is_arguments_ = false;  // of the event's key
  std::size_t elements_ = 0;   // of the list, so far
};

Expected<TraceEvents> events_of(TraceStream& stream, std::string_view origin) {
  const std::string content = known_content(stream.head());
  if (stream.head().starts_with("\x1f\x8b")) {
    return make_error(ErrorCode::kBadInput, "{}: is compressed, wanted JSON; gunzip it first",
                      origin);
  }
  DYNMO_TRY(stream.finish());
  EventHandler handler(stream, origin);
  const bool whole =
      nlohmann::json::sax_parse(TraceStream::Iterator(stream), TraceStream::Iterator(), &handler);
  DYNMO_TRY(stream.finish());
  if (!whole && !content.empty()) {
    return make_error(ErrorCode::kBadInput, "{}: wanted JSON: it is {}", origin, content);
  }
  return std::move(handler).finish();
}

}  // namespace

Expected<TraceEvents> parse_events(std::string_view text, std::string_view origin) {
  TraceStream stream(text);
  return events_of(stream, origin);
}

Expected<TraceEvents> read_events(const std::filesystem::path& path, const OpenTrace& open) {
  TraceStream stream(path, open);
  return events_of(stream, path.string());
}

}  // namespace dynmo::observe
