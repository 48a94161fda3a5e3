// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "dynmo/kernels/grouped_products.h"
#include "dynmo/model/expert_rows_impl.h"
#include "dynmo/model/family_layers_impl.h"
#include "dynmo/model/hand_written.h"

namespace dynmo::model {
namespace {

using at::Tensor;

constexpr std::uint64_t kExpertsDropout = 1;
constexpr std::int64_t kUnitsAtOnce = 8;  // of grouped products (kernels::group_form)

struct SavedMoe : Saved {
  Tensor x_ND;
  Tensor inverse_N1;
  Routing routing;
  double loss_weight = 0;
  kernels::RowGroups groups;  // rows by expert, on a device with tokens
  // The tensors of each expert's rows, undefined if it has none. On a device one tensor has all
  // rows.
  std::vector<Tensor> gate_MF, up_MF;  // from input_gradient on, their gradients
  std::vector<Tensor> product_MF;      // silu(gate) * up, from input_gradient on
  std::vector<Tensor> out_MD;          // from input_gradient on, its gradient
  Tensor scores_gradient_NE;
  Tensor mask;
  Tensor norm_gradient_D;

  std::vector<Tensor> tensors() const override {
    std::vector<Tensor> all = {x_ND,
                               inverse_N1,
                               routing.probabilities_NE,
                               routing.log_sum_exp_N,
                               routing.experts_NK,
                               routing.gates_NK,
                               routing.places_NK,
                               routing.tokens_A,
                               routing.entries_A,
                               routing.starts,
                               routing.assigned_E,
                               scores_gradient_NE,
                               mask,
                               norm_gradient_D};
    for (const auto& rows : {gate_MF, up_MF, product_MF, out_MD, groups.tensors()}) {
      all.insert(all.end(), rows.begin(), rows.end());
    }
    return all;
  }
};

Specs moe_specs(ParameterSpec norm, const LlamaConfig& config, const MoeConfig& moe) {
  const std::int64_t hidden = config.shape.hidden;
  const std::int64_t width = moe.intermediate > 0 ? moe.intermediate : config.shape.intermediate;
  Specs specs = {std::move(norm), matrix("block_sparse_moe.gate.weight", moe.router.experts, hidden,
                                         config.init_std)};
  for (std::int64_t e = 0; e < moe.router.experts; ++e) {
    const auto name = [e](const char* matrix) {
      return fmt::format("block_sparse_moe.experts.{}.{}.weight", e, matrix);
    };
    const UnitAxis of_rows = {.count = width, .set = e};
    const UnitAxis of_columns = {.count = width, .axis = 1, .set = e};
    const double last_std = residual_init_std(config.init_std, config.shape.blocks);
    specs.push_back(with_units(block_matrix(name("w1"), width, hidden, config.init_std), of_rows));
    specs.push_back(with_units(block_matrix(name("w3"), width, hidden, config.init_std), of_rows));
    specs.push_back(with_units(block_matrix(name("w2"), hidden, width, last_std), of_columns));
  }
  return specs;
}

// Returns whether an expert's products use our own kernels. The four products below ask this.
bool by_own_kernels(const Parameter& parameter, const Tensor& x) {
  return !parameter.pattern && kernels::has_own_product(x, compute_value(parameter));
}
Tensor expert_times(const Parameter& parameter, const Tensor& x_MI) {
  if (!by_own_kernels(parameter, x_MI)) return times(parameter, x_MI).contiguous();
  Tensor y_MO = at::empty({x_MI.size(0), compute_value(parameter).size(0)}, x_MI.options());
  kernels::own_product(y_MO, x_MI, compute_value(parameter).t(), kernels::gemm::Result::kSet);
  return y_MO;
}
Tensor expert_times_transposed(const Parameter& parameter, const Tensor& y_MO) {
  if (!by_own_kernels(parameter, y_MO)) return times_transposed(parameter, y_MO);
  Tensor x_MI = at::empty({y_MO.size(0), compute_value(parameter).size(1)}, y_MO.options());
  kernels::own_product(x_MI, y_MO, compute_value(parameter), kernels::gemm::Result::kSet);
  return x_MI;
}
void add_expert_times_transposed(Tensor& sum_MI, const Parameter& parameter, const Tensor& y_MO) {
  if (!by_own_kernels(parameter, y_MO)) return add_times_transposed(sum_MI, parameter, y_MO);
  kernels::own_product(sum_MI, y_MO, compute_value(parameter), kernels::gemm::Result::kAddTo);
}
void add_expert_product(Parameter& parameter, const Tensor& dy_MO, const Tensor& x_MI) {
  if (!by_own_kernels(parameter, x_MI)) return add_product(parameter, dy_MO, x_MI);
  kernels::own_product(parameter.gradient, dy_MO.t(), x_MI, kernels::gemm::Result::kAddTo);
}

class MoeLayer final : public HandWritten<SavedMoe> {
 public:
  MoeLayer(std::string name, Specs specs, const LlamaConfig& config, const MoeConfig& moe)
      : HandWritten(std::move(name), std::move(specs)), config_(config), moe_(moe) {}

