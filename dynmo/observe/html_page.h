// SPDX-License-Identifier: Apache-2.0
#pragma once

// The charts of runs as one HTML file that works without a network. Each chart is a Vega-Lite
// specification (version 6) whose data are tables of run_data.h; who shows the page draws it with
// the script that is put in, which `scripts/setup report` brings.

#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/observe/run_data.h"

namespace dynmo::observe {

// {"format": "dynmo-html-report-1", "charts": [{"title", "note", "tables": [names], "spec"}],
// "runs": [{"name", "head": [[name, value]], "layers": [names], "seconds", "tracks", "tables"}],
// "together": charts of all runs, whose one table `steps` has a field `run`}. Charts whose tables
// are empty in a run are left out there.
[[nodiscard]] Json html_report(const std::vector<RunData>& runs);

// A document that another program has made, which may also have "title", "about" (paragraphs),
// "wide" (runs one below the other) and in a run "rows" (of a table, the first one its head).
// kBadInput, naming `origin`: none of the format.
[[nodiscard]] Expected<Json> parse_html_report(std::string_view text, std::string_view origin);

// The document and the script in a page. Nothing in the document can end its element.
[[nodiscard]] std::string html_page(const Json& document, std::string_view script);

}  // namespace dynmo::observe
