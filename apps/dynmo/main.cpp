// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>

int main(int argc, char** argv) {
  CLI::App app("DynMo: balanced and elastic pipelines for dynamic language models");
  app.require_subcommand(1);
  CLI11_PARSE(app, argc, argv);
  return 0;
}