  std::vector<std::string> figures() const override { return moe_figures(experts()); }
  std::vector<BufferSpec> buffers() const override {
    if (moe_.router.router != MoeRouter::kBias) return {};
    return {{.name = kMoeBias, .shape = {experts()}}};
  }

 private:
  enum { kNorm, kRouter, kExperts };      // then three matrices an expert
  enum { kGate, kUp, kDown, kMatrices };  // of an expert
  std::int64_t experts() const { return moe_.router.experts; }
  static std::size_t at_matrix(std::size_t expert, std::size_t matrix) {
    return kExperts + kMatrices * expert + matrix;
  }

  Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                 SavedMoe& saved) const override {
    saved.x_ND = rows(input.x);
    const auto [n_ND, inverse_N1] =
        kernels::rms_norm(saved.x_ND, value(state, kNorm), config_.rms_epsilon);
    saved.inverse_N1 = inverse_N1;
    saved.loss_weight = context.loss_weight;
    saved.routing =
        route(moe_.router, router_product(n_ND, state.parameters[kRouter].value),
              state.buffers.empty() ? Tensor() : state.buffers.front().value, context.pass);
    if (n_ND.is_cpu()) {
      through_experts(state.parameters, n_ND, saved);
    } else {
      through_experts_on_device(state.parameters, n_ND, saved);
    }
    const Tensor update_ND = summed_by_token(saved.out_MD, saved.routing, saved.x_ND, Gates::kYes);
    saved.mask = dropout_mask(update_ND, config_.dropout, state, context, kExpertsDropout);
    return {.hidden = {with_residual(update_ND, saved.mask, config_.dropout, saved.x_ND)
                           .view(input.x.sizes()),
                       input.rows},
            .figures = moe_figures_of(saved.routing),
            .later_figures = saved.routing.later_figures};
  }

  Tensor input_gradient(const LayerState& state, SavedMoe& saved, const Tensor& output_gradient,
                        InputGradient wanted) const override {
    const Tensor dy_ND = rows(output_gradient);
    const Tensor gates_gradient_NK =
        through_gates(saved.out_MD, saved.routing, masked(dy_ND, saved.mask, config_.dropout));
    saved.mask.reset();
    const std::vector<Parameter>& p = state.parameters;
    const std::vector<Tensor> n_gradient_MD =
        dy_ND.is_cpu() ? back_through_experts(p, saved) : back_through_experts_on_device(p, saved);
    Tensor n_gradient_ND = summed_by_token(n_gradient_MD, saved.routing, saved.x_ND, Gates::kNo);
    saved.scores_gradient_NE =
        routing_gradient(moe_.router, saved.routing, gates_gradient_NK, saved.loss_weight);
    n_gradient_ND.add_(
        at::mm(saved.scores_gradient_NE, p[kRouter].value).to(n_gradient_ND.scalar_type()));
    kernels::NormGradient norm = kernels::norm_gradient(n_gradient_ND, saved.x_ND, saved.inverse_N1,
                                                        value(state, kNorm), wanted, dy_ND);
    saved.norm_gradient_D = std::move(norm.weight_D);
    if (wanted == InputGradient::kNotWanted) return {};
    return norm.x_ND.view(output_gradient.sizes());
  }

