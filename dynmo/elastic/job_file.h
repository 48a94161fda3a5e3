// SPDX-License-Identifier: Apache-2.0
#pragma once

// The files by which a client finds a run. RUN/job.json ("dynmo-job-1") says where its leader
// listens. RUN/secret has the token that clients must send first. Only their owner can read either.

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
  std::string host;      // leader's host, for the user
  std::int64_t pid = 0;  // of the leader
  friend bool operator==(const JobFile&, const JobFile&) = default;
};

[[nodiscard]] std::filesystem::path job_path(const std::filesystem::path& run);
[[nodiscard]] std::filesystem::path secret_path(const std::filesystem::path& run);

// Writes both files. Fails with kBadInput, which names the file and the system's reason.
[[nodiscard]] Expected<void> write_job(const std::filesystem::path& run, const JobFile& job,
                                       std::string_view secret);
// Removes both files of a run that has ended, because nothing listens there any more.
void remove_job(const std::filesystem::path& run);
// Like remove_job(), but only if the files belong to this leader. The function
// remove_job_of_ended() removes those of a leader on this host that has ended.
void remove_job_of(const std::filesystem::path& run, const JobFile& leader);
void remove_job_of_ended(const std::filesystem::path& run);

// Writes a file that other users cannot read at any moment. It may replace an existing file. Fails
// like write_job().
[[nodiscard]] Expected<void> write_private(const std::filesystem::path& path,
                                           std::string_view text);

[[nodiscard]] Json to_json(const JobFile& job);
void read_fields(JsonObject& object, JobFile& job);
[[nodiscard]] Expected<JobFile> parse_job(std::string_view text, std::string_view origin);
// Reads job.json. Returns kPeerLost if no run is active there, and says so.
[[nodiscard]] Expected<JobFile> read_job(const std::filesystem::path& run);
[[nodiscard]] Expected<std::string> read_secret(const std::filesystem::path& file);

// The place where a leader listens, and the secret that clients must send.
struct ControlEndpoint {
  std::string address;
  std::uint16_t port = 0;
  std::string secret;
  [[nodiscard]] bool is_at(const ControlEndpoint& other) const {
    return address == other.address && port == other.port;
  }
};
// Returns the endpoint of a leader. Returns kBadInput if it listens on the loopback interface of
// another host. A process with the same port on this host must not get the secret.
[[nodiscard]] Expected<ControlEndpoint> endpoint_of(const JobFile& job, const std::string& secret);
// Finds a leader. `run` is the folder of a run, or HOST:PORT of its leader. `secret_file` is the
// file of its secret, which may be "" with a folder. Returns the errors of endpoint_of() and
// read_job(), and kBadInput for other input.
[[nodiscard]] Expected<ControlEndpoint> find_leader(const std::string& run,
                                                    const std::string& secret_file);

// Returns 128 random bits as 32 hexadecimal digits.
[[nodiscard]] std::string make_secret();
// Returns whether two secrets are equal, in a time that does not depend on their content.
[[nodiscard]] bool same_secret(std::string_view a, std::string_view b);

}  // namespace dynmo::elastic
