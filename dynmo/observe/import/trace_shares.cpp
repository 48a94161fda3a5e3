// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/import/trace_shares.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <span>
#include <string_view>

#include "dynmo/core/median.h"
#include "dynmo/cost/blocks.h"

namespace dynmo::observe {
namespace {

// The fields of one pass, for a stage and for a layer.
struct PassFields {
  double StageTimes::*stage;
  double cost::LayerCost::*layer;
};
constexpr std::array kPassFields = {
    PassFields{&StageTimes::forward_s, &cost::LayerCost::forward_s},
    PassFields{&StageTimes::input_s, &cost::LayerCost::backward_input_s},
    PassFields{&StageTimes::weight_s, &cost::LayerCost::backward_weight_s}};

Error wrong_blocks(const StageLayers& layers, std::string_view wanted) {
  return make_error(ErrorCode::kBadInput, "--blocks is {}, wanted {}",
                    fmt::join(layers.blocks, ","), wanted);
}

cost::ModelCost one_layer_each(const std::vector<StageTimes>& stages) {
  cost::ModelCost model;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    cost::LayerCost layer;
    layer.name = fmt::format("stages.{}", s);
    for (const PassFields& pass : kPassFields) layer.*pass.layer = stages[s].*pass.stage;
    model.layers.push_back(std::move(layer));
  }
  return model;
}

// Returns the time of a block: the median over the stages that hold only blocks. With two stages it
// is that of the first stage.
double block_time(const std::vector<StageTimes>& stages, const std::vector<int>& blocks,
                  double StageTimes::*pass) {
  std::vector<double> times;
  for (std::size_t s = 1; s + 1 < stages.size(); ++s) {
    times.push_back(stages[s].*pass / blocks[s]);
  }
  if (times.empty() && stages.size() == 2) times.push_back(stages[0].*pass / blocks[0]);
  return median(std::move(times));
}

// Divides the time `all` of a stage among its layers. The embedding or the head gets what exceeds
// the time `block` for each block. The blocks share the rest.
void share_equally(std::span<cost::LayerCost> parts, double all, double block,
                   double cost::LayerCost::*pass) {
  const auto blocks = static_cast<double>(std::ranges::count_if(
      parts, [](const cost::LayerCost& layer) { return cost::is_block(layer.name); }));
  const double rest = block > 0 ? std::max(0.0, all - blocks * block) : 0;
  const double others = static_cast<double>(parts.size()) - blocks;
  for (cost::LayerCost& layer : parts) {
    if (!cost::is_block(layer.name)) {
      layer.*pass = rest / others;
    } else {
      layer.*pass = (others > 0 ? all - rest : all) / blocks;
    }
  }
}

Expected<cost::ModelCost> equal_blocks(const std::vector<StageTimes>& stages,
                                       const StageLayers& layers) {
  cost::ModelCost model;
  std::vector<std::size_t> sizes;
  int block = 0;
  const auto add = [&](std::string name) {
    cost::LayerCost layer;
    layer.name = std::move(name);
    model.layers.push_back(std::move(layer));
  };
  for (std::size_t s = 0; s < stages.size(); ++s) {
    const std::size_t before = model.layers.size();
    if (layers.blocks[s] < 1) return wrong_blocks(layers, "at least 1 block a stage");
    if (s == 0) add("embedding");
    for (int i = 0; i < layers.blocks[s]; ++i) add(fmt::format("blocks.{}", block++));
    if (s + 1 == stages.size()) add("head");
    sizes.push_back(model.layers.size() - before);
  }
  for (const PassFields& pass : kPassFields) {
    const double time = block_time(stages, layers.blocks, pass.stage);
    std::size_t begin = 0;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      share_equally(std::span(model.layers).subspan(begin, sizes[s]), stages[s].*pass.stage, time,
                    pass.layer);
      begin += sizes[s];
    }
  }
  return model;
}