  void weight_gradient(LayerState& state, SavedMoe& saved) const override {
    const Tensor n_ND = kernels::normed_again(saved.x_ND, saved.inverse_N1, value(state, kNorm),
                                              config_.rms_epsilon);
    const Tensor n_AD = expert_rows(n_ND, saved.routing);
    std::vector<Parameter>& p = state.parameters;
    p[kNorm].gradient.add_(saved.norm_gradient_D);
    p[kRouter].gradient.addmm_(saved.scores_gradient_NE.t(),
                               n_ND.to(saved.scores_gradient_NE.scalar_type()));
    if (!n_ND.is_cpu()) return add_products_on_device(p, n_AD, saved);
    for (std::size_t e = 0; e < count(); ++e) {
      if (rows_of(saved, e) == 0) continue;
      const Tensor n_MD = slice(n_AD, saved, e);
      add_expert_product(p[at_matrix(e, kGate)], saved.gate_MF[e], n_MD);
      add_expert_product(p[at_matrix(e, kUp)], saved.up_MF[e], n_MD);
      add_expert_product(p[at_matrix(e, kDown)], saved.out_MD[e], saved.product_MF[e]);
    }
  }

  // Computes each expert's gate, up and result for the rows of its tokens.
  void through_experts(const std::vector<Parameter>& p, const Tensor& n_ND, SavedMoe& saved) const {
    const Tensor n_AD = expert_rows(n_ND, saved.routing);
    for (std::size_t e = 0; e < count(); ++e) {
      Tensor gate, up, out;
      if (rows_of(saved, e) > 0) {
        const Tensor n_MD = slice(n_AD, saved, e);
        gate = expert_times(p[at_matrix(e, kGate)], n_MD);
        up = expert_times(p[at_matrix(e, kUp)], n_MD);
        out = expert_times(p[at_matrix(e, kDown)], kernels::swiglu(gate, up));
      }
      saved.gate_MF.push_back(std::move(gate));
      saved.up_MF.push_back(std::move(up));
      saved.out_MD.push_back(std::move(out));
    }
  }
  // Returns the gradients of the experts' rows, given those of their results in out_MD.
  std::vector<Tensor> back_through_experts(const std::vector<Parameter>& p, SavedMoe& saved) const {
    std::vector<Tensor> n_gradient_MD(count());
    saved.product_MF.resize(count());
    for (std::size_t e = 0; e < count(); ++e) {
      if (rows_of(saved, e) == 0) continue;
      saved.product_MF[e] = expert_times_transposed(p[at_matrix(e, kDown)], saved.out_MD[e]);
      kernels::swiglu_gradient(saved.gate_MF[e], saved.up_MF[e], saved.product_MF[e]);
      n_gradient_MD[e] = expert_times_transposed(p[at_matrix(e, kGate)], saved.gate_MF[e]);
      add_expert_times_transposed(n_gradient_MD[e], p[at_matrix(e, kUp)], saved.up_MF[e]);
    }
    return n_gradient_MD;
  }

