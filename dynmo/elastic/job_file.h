// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where somebody outside finds a run that goes on: RUN/job.json ("dynmo-job-1") says where its
// leader listens, RUN/secret the token that clients must send first. Both can be read by their
// owner only.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"

namespace dynmo::elastic {

struct JobFile {
  std::string address;
  std::uint16_t port = 0;
  std::string host;      // of the leader, for people
  std::int64_t pid = 0;  // of the leader
  friend bool operator==(const JobFile&, const JobFile&) = default;
};

[[nodiscard]] std::filesystem::path job_path(const std::filesystem::path& run);
[[nodiscard]] std::filesystem::path secret_path(const std::filesystem::path& run);

// kBadInput, naming the file and the system's reason.
[[nodiscard]] Expected<void> write_job(const std::filesystem::path& run, const JobFile& job,
                                       std::string_view secret);
// The run has ended: nobody listens there any more.
void remove_job(const std::filesystem::path& run);
// The same, but only where the files are not another leader's; or those of one that has ended on
// this host without removing them.
void remove_job_of(const std::filesystem::path& run, const JobFile& leader);
void remove_job_of_ended(const std::filesystem::path& run);

// Writes a file that nobody else can read at any moment, anew or in the place of one that is there.
// kBadInput as above.
[[nodiscard]] Expected<void> write_private(const std::filesystem::path& path,
                                           std::string_view text);

[[nodiscard]] Json to_json(const JobFile& job);
[[nodiscard]] Expected<JobFile> parse_job(JsonObject& object);
[[nodiscard]] Expected<JobFile> parse_job(std::string_view text, std::string_view origin);
// kPeerLost where no run goes on there, saying so.
[[nodiscard]] Expected<JobFile> read_job(const std::filesystem::path& run);
[[nodiscard]] Expected<std::string> read_secret(const std::filesystem::path& file);

// Where a leader listens, and the secret that clients must send.
struct ControlEndpoint {
  std::string address;
  std::uint16_t port = 0;
  std::string secret;
  [[nodiscard]] bool is_at(const ControlEndpoint& other) const {
    return address == other.address && port == other.port;
  }
};
// kBadInput where the leader listens on the loopback interface of another host: whoever listens on
// that port of this one is not to hear the secret.
[[nodiscard]] Expected<ControlEndpoint> endpoint_of(const JobFile& job, const std::string& secret);
// `run` is the folder of a run, or HOST:PORT of its leader; `secret_file` that of its secret, which
// may be "" with a folder. kBadInput, also as endpoint_of; kPeerLost as read_job.
[[nodiscard]] Expected<ControlEndpoint> find_leader(const std::string& run,
                                                    const std::string& secret_file);

// 128 random bits, as 32 hexadecimal digits.
[[nodiscard]] std::string make_secret();
// Takes as long for a wrong secret as for the right one.
[[nodiscard]] bool same_secret(std::string_view a, std::string_view b);

}  // namespace dynmo::elastic
