// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/html_page.h"

#include <fmt/format.h>

#include <utility>

namespace dynmo::observe {
namespace {

constexpr std::string_view kFormat = "dynmo-html-report-1";

Json number(const char* field, const char* title) {
  return {{"field", field}, {"type", "quantitative"}, {"title", title}};
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
               {"transform", {{{"calculate", "datum.layer + 1"}, {"as", "above"}}}},
               {"mark", {{"type", "rect"}, {"tooltip", true}}},
               {"encoding",
                {{"x", step_axis()},
                 {"x2", {{"field", "to_step"}}},
                 {"y", number("layer", "layer")},
                 {"y2", {{"field", "above"}}},
                 {"color",
                  {{"field", "seconds"},
                   {"type", "quantitative"},
                   {"title", "seconds"},
                   {"scale", {{"scheme", "viridis"}}}}}}}};
  cost["encoding"]["y"]["scale"] = {{"reverse", true}, {"nice", false}};
  Json cuts = {
      {"data", table("cuts")},
      {"mark", {{"type", "rule"}, {"color", "white"}, {"strokeWidth", 1.5}}},
      {"encoding",
       {{"x", step_axis()}, {"x2", {{"field", "to_step"}}}, {"y", number("layer", "layer")}}}};
  return {"Cost of each layer, and where the pipeline is cut",
          "Seconds of a micro-batch, forward and backward. White lines: a rank's layers end there.",
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
  return {
      "Speed, and every decision of the controller",
      "A line for each plan that was made; its text is the reason.",
      {"steps", "decisions"},
      {{"height", 200}, {"layer", {line_of("tokens_per_s", "tokens/s"), std::move(decisions)}}}};
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

Chart folded(std::string title, std::string note, Json fields, const char* axis) {
  return {std::move(title),
          std::move(note),
          {"steps"},
          {{"height", 160},
           {"data", table("steps")},
           {"transform", {{{"fold", std::move(fields)}}}},
           {"mark", {{"type", "line"}, {"interpolate", "step-after"}, {"tooltip", true}}},
           {"encoding",
            {{"x", step_axis()},
             {"y", number("value", axis)},
             {"color", {{"field", "key"}, {"type", "nominal"}, {"title", nullptr}}}}}}};
}

Chart by_rank_and_step(std::string title, std::string note, const char* field, const char* unit) {
  Json spec = {{"height", 160},
               {"data", table("ranks")},
               {"mark", {{"type", "rect"}, {"tooltip", true}}},
               {"encoding",
                {{"x", step_axis()},
                 {"x2", {{"field", "to_step"}}},
                 {"y", {{"field", "rank"}, {"type", "ordinal"}, {"title", "rank"}}},
                 {"color",
                  {{"field", field},
                   {"type", "quantitative"},
                   {"title", unit},
                   {"scale", {{"scheme", "magma"}}}}}}}};
  return {std::move(title), std::move(note), {"ranks"}, std::move(spec)};
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
       {"mark", {{"type", "line"}, {"interpolate", "step-after"}, {"tooltip", true}}},
       {"width", 260},
       {"height", 120},
       {"resolve", {{"scale", {{"y", "independent"}}}}},
       {"encoding",
        {{"facet", {{"field", "figure"}, {"type", "nominal"}, {"title", nullptr}, {"columns", 3}}},
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
             {"imbalance", "bubble"}, ""),
      folded("Step time, measured and predicted", "By replay of the plan before the step.",
             {"step_s", "predicted_s"}, "seconds"),
      by_rank_and_step("Waiting of each rank", "The share of a step.", "idle", "share"),
      by_rank_and_step("Memory of each rank", "Resident.", "memory_bytes", "bytes"),
      sources(),
      traffic(),
      changes()};
}

Json json_of(const Chart& chart) {
  return {
      {"title", chart.title}, {"note", chart.note}, {"tables", chart.tables}, {"spec", chart.spec}};
}

constexpr std::string_view kHead = R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>DynMo report</title>
<style>
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { margin: 1.5rem auto; padding: 0 1rem; max-width: 90rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; } h3 { font-size: 1rem; margin: 1.2rem 0 0; }
p { margin: .1rem 0 .4rem; opacity: .75; }
.runs { display: grid; gap: 2rem; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .1rem .7rem .1rem 0; text-align: left; border-bottom: 1px solid #8884; }
.chart { overflow-x: auto; } .chart svg { max-width: 100%; height: auto; }
@media print { :root { color-scheme: light; } .runs { display: block; } section { break-inside: avoid; } svg text { fill: #222 !important; } }
</style></head><body><h1>DynMo report</h1><div id="about"></div><div id="together"></div><div id="runs" class="runs"></div>
<script type="application/json" id="document">)";

// Draws each chart with the tables that it names.
constexpr std::string_view kTail = R"page(<script>
const report = JSON.parse(document.getElementById("document").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const ink = dark ? "#ddd" : "#222";
const config = {
  background : null,
  view : {stroke : null},
  axis : {labelColor : ink, titleColor : ink, gridOpacity : 0.3},
  legend : {labelColor : ink, titleColor : ink},
  header : {labelColor : ink, titleColor : ink}
};
const make = (parent, tag, text, kind) => {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  if (kind) element.className = kind;
  return parent.appendChild(element);
};
const draw = (parent, chart, tables) => {
  const section = make(parent, "section");
  make(section, "h3", chart.title);
  if (chart.note) make(section, "p", chart.note);
  const datasets = Object.fromEntries(chart.tables.map(name => [name, tables[name]]));
  const drawn = make(section, "div", "", "chart");
  drawn.style.width = "100%";
  // Vega-Lite wants a number where a chart has facets.
  const facet = chart.spec.encoding && chart.spec.encoding.facet;
  const width = {width : facet ? Math.max(drawn.clientWidth - 110, 200) : "container"};
  const spec = {... width, ... chart.spec, datasets, config};
  if (spec.layer) spec.layer = spec.layer.filter(layer => datasets[layer.data.name].length > 0);
  vegaEmbed(drawn, spec,
            {actions : false, renderer : "svg"})
      .catch(error => make(section, "p", String(error)));
};
if (report.title) document.title = document.querySelector("h1").textContent = report.title;
for (const line of report.about || []) make(document.getElementById("about"), "p", line);
if (report.wide) document.getElementById("runs").className = "";
for (const chart of report.together) draw(document.getElementById("together"), chart, report.all);
for (const run of report.runs) {
  run.tables.layers = run.seconds.flatMap((row, layer) => row.map((seconds, i) =>
    ({layer, name: run.layers[layer], seconds, step: run.tables.steps[i].step, to_step: run.tables.steps[i].to_step})));
  run.tables.spans = run.tracks.flatMap(({plan, rank, actions, start_s, end_s}) => actions.map((action, i) =>
    ({plan, rank, action, kind: action.replace(/[0-9]/g, ""), start_s: start_s[i], end_s: end_s[i]})));
  const column = make(document.getElementById("runs"), "div");
  make(column, "h2", run.name);
  for (const chart of report.charts) {
    if ((run.tables[chart.tables[0]] || []).length > 0) draw(column, chart, run.tables);
  }
  const grid = run.rows && make(column, "table");
  for (const [i, row] of (run.rows || []).entries()) {
    const line = make(grid, "tr");
    for (const cell of row) make(line, i > 0 ? "td" : "th", cell);
  }
}
</script></body></html>
)page";

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
  std::string page(kHead);
  append_escaped(page, document.dump(), "<", "\\u003c");
  page += "</script>\n<script>";
  append_escaped(page, script, "</script", "<\\/script");
  page += "</script>\n";
  page += kTail;
  return page;
}

}  // namespace dynmo::observe
