// SPDX-License-Identifier: Apache-2.0
#include "dynmo/runtime/ties.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/adamw.h"
#include "dynmo/runtime/pieces.h"
#include "dynmo/transport/tags.h"

namespace dynmo::runtime {
namespace {

model::Parameter& parameter_of(model::LayerState& state, const std::string& name) {
  const auto found = std::find_if(state.parameters.begin(), state.parameters.end(),
                                  [&](const auto& parameter) { return parameter.name == name; });
  DYNMO_CHECK(found != state.parameters.end(), "parameter '{}' in layer {}", name, state.id);
  return *found;
}

Expected<model::ParameterSpec> spec_of(const model::Model& model, LayerId layer,
                                       const std::string& name) {
  if (layer.value < 0 || layer.index() >= model.size()) {
    return make_error(ErrorCode::kBadInput, "a tie names layer {}, the model has {}", layer,
                      model.size());
  }
  for (model::ParameterSpec& spec : model[layer.index()]->parameters()) {
    if (spec.name == name) return std::move(spec);
  }
  return make_error(ErrorCode::kBadInput,
                    "a tie names parameter '{}', which layer {} ('{}') does not have", name, layer,
                    model[layer.index()]->name());
}

// Exchanges `own` with the other rank, and adds the two. Addition of two numbers is commutative, so
// both ranks have the same bits.
Expected<void> exchange_and_add(transport::Transport& pipeline, const Staging& staging, Rank other,
                                transport::Tag tag, at::Tensor own) {
  const transport::Member peer(other.value);
  const at::Tensor mine = staging.to_host(own);
  const at::Tensor theirs = staging.host_buffer(own.sizes(), own.scalar_type());
  std::vector<std::unique_ptr<transport::Operation>> operations;
  for (const auto piece : pieces_of(bytes_of(theirs))) {
    operations.push_back(pipeline.receive(peer, tag, piece));
  }
  for (const auto piece : pieces_of(bytes_of(mine))) {
    operations.push_back(pipeline.send(peer, tag, piece));
  }
  for (const auto& operation : operations) DYNMO_TRY(operation->wait());
  own.add_(staging.to_device(theirs));
  return {};
}

// Returns the rows of `first` that are the tie's second parameter.
at::Tensor rows_of(const model::Tie& tie, const at::Tensor& first) {
  return tie.rows ? first.narrow(0, tie.rows->begin, tie.rows->end - tie.rows->begin) : first;
}

}  // namespace

Expected<void> check_ties(const std::vector<model::Tie>& ties, const model::Model& model) {
  std::set<std::pair<LayerId, std::string>> seen;
  std::map<std::pair<LayerId, std::string>, std::int64_t> rows_end;  // of firsts tied in pieces
  for (const model::Tie& tie : ties) {
    DYNMO_ASSIGN(const model::ParameterSpec first, spec_of(model, tie.first, tie.first_parameter));
    DYNMO_ASSIGN(const model::ParameterSpec second,
                 spec_of(model, tie.second, tie.second_parameter));
    std::vector<std::int64_t> tied = first.shape;
    const std::pair first_key(tie.first, tie.first_parameter);
    bool taken = seen.contains(first_key);
    if (tie.rows) {
      std::int64_t& end = rows_end[first_key];
      taken = taken || tie.rows->begin < end || tie.rows->end > first.shape[0];
      end = tie.rows->end;
      tied[0] = tie.rows->end - tie.rows->begin;
    } else {
      taken = taken || rows_end.contains(first_key);
      seen.insert(first_key);
    }
    if (tied != second.shape || first.weight_decay != second.weight_decay) {
      return make_error(ErrorCode::kBadInput,
                        "a tie of '{}' of shape [{}] and '{}' of shape [{}]: wanted equal shapes "
                        "and weight decay",
                        first.name, fmt::join(tied, ", "), second.name,
                        fmt::join(second.shape, ", "));
    }
    if (tie.first == tie.second || taken ||
        !seen.emplace(tie.second, tie.second_parameter).second) {
      return make_error(ErrorCode::kBadInput,
                        "a tie of '{}' in layer {} and '{}' in layer {}: wanted two layers, and "
                        "each parameter in one tie at most",
                        tie.first_parameter, tie.first, tie.second_parameter, tie.second);
    }
  }
  return {};
}

void take_initial_values(const std::vector<model::Tie>& ties, const model::Model& model,
                         std::uint64_t seed, LayerStates& states) {
  for (const model::Tie& tie : ties) {
    const auto second = states.find(tie.second);
    if (second == states.end()) continue;
    // Initial values are a function of the seed: the first layer need not be here.
    model::LayerState first = model::make_state(*model[tie.first.index()], tie.first, seed);
    parameter_of(second->second, tie.second_parameter)
        .value.copy_(rows_of(tie, parameter_of(first, tie.first_parameter).value));
    model::derive(*model[tie.second.index()], second->second);
  }
}

Expected<void> add_tied_gradients(transport::Transport& pipeline,
                                  const std::vector<model::Tie>& ties, const plan::Plan& plan,
                                  LayerStates& states, const Staging& staging) {
  const auto gradient = [&](LayerId layer, const std::string& name) -> at::Tensor& {
    return parameter_of(states.at(layer), name).gradient;
  };
  const auto first_gradient = [&](const model::Tie& tie) {
    return rows_of(tie, gradient(tie.first, tie.first_parameter));
  };
  const Rank own(pipeline.rank().value);
  // All ranks handle the ties in one order, so no two wait for each other.
  for (const model::Tie& tie : ties) {
    const Rank first = plan.owner(tie.first);
    const Rank second = plan.owner(tie.second);
    const transport::Tag tag = transport::reduction_tag(tie.second);
    if (first == second) {
      if (first != own) continue;
      const at::Tensor sum = first_gradient(tie);
      sum.add_(gradient(tie.second, tie.second_parameter));
      gradient(tie.second, tie.second_parameter).copy_(sum);
    } else if (first == own) {
      DYNMO_TRY(exchange_and_add(pipeline, staging, second, tag, first_gradient(tie)));
    } else if (second == own) {
      DYNMO_TRY(exchange_and_add(pipeline, staging, first, tag,
                                 gradient(tie.second, tie.second_parameter)));
    }
  }
  return {};
}

bool is_second(const std::vector<model::Tie>& ties, LayerId layer, std::string_view parameter) {
  return std::any_of(ties.begin(), ties.end(), [&](const model::Tie& tie) {
    return tie.second == layer && tie.second_parameter == parameter;
  });
}

double squared_norm(const std::vector<model::Tie>& ties, const model::LayerState& state) {
  double total = 0;
  for (const model::Parameter& parameter : state.parameters) {
    if (!is_second(ties, state.id, parameter.name)) total += model::squared_norm(parameter);
  }
  return total;
}

}  // namespace dynmo::runtime