// Returns the number of layers of each stage: its blocks' layers, the embedding and the head.
Expected<std::vector<std::size_t>> layers_of_stages(const StageLayers& layers) {
  std::vector<std::size_t> sizes;
  std::size_t next = 0;
  const auto& all = layers.formulas.layers;
  for (std::size_t s = 0; s < layers.blocks.size(); ++s) {
    const std::size_t before = next;
    int blocks = 0;
    std::string_view last;
    for (; next < all.size(); ++next) {
      if (!cost::is_block(all[next].name)) {
        if (blocks == 0 && s == 0) continue;          // the embedding
        if (s + 1 == layers.blocks.size()) continue;  // the head
        break;
      }
      const std::string_view module = cost::module_of(all[next].name);
      if (module != last && blocks++ == layers.blocks[s]) break;
      last = module;
    }
    if (next == before) return wrong_blocks(layers, "a layer in each stage");
    sizes.push_back(next - before);
  }
  return sizes;
}

void share_by_formulas(std::span<cost::LayerCost> parts, double all,
                       double cost::LayerCost::*pass) {
  const double sum =
      std::transform_reduce(parts.begin(), parts.end(), 0.0, std::plus<>(),
                            [&](const cost::LayerCost& layer) { return layer.*pass; });
  for (cost::LayerCost& layer : parts) {
    const double share = sum > 0 ? layer.*pass / sum : 1 / static_cast<double>(parts.size());
    layer.*pass = share * all;
  }
}

Expected<cost::ModelCost> by_formulas(const std::vector<StageTimes>& stages,
                                      const StageLayers& layers) {
  cost::ModelCost model = layers.formulas;
  std::set<std::string_view> modules;
  for (const cost::LayerCost& layer : model.layers) {
    if (cost::is_block(layer.name)) modules.insert(cost::module_of(layer.name));
  }
  const int blocks = std::accumulate(layers.blocks.begin(), layers.blocks.end(), 0);
  if (blocks != static_cast<int>(modules.size())) {
    return wrong_blocks(layers, fmt::format("the {} blocks of {}, not {}", modules.size(),
                                            layers.formulas_of, blocks));
  }
  DYNMO_ASSIGN(const std::vector<std::size_t> sizes, layers_of_stages(layers));
  std::size_t begin = 0;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    for (const PassFields& pass : kPassFields) {
      share_by_formulas(std::span(model.layers).subspan(begin, sizes[s]), stages[s].*pass.stage,
                        pass.layer);
    }
    begin += sizes[s];
  }
  return model;
}

}  // namespace

Expected<SharedTimes> share_out(const std::vector<StageTimes>& stages, const StageLayers& layers) {
  if (layers.blocks.empty()) {
    if (layers.formulas.size() > 0) {
      return make_error(
          ErrorCode::kBadInput,
          "--model was given without --blocks, wanted the blocks of each of {} "
          "stages, such as --blocks {}",
          stages.size(),
          fmt::join(std::vector<int>(std::min<std::size_t>(stages.size(), 4), 4), ","));
    }
    return SharedTimes{one_layer_each(stages),
                       "each stage is one layer, which a plan cannot divide: --blocks shares its "
                       "time out over its blocks"};
  }
  constexpr int kMaxBlocks = 1 << 16;
  for (const int blocks : layers.blocks) {
    if (blocks < 0 || blocks > kMaxBlocks) {
      return wrong_blocks(layers, fmt::format("numbers from 0 to {}", kMaxBlocks));
    }
  }
  if (layers.blocks.size() != stages.size()) {
    return wrong_blocks(layers, fmt::format("one number for each of the {} stages", stages.size()));
  }
  const std::string times = fmt::format("times of {} stages are shared out over {} blocks",
                                        stages.size(), fmt::join(layers.blocks, ", "));
  if (layers.formulas.size() == 0) {
    DYNMO_ASSIGN(cost::ModelCost model, equal_blocks(stages, layers));
    return SharedTimes{std::move(model),
                       times +
                           ", alike in a stage; embedding and head have what their stages take "
                           "beyond the others"};
  }
  DYNMO_ASSIGN(cost::ModelCost model, by_formulas(stages, layers));
  return SharedTimes{std::move(model),
                     fmt::format("{}, by the formulas for {}, which bytes and updates are from",
                                 times, layers.formulas_of)};
}

}  // namespace dynmo::observe