  // Like through_experts(), for all experts at once, on a device. The host does not know the
  // numbers of their rows.
  void through_experts_on_device(const std::vector<Parameter>& p, const Tensor& n_ND,
                                 SavedMoe& saved) const {
    saved.gate_MF = saved.up_MF = saved.out_MD = {Tensor()};
    if (n_ND.size(0) == 0) return;
    const Tensor n_AD = expert_rows(n_ND, saved.routing);
    const Tensor gate_EFD = stacked(p, kGate);
    saved.groups =
        kernels::group_rows(saved.routing.starts, n_AD.size(0),
                            kernels::group_form(n_AD, {gate_EFD.size(1), gate_EFD.size(2)}));
    Tensor& gate = saved.gate_MF.front();
    Tensor& up = saved.up_MF.front();
    gate = kernels::grouped_times(saved.groups, n_AD, gate_EFD);
    up = kernels::grouped_times(saved.groups, n_AD, stacked(p, kUp));
    saved.out_MD.front() =
        kernels::grouped_times(saved.groups, kernels::swiglu(gate, up), stacked(p, kDown));
  }
  std::vector<Tensor> back_through_experts_on_device(const std::vector<Parameter>& p,
                                                     SavedMoe& saved) const {
    saved.product_MF = {Tensor()};
    const Tensor& out_gradient = saved.out_MD.front();
    if (!out_gradient.defined()) return {Tensor()};
    Tensor& product = saved.product_MF.front();
    Tensor& gate = saved.gate_MF.front();
    Tensor& up = saved.up_MF.front();
    product = kernels::grouped_times_transposed(saved.groups, out_gradient, stacked(p, kDown));
    kernels::swiglu_gradient(gate, up, product);
    return {kernels::grouped_times_transposed(saved.groups, gate, stacked(p, kGate))
                .add_(kernels::grouped_times_transposed(saved.groups, up, stacked(p, kUp)))};
  }
  void add_products_on_device(std::vector<Parameter>& p, const Tensor& n_AD,
                              const SavedMoe& saved) const {
    if (n_AD.size(0) == 0) return;
    const auto add = [&](std::size_t matrix, const Tensor& dy_AO, const Tensor& x_AI) {
      const Tensor sums_EOI = kernels::grouped_gradient(saved.groups, dy_AO, x_AI);
      for (std::size_t e = 0; e < count(); ++e) {
        Tensor& gradient = p[at_matrix(e, matrix)].gradient;
        const Tensor sum_OI = sums_EOI.select(0, static_cast<std::int64_t>(e));
        gradient.add_(sum_OI.narrow(0, 0, gradient.size(0)).narrow(1, 0, gradient.size(1)));
      }
    };
    add(kGate, saved.gate_MF.front(), n_AD);
    add(kUp, saved.up_MF.front(), n_AD);
    add(kDown, saved.out_MD.front(), saved.product_MF.front());
  }

  // Returns a matrix of all experts as one tensor. Units that an expert has lost, or that round the
  // width to a multiple of 8, are 0, so they add nothing.
  Tensor stacked(const std::vector<Parameter>& p, std::size_t matrix) const {
    std::vector<Tensor> all;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    for (std::size_t e = 0; e < count(); ++e) {
      all.push_back(compute_value(p[at_matrix(e, matrix)]));
      rows = std::max(rows, all.back().size(0));
      columns = std::max(columns, all.back().size(1));
    }
    std::int64_t& units = matrix == kDown ? columns : rows;
    units = (units + kUnitsAtOnce - 1) / kUnitsAtOnce * kUnitsAtOnce;
    const auto whole = [&](const Tensor& x) { return x.size(0) == rows && x.size(1) == columns; };
    if (std::ranges::all_of(all, whole)) return at::stack(all);
    Tensor stack = at::zeros({experts(), rows, columns}, all.front().options());
    for (std::int64_t e = 0; e < experts(); ++e) {
      const Tensor& one = all[static_cast<std::size_t>(e)];
      stack.select(0, e).narrow(0, 0, one.size(0)).narrow(1, 0, one.size(1)).copy_(one);
    }
    return stack;
  }

  // Computes the router's scores, in fp32 or more: neither its matrix nor a sum is rounded to bf16.
  static Tensor router_product(const Tensor& n_ND, const Tensor& router_ED) {
    return at::linear(n_ND.to(router_ED.scalar_type()), router_ED);
  }
  std::size_t count() const { return static_cast<std::size_t>(experts()); }
  static std::int64_t rows_of(const SavedMoe& saved, std::size_t expert) {
    return saved.routing.offsets[expert + 1] - saved.routing.offsets[expert];
  }
  static Tensor slice(const Tensor& x_AD, const SavedMoe& saved, std::size_t expert) {
    return x_AD.narrow(0, saved.routing.offsets[expert], rows_of(saved, expert));
  }

  LlamaConfig config_;
  MoeConfig moe_;
};

}  // namespace

std::shared_ptr<const Layer> moe_layer(std::string name, ParameterSpec norm,
                                       const LlamaConfig& config, const MoeConfig& moe) {
  return std::make_shared<MoeLayer>(std::move(name), moe_specs(std::move(norm), config, moe),
                                    config, moe);
}

}  // namespace dynmo::model
