// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/metrics/event_file.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <protozero/pbf_builder.hpp>

namespace dynmo::observe {
namespace {

// Field numbers of event.proto, summary.proto and tensor.proto in TensorBoard 2.
enum class EventTag : protozero::pbf_tag_type {
  kWallTime = 1,
  kStep = 2,
  kFileVersion = 3,
  kSummary = 5,
  kSessionLog = 7
};
enum class SummaryTag : protozero::pbf_tag_type { kValue = 1 };
enum class ValueTag : protozero::pbf_tag_type {
  kTag = 1,
  kSimpleValue = 2,
  kTensor = 8,
  kMetadata = 9
};
enum class MetadataTag : protozero::pbf_tag_type { kPluginData = 1 };
enum class PluginTag : protozero::pbf_tag_type { kName = 1 };
enum class TensorTag : protozero::pbf_tag_type { kType = 1, kShape = 2, kStrings = 8 };
enum class ShapeTag : protozero::pbf_tag_type { kDimension = 2 };
enum class DimensionTag : protozero::pbf_tag_type { kSize = 1 };
enum class SessionTag : protozero::pbf_tag_type { kStatus = 1 };

constexpr std::int32_t kStringType = 7;    // DT_STRING
constexpr std::int32_t kSessionStart = 1;  // SessionLog.START

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ ((rest & 1) != 0 ? 0x82F63B78U : 0U);
    table[byte] = rest;
  }
  return table;
}

// Returns the checksum as files hold it: rotated by 15 bits, plus a constant.
std::uint32_t masked_crc(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xA282EAD8U;
}

template <typename Number>
void append_little_endian(std::string& bytes, Number number) {
  for (std::size_t i = 0; i < sizeof number; ++i) {
    bytes += static_cast<char>((number >> (8 * i)) & 0xFF);
  }
}

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

using EventBuilder = protozero::pbf_builder<EventTag>;

EventBuilder begin_event(std::string& bytes, std::int64_t step) {
  EventBuilder event(bytes);
  event.add_double(EventTag::kWallTime, wall_time());
  event.add_int64(EventTag::kStep, step);
  return event;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = crc_table();
  std::uint32_t crc = 0xFFFFFFFFU;
  for (const char each : bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(each)) & 0xFF];
  }
  return ~crc;
}

Expected<EventFile> EventFile::create(const std::filesystem::path& folder) {
  static std::atomic<int> files = 0;
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host = {"host"};
  const auto path = folder / fmt::format("events.out.tfevents.{}.{}.{}.{}",
                                         static_cast<std::int64_t>(wall_time()), host.data(),
                                         ::getpid(), files++);
  using File = process::AppendFile;
  DYNMO_ASSIGN(File file, File::open(path, File::Start::kEmpty, "TensorBoard's events"));
  EventFile made(std::move(file));
  std::string version;
  EventBuilder(begin_event(version, 0)).add_string(EventTag::kFileVersion, "brain.Event:2");
  DYNMO_TRY(made.append(version));
  return made;
}

Expected<void> EventFile::drop_from(std::int64_t step) {
  std::string bytes;
  {
    EventBuilder event = begin_event(bytes, step);
    protozero::pbf_builder<SessionTag>(event, EventTag::kSessionLog)
        .add_enum(SessionTag::kStatus, kSessionStart);
  }
  return append(bytes);
}

Expected<void> EventFile::add(std::int64_t step, std::span<const Metric> metrics) {
  std::string bytes;
  {
    EventBuilder event = begin_event(bytes, step);
    protozero::pbf_builder<SummaryTag> summary(event, EventTag::kSummary);
    for (const Metric& metric : metrics) {
      protozero::pbf_builder<ValueTag> value(summary, SummaryTag::kValue);
      value.add_string(ValueTag::kTag, metric.tag);
      value.add_float(ValueTag::kSimpleValue, static_cast<float>(metric.value));
    }
  }
  return append(bytes);
}

Expected<void> EventFile::add_text(std::int64_t step, std::string_view tag, std::string_view text) {
  std::string bytes;
  {
    EventBuilder event = begin_event(bytes, step);
    protozero::pbf_builder<SummaryTag> summary(event, EventTag::kSummary);
    protozero::pbf_builder<ValueTag> value(summary, SummaryTag::kValue);
    value.add_string(ValueTag::kTag, std::string(tag));
    {
      protozero::pbf_builder<TensorTag> tensor(value, ValueTag::kTensor);
      tensor.add_enum(TensorTag::kType, kStringType);
      {
        protozero::pbf_builder<ShapeTag> shape(tensor, TensorTag::kShape);
        protozero::pbf_builder<DimensionTag>(shape, ShapeTag::kDimension)
            .add_int64(DimensionTag::kSize, 1);
      }
      tensor.add_bytes(TensorTag::kStrings, text.data(), text.size());
    }
    protozero::pbf_builder<MetadataTag> metadata(value, ValueTag::kMetadata);
    protozero::pbf_builder<PluginTag>(metadata, MetadataTag::kPluginData)
        .add_string(PluginTag::kName, "text");
  }
  return append(bytes);
}

Expected<void> EventFile::append(const std::string& event) {
  std::string record;
  append_little_endian(record, std::uint64_t{event.size()});
  append_little_endian(record, masked_crc(record));
  record += event;
  append_little_endian(record, masked_crc(event));
  return file_.append(record);
}

}  // namespace dynmo::observe
