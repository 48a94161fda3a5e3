// SPDX-License-Identifier: Apache-2.0
#pragma once

// The charts of runs as one HTML file that works without a network. Each chart is a Vega-Lite
// specification (version 6) whose data are tables of run_data.h. The browser draws it with the
// script in the page, which `scripts/setup report` downloads.

#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/observe/run_data.h"

namespace dynmo::observe {

// Returns the document of a page:
//
//   {"format": "dynmo-html-report-1", "charts": [{"title", "note", "tables": [names], "spec"}],
//   "runs": [{"name", "head": [[name, value]], "layers": [names], "seconds", "tracks", "tables"}],
//   "together": charts of all runs, whose one table `steps` has a field `run`}
//
// A run does not show the charts whose tables are empty there.
[[nodiscard]] Json html_report(const std::vector<RunData>& runs);

// Parses a document that another program has made. It may also have "title", "about" (paragraphs)
// and "wide" (runs one below the other). A run may have "rows" of a table, and the first row is its
// head. Returns kBadInput with `origin` for any other format.
[[nodiscard]] Expected<Json> parse_html_report(std::string_view text, std::string_view origin);

// Returns the page with the document and the script. No text of the document can end the HTML
// element that holds the document.
[[nodiscard]] std::string html_page(const Json& document, std::string_view script);

}  // namespace dynmo::observe
