// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/known_content.h"

#include <array>

namespace dynmo {
namespace {

using std::string_view_literals::operator""sv;

constexpr std::string_view kGitLfs = "version https://git-lfs.github.com/spec/";

struct Content {
  std::string_view begin;
  std::string_view name;
};

constexpr std::array kContents = {
    Content{kGitLfs, "a Git LFS pointer, which stands for the file: get that by `git lfs pull`"},
    Content{"\x1f\x8b"sv, "compressed by gzip: decompress it first"},
    Content{"\x28\xb5\x2f\xfd"sv, "compressed by zstd: decompress it first"},
    Content{"BZh"sv, "compressed by bzip2: decompress it first"},
    Content{"\xfd"
            "7zXZ\0"sv,
            "compressed by xz: decompress it first"},
    Content{"PK\x03\x04"sv, "a zip archive, such as torch.save writes: wanted what is in it"},
    Content{"7z\xbc\xaf\x27\x1c"sv, "a 7z archive: wanted what is in it"},
    Content{"\x80\x02"sv, "a pickle, such as torch.save writes: wanted safetensors"},
    Content{"\x80\x03"sv, "a pickle of Python: wanted another format"},
    Content{"\x80\x04"sv, "a pickle of Python: wanted another format"},
    Content{"\x80\x05"sv, "a pickle of Python: wanted another format"},
    Content{"GGUF"sv, "a GGUF file: wanted safetensors"},
    Content{"\x89HDF"sv, "an HDF5 file: wanted another format"},
    Content{"\x93NUMPY"sv, "a NumPy file: wanted another format"},
    Content{"PAR1"sv, "a Parquet file: wanted JSON lines"},
    Content{"ARROW1"sv, "an Arrow file: wanted JSON lines"},
    Content{"%PDF-"sv, "a PDF: wanted its text"},
    Content{"\xff\xfe"sv, "UTF-16 text: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"},
    Content{"\xfe\xff"sv, "UTF-16 text: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"},
    Content{"<!DOCTYPE html"sv, "an HTML page, such as the answer to a download that failed"},
    Content{"<!doctype html"sv, "an HTML page, such as the answer to a download that failed"},
    Content{"<html"sv, "an HTML page, such as the answer to a download that failed"},
};

}  // namespace

std::string known_content(std::string_view bytes) {
  for (const Content& content : kContents) {
    if (bytes.starts_with(content.begin)) return std::string(content.name);
  }
  return "";
}

bool is_pointer_file(std::string_view bytes) { return bytes.starts_with(kGitLfs); }

}  // namespace dynmo
