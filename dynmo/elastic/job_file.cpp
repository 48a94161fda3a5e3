// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/job_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <random>
#include <system_error>

#include "dynmo/core/fields.h"
#include "dynmo/core/file_system.h"
#include "dynmo/core/files.h"
#include "dynmo/process/sockets.h"

namespace dynmo::elastic {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kJobFormat = "dynmo-job-1";
constexpr std::size_t kMaxJobFile = 64 << 10;
constexpr std::size_t kSecretDigits = 32;
constexpr Limits kPortOfLeader{.min = 1, .max = 65535, .wanted = "1 to 65535"};

}  // namespace

// Creates a new file with its permissions, then renames it.
Expected<void> write_private(const fs::path& path, std::string_view text) {
  const fs::path made = path.string() + ".new";
  ::unlink(made.c_str());
  const int file = ::open(made.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  const bool written =
      file >= 0 && ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  const int fault = errno;
  if (file >= 0) ::close(file);
  if (written && rename_over(made, path)) return {};
  return make_error(ErrorCode::kBadInput, "cannot write '{}': {}", path.string(),
                    std::strerror(written ? errno : fault));
}

fs::path job_path(const fs::path& run) { return run / "job.json"; }
fs::path secret_path(const fs::path& run) { return run / "secret"; }

Expected<void> write_job(const fs::path& run, const JobFile& job, std::string_view secret) {
  DYNMO_TRY(write_private(secret_path(run), fmt::format("{}\n", secret)));
  return write_private(job_path(run), to_json(job).dump(2) + "\n");
}

void list_fields(IsA<JobFile> auto& job, auto& visit) {
  visit.format(kJobFormat);
  visit("address", job.address);
  visit("port", job.port, kPortOfLeader);
  visit("host", job.host);
  visit("pid", job.pid);
}
Json to_json(const JobFile& job) { return write_list(job); }
void read_fields(JsonObject& object, JobFile& job) { read_list(object, job); }

void remove_job(const fs::path& run) {
  std::error_code fault;
  fs::remove(job_path(run), fault);
  fs::remove(secret_path(run), fault);
}

void remove_job_of(const fs::path& run, const JobFile& leader) {
  const auto job = read_job(run);
  if (!job || *job == leader) remove_job(run);
}

void remove_job_of_ended(const fs::path& run) {
  std::error_code fault;
  if (!fs::exists(job_path(run), fault)) return;
  const auto job = read_job(run);
  if (!job || job->host != process::host_name() || job->pid <= 0) return;
  if (::kill(static_cast<pid_t>(job->pid), 0) != 0 && errno == ESRCH) remove_job(run);
}

Expected<JobFile> parse_job(std::string_view text, std::string_view origin) {
  DYNMO_ASSIGN(const Json json, parse_json(text, origin));
  return parse_fields<JobFile>(json, origin);
}

Expected<JobFile> read_job(const fs::path& run) {
  const fs::path path = job_path(run);
  std::error_code fault;
  if (!fs::exists(path, fault)) {
    return make_error(ErrorCode::kPeerLost,
                      "no elastic run goes on in '{}': wanted the folder of a run that was started "
                      "with elastic.enabled = true and has not ended",
                      run.string());
  }
  DYNMO_ASSIGN(const std::string text, read_file(path, kMaxJobFile));
  return parse_job(text, path.string());
}

Expected<std::string> read_secret(const fs::path& file) {
  DYNMO_ASSIGN(std::string text, read_file(file, kMaxJobFile));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  if (text.empty()) {
    return make_error(ErrorCode::kBadInput, "'{}' is empty, wanted the secret of a run",
                      file.string());
  }
  if (!std::ranges::all_of(text, [](char c) { return c > ' ' && c <= '~'; })) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' holds other than letters and digits, wanted the secret of a run: the "
                      "one line of RUN/secret",
                      file.string());
  }
  return text;
}

Expected<ControlEndpoint> endpoint_of(const JobFile& job, const std::string& secret) {
  if (process::is_loopback(job.address) && !job.host.empty() && job.host != process::host_name()) {
    return make_error(
        ErrorCode::kBadInput,
        "the leader of the run listens at {}:{} of host '{}' only, and this is '{}': ask there, or "
        "start the run with elastic.listen = an address that other hosts reach",
        job.address, job.port, job.host, process::host_name());
  }
  return ControlEndpoint{.address = job.address, .port = job.port, .secret = secret};
}

Expected<ControlEndpoint> find_leader(const std::string& run, const std::string& secret_file) {
  std::error_code fault;
  ControlEndpoint leader;
  const std::size_t colon = run.rfind(':');
  if (!fs::is_directory(run, fault) && colon != std::string::npos) {
    const std::string_view port = std::string_view(run).substr(colon + 1);
    const auto [end, broken] = std::from_chars(port.data(), port.data() + port.size(), leader.port);
    if (broken != std::errc() || end != port.data() + port.size() || leader.port == 0 ||
        colon == 0) {
      return make_error(ErrorCode::kBadInput,
                        "'{}' is neither the folder of a run nor HOST:PORT of its leader", run);
    }
    leader.address = run.substr(0, colon);
    if (leader.address.starts_with('[') && leader.address.ends_with(']')) {
      leader.address = leader.address.substr(1, leader.address.size() - 2);
    }
    if (secret_file.empty()) {
      return make_error(
          ErrorCode::kBadInput,
          "'{}' wants the run's secret, too: give --secret FILE, a copy of RUN/secret "
          "on the leader's host",
          run);
    }
  } else {
    DYNMO_ASSIGN(const JobFile job, read_job(run));
    DYNMO_ASSIGN(leader, endpoint_of(job, ""));
  }
  DYNMO_ASSIGN(leader.secret,
               read_secret(secret_file.empty() ? secret_path(run) : fs::path(secret_file)));
  return leader;
}

std::string make_secret() {
  std::random_device random;
  std::string secret;
  while (secret.size() < kSecretDigits) secret += fmt::format("{:08x}", random());
  return secret;
}

bool same_secret(std::string_view a, std::string_view b) {
  unsigned different = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    different |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]);
  }
  return different == 0;
}

}  // namespace dynmo::elastic
