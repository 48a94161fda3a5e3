// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/html_page.h"

#include <fmt/format.h>

#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::observe {

// html_page.html, which CMake puts into a source.
extern const std::string_view kPageFrame;

namespace {

constexpr std::string_view kFormat = "dynmo-html-report-1";

Json number(const char* field, const char* title) {
  return {{"field", field}, {"type", "quantitative"}, {"title", title}};
}
// Returns a field in percent. `guide` is "axis", or "legend" of a colour.
Json share_of(const char* field, const char* title, const char* guide = "axis") {
  Json share = number(field, title);
  share[guide] = {{"format", ".0%"}};
  return share;
}
Json step_axis(const char* field = "step") {
  Json axis = number(field, "step");
  axis["scale"] = {{"zero", false}, {"nice", false}};
  return axis;
}
Json table(const char* name) { return {{"name", name}}; }

Json line_of(const char* field, const char* title) {
  return {{"data", table("steps")},
          {"mark", {{"type", "line"}, {"interpolate", "step-after"}, {"tooltip", true}}},
          {"encoding", {{"x", step_axis()}, {"y", number(field, title)}}}};
}

struct Chart {
  std::string title;
  std::string note;
  std::vector<std::string> tables;  // the first one must have rows
  Json spec;
};

Chart layers_by_step() {
  Json cost = {{"data", table("layers")},
               {"transform",
                {{{"calculate", "datum.layer + 1"}, {"as", "above"}},
                 {{"calculate", "1000 * datum.seconds"}, {"as", "ms"}}}},
               {"mark", {{"type", "rect"}}},
               {"encoding",
                {{"x", step_axis()},
                 {"x2", {{"field", "to_step"}}},
                 {"y", number("layer", "layer")},
                 {"y2", {{"field", "above"}}},
                 {"color",
                  {{"field", "ms"},
                   {"type", "quantitative"},
                   {"title", "ms"},
                   {"scale", {{"scheme", "viridis"}}}}},
                 {"tooltip",
                  {{{"field", "name"}, {"type", "nominal"}, {"title", "layer"}},
                   number("step", "step"),
                   number("ms", "ms")}}}}};
  cost["encoding"]["y"]["scale"] = {{"reverse", true}, {"nice", false}};
  Json cuts = {
      {"data", table("cuts")},
      {"mark", {{"type", "rule"}, {"color", "white"}, {"strokeWidth", 1.5}}},
      {"encoding",
       {{"x", step_axis()}, {"x2", {{"field", "to_step"}}}, {"y", number("layer", "layer")}}}};
  return {"Cost of each layer, and where the pipeline is cut",
          "Time of a micro-batch, forward and backward. White lines: a rank's layers end there.",
          {"layers", "cuts"},
          {{"height", 320}, {"layer", {std::move(cost), std::move(cuts)}}}};
}

Chart speed() {
  Json decisions = {{"data", table("decisions")},
                    {"mark", {{"type", "rule"}, {"tooltip", true}, {"opacity", 0.6}}},
                    {"encoding",
                     {{"x", step_axis()},
                      {"color", {{"field", "taken"}, {"type", "nominal"}, {"title", "moved"}}},
                      {"tooltip",
                       {{{"field", "step"}, {"type", "quantitative"}},
                        {{"field", "cause"}, {"type", "nominal"}},
                        {{"field", "reason"}, {"type", "nominal"}}}}}}};
  Json losses = {{"data", table("losses")},
                 {"mark", {{"type", "rule"}, {"color", "#d62728"}, {"strokeWidth", 2}}},
                 {"encoding",
                  {{"x", step_axis()},
                   {"tooltip",
                    {number("step", "step"),
                     number("ranks", "lost ranks"),
                     {{"field", "text"}, {"type", "nominal"}, {"title", "what happened"}}}}}}};
  return {
      "Speed, every decision of the controller, and lost ranks",
      "A thin line for each plan that was made; its text is the reason. A red line where ranks "
      "were lost.",
      {"steps", "decisions", "losses"},
      {{"height", 200},
       {"layer", {line_of("tokens_per_s", "tokens/s"), std::move(decisions), std::move(losses)}}}};
}

Chart pipelines() {
  Json spec = {
      {"data", table("spans")},
      {"mark", {{"type", "rect"}, {"tooltip", true}, {"stroke", "white"}, {"strokeWidth", 0.4}}},
      {"height", 140},
      {"encoding",
       {{"facet",
         {{"field", "plan"},
          {"type", "nominal"},
          {"title", nullptr},
          {"columns", 1},
          {"sort", nullptr},
          {"header", {{"labelAnchor", "start"}, {"labelFontWeight", "bold"}}}}},
        {"x", number("start_s", "seconds")},
        {"x2", {{"field", "end_s"}}},
        {"y", {{"field", "rank"}, {"type", "ordinal"}, {"title", "rank"}}},
        {"color",
         {{"field", "kind"},
          {"type", "nominal"},
          {"title", nullptr},
          {"scale",
           {{"domain", {"F", "I", "W", "B"}},
            {"range", {"#4c78a8", "#f58518", "#54a24b", "#b279a2"}}}}}},
        {"tooltip",
         {{{"field", "action"}, {"type", "nominal"}},
          {{"field", "start_s"}, {"type", "quantitative"}},
          {{"field", "end_s"}, {"type", "quantitative"}}}}}}};
  spec["encoding"]["x"]["scale"] = {{"nice", false}};
  return {"A step before and after a move",
          "The move that promised the largest gain; both plans by replay, with the costs of the "
          "step at which it was made. F: forward, I: gradient of inputs, W: of weights, B: both.",
          {"spans"},
          std::move(spec)};
}

// Makes a chart with a line for each of several fields. `names` are pairs of a field and its name
// for readers.
Chart folded(std::string title, std::string note,
             const std::vector<std::pair<const char*, const char*>>& names, Json axis) {
  Json fields = Json::array();
  std::string name = "datum.key";
  for (const auto& [field, shown] : names) {
    fields.push_back(field);
    name = fmt::format("datum.key == '{}' ? '{}' : {}", field, shown, name);
  }
  return {std::move(title),
          std::move(note),
          {"steps"},
          {{"height", 160},
           {"data", table("steps")},
           {"transform",
            {{{"fold", std::move(fields)}}, {{"calculate", std::move(name)}, {"as", "name"}}}},
           {"mark", {{"type", "line"}, {"interpolate", "step-after"}, {"tooltip", true}}},
           {"encoding",
            {{"x", step_axis()},
             {"y", std::move(axis)},
             {"color", {{"field", "name"}, {"type", "nominal"}, {"title", nullptr}}}}}}};
}

Chart by_rank_and_step(std::string title, std::string note, Json color) {
  color["scale"] = {{"scheme", "magma"}};
  Json spec = {
      {"height", 160},
      {"data", table("ranks")},
      {"transform", {{{"calculate", "datum.memory_bytes / 1048576"}, {"as", "memory_mib"}}}},
      {"mark", {{"type", "rect"}, {"tooltip", true}}},
      {"encoding",
       {{"x", step_axis()},
        {"x2", {{"field", "to_step"}}},
        {"y", {{"field", "rank"}, {"type", "ordinal"}, {"title", "rank"}}},
        {"color", std::move(color)}}}};
  return {std::move(title), std::move(note), {"ranks"}, std::move(spec)};
}

Chart exits() {
  Json share = share_of("share", "share of the tokens");
  share["stack"] = "zero";
  return {"Tokens that left at each exit",
          "From below: the first exit, the others, and the model's own head.",
          {"exits"},
          {{"height", 160},
           {"data", table("exits")},
           {"mark", {{"type", "area"}, {"interpolate", "step-after"}, {"tooltip", true}}},
           {"encoding",
            {{"x", step_axis()},
             {"y", std::move(share)},
             {"order", {{"field", "order"}, {"type", "quantitative"}}},
             {"color",
              {{"field", "exit"},
               {"type", "ordinal"},
               {"title", nullptr},
               {"sort", {{"field", "order"}}}}}}}}};
}

Chart traffic() {
  return {
      "Traffic of the whole run",
      "Bytes from a rank (row) to another one (column).",
      {"traffic"},
      {{"data", table("traffic")},
       {"mark", {{"type", "rect"}, {"tooltip", true}}},
       {"width", 160},
       {"height", 160},
       {"encoding",
        {{"facet", {{"field", "purpose"}, {"type", "nominal"}, {"title", nullptr}, {"columns", 4}}},
         {"x", {{"field", "to"}, {"type", "ordinal"}, {"title", "to"}}},
         {"y", {{"field", "from"}, {"type", "ordinal"}, {"title", "from"}}},
         {"color",
          {{"field", "bytes"},
           {"type", "quantitative"},
           {"title", "bytes"},
           {"scale", {{"type", "symlog"}, {"scheme", "blues"}}}}}}}}};
}

Chart sources() {
  return {
      "Figures of what makes the model dynamic",
      "",
      {"sources"},
      {{"data", table("sources")},
       {"transform",
        {{{"calculate", "replace(replace(datum.figure, '.', ': '), /_/g, ' ')"}, {"as", "name"}}}},
       {"mark", {{"type", "line"}, {"interpolate", "step-after"}, {"tooltip", true}}},
       {"width", 260},
       {"height", 120},
       {"resolve", {{"scale", {{"y", "independent"}}}}},
       {"encoding",
        {{"facet", {{"field", "name"}, {"type", "nominal"}, {"title", nullptr}, {"columns", 3}}},
         {"x", step_axis()},
         {"y", number("value", "")}}}}};
}

Chart changes() {
  return {"Ranks that came, went or were lost",
          "",
          {"changes"},
          {{"height", 60},
           {"data", table("changes")},
           {"mark", {{"type", "tick"}, {"thickness", 2}, {"tooltip", true}}},
           {"encoding",
            {{"x", step_axis()},
             {"y", {{"field", "kind"}, {"type", "nominal"}, {"title", nullptr}}},
             {"tooltip",
              {{{"field", "step"}, {"type", "quantitative"}},
               {{"field", "text"}, {"type", "nominal"}}}}}}}};
}

Chart loss() {
  Json spec = line_of("loss", "loss");
  spec["height"] = 160;
  spec["encoding"]["y"]["scale"] = {{"zero", false}};
  return {"Loss", "", {"steps"}, std::move(spec)};
}

std::vector<Chart> charts_of_a_run() {
  return {
      layers_by_step(),
      speed(),
      pipelines(),
      loss(),
      folded("Imbalance and bubble",
             "Busy time of the slowest rank over the mean, less 1; the share of a step in which "
             "ranks wait.",
             {{"imbalance", "imbalance"}, {"bubble", "bubble"}}, share_of("value", "share")),
      folded("Step time, measured and predicted", "By replay of the plan before the step.",
             {{"step_s", "measured"}, {"predicted_s", "predicted"}}, number("value", "seconds")),
      by_rank_and_step("Waiting of each rank", "The share of a step.",
                       share_of("idle", "waits", "legend")),
      by_rank_and_step("Memory of each rank", "Resident.", number("memory_mib", "MiB")),
      exits(),
      sources(),
      traffic(),
      changes()};
}

Json json_of(const Chart& chart) {
  return {
      {"title", chart.title}, {"note", chart.note}, {"tables", chart.tables}, {"spec", chart.spec}};
}

void append_escaped(std::string& page, std::string_view text, std::string_view what,
                    std::string_view by) {
  for (std::size_t at = 0;;) {
    const std::size_t found = text.find(what, at);
    page += text.substr(at, found - at);
    if (found == std::string_view::npos) return;
    page += by;
    at = found + what.size();
  }
}

}  // namespace

Json html_report(const std::vector<RunData>& runs) {
  Json document = {{"format", kFormat},
                   {"charts", Json::array()},
                   {"runs", Json::array()},
                   {"together", Json::array()},
                   {"all", {{"steps", Json::array()}}}};
  for (const Chart& chart : charts_of_a_run()) document["charts"].push_back(json_of(chart));
  for (const RunData& run : runs) {
    document["runs"].push_back({{"name", run.name},
                                {"head", run.head},
                                {"layers", run.layer_names},
                                {"seconds", run.layer_seconds},
                                {"tracks", run.tracks},
                                {"tables", run.tables}});
  }
  if (runs.size() < 2) return document;
  for (const RunData& run : runs) {
    for (const Json& step : run.tables.at("steps")) {
      document["all"]["steps"].push_back(
          {{"step", step["step"]}, {"tokens_per_s", step["tokens_per_s"]}, {"run", run.name}});
    }
  }
  Json spec = line_of("tokens_per_s", "tokens/s");
  spec["height"] = 220;
  spec["encoding"]["color"] = {{"field", "run"}, {"type", "nominal"}, {"title", nullptr}};
  document["together"].push_back(json_of({"Speed of all runs", "", {"steps"}, std::move(spec)}));
  return document;
}

Expected<Json> parse_html_report(std::string_view text, std::string_view origin) {
  DYNMO_ASSIGN(Json document, parse_json(text, std::string(origin)));
  const auto is_list = [&](const char* key) {
    return document.contains(key) && document[key].is_array();
  };
  if (!document.is_object() || !document.contains("format") || document["format"] != kFormat ||
      !is_list("charts") || !is_list("runs") || !is_list("together")) {
    return make_error(ErrorCode::kBadInput,
                      "{}: wanted the folder of a run, or a document of format \"{}\"", origin,
                      kFormat);
  }
  return document;
}

std::string html_page(const Json& document, std::string_view script) {
  std::string page;
  std::string_view rest = kPageFrame;
  const auto up_to = [&](std::string_view mark) {
    const std::size_t at = rest.find(mark);
    DYNMO_CHECK(at != std::string_view::npos, "{} in html_page.html", mark);
    page += rest.substr(0, at);
    rest.remove_prefix(at + mark.size());
  };
  up_to("{{document}}");
  append_escaped(page, document.dump(), "<", "\\u003c");
  up_to("{{vega}}");
  append_escaped(page, script, "</script", "<\\/script");
  page += rest;
  return page;
}

}  // namespace dynmo::observe
