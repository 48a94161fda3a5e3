// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {
namespace {

namespace autograd = torch::autograd;

// From forward to input_gradient: the graph, held by the edge its output leaves through, so that
// the output itself belongs to the caller alone. From then to weight_gradient: the gradients.
struct Graph final : Stash {
  at::Tensor input;                    // alias of the caller's, a leaf of the graph
  std::vector<at::Tensor> parameters;  // aliases of the state's, leaves of the graph
  autograd::Edge output;               // invalid: nothing in the graph wants a gradient
  std::vector<at::Tensor> gradients;   // of the parameters; undefined: not used by the function
  enum class Phase { kForward, kInputDone, kDone } phase = Phase::kForward;

  void free_graph() {
    output = {};
    input.reset();
    parameters.clear();
  }
};

at::Tensor leaf(const at::Tensor& tensor, bool requires_grad) {
  return tensor.detach().set_requires_grad(requires_grad);
}

class AutogradLayer final : public Layer {
 public:
  AutogradLayer(std::string name, std::vector<ParameterSpec> specs, AutogradFunction function)
      : name_(std::move(name)), specs_(std::move(specs)), function_(std::move(function)) {}

  std::string name() const override { return name_; }
  std::vector<ParameterSpec> parameters() const override { return specs_; }

  at::Tensor forward(const LayerState& state, const at::Tensor& input, const LayerContext& context,
                     std::unique_ptr<Stash>* stash) const override {
    DYNMO_CHECK(state.parameters.size() == specs_.size(), "{} parameters for {}, got {}",
                specs_.size(), name_, state.parameters.size());
    if (stash == nullptr) {
      const at::NoGradGuard no_graph;
      return function_(values(state), input, context, state);
    }
    const at::AutoGradMode with_graph(true);
    auto graph = std::make_unique<Graph>();
    if (input.defined()) graph->input = leaf(input, true);
    for (const Parameter& parameter : state.parameters) {
      graph->parameters.push_back(leaf(operand(parameter), !state.frozen));
    }
    const at::Tensor output = function_(graph->parameters, graph->input, context, state);
    if (output.requires_grad()) graph->output = autograd::impl::gradient_edge(output);
    *stash = std::move(graph);
    return output.detach();
  }

  at::Tensor input_gradient(const LayerState& state, Stash& stash,
                            const at::Tensor& output_gradient,
                            InputGradient wanted) const override {
    auto& graph = dynamic_cast<Graph&>(stash);
    DYNMO_CHECK(graph.phase == Graph::Phase::kForward, "{}: input_gradient once per stash", name_);
    graph.phase = Graph::Phase::kInputDone;
    const bool of_input = wanted == InputGradient::kWanted && graph.input.defined();
    // Layers that are frozen between forward and here no longer want theirs.
    const bool of_parameters = !state.frozen && !graph.parameters.empty();
    std::vector<at::Tensor> gradients =
        differentiate(graph, output_gradient, of_input, of_parameters);
    at::Tensor result;
    if (of_input) {
      result = gradients.front().defined() ? gradients.front() : at::zeros_like(graph.input);
      gradients.erase(gradients.begin());
    }
    graph.gradients = std::move(gradients);
    graph.free_graph();
    return result;
  }

  void weight_gradient(LayerState& state, Stash& stash) const override {
    auto& graph = dynamic_cast<Graph&>(stash);
    DYNMO_CHECK(graph.phase == Graph::Phase::kInputDone,
                "{}: weight_gradient once per stash, after input_gradient", name_);
    graph.phase = Graph::Phase::kDone;
    const at::NoGradGuard no_graph;
    for (std::size_t i = 0; i < graph.gradients.size() && !state.frozen; ++i) {
      if (graph.gradients[i].defined()) state.parameters[i].gradient.add_(graph.gradients[i]);
    }
    graph.gradients.clear();
  }

 private:
  static std::vector<at::Tensor> values(const LayerState& state) {
    std::vector<at::Tensor> result;
    result.reserve(state.parameters.size());
    for (const Parameter& parameter : state.parameters) result.push_back(operand(parameter));
    return result;
  }

  // Gradients of [input], [parameters...]; runs on the calling thread and frees what the graph
  // saved.
  static std::vector<at::Tensor> differentiate(const Graph& graph,
                                               const at::Tensor& output_gradient, bool of_input,
                                               bool of_parameters) {
    autograd::edge_list wanted;
    if (of_input) wanted.push_back(autograd::impl::gradient_edge(graph.input));
    if (of_parameters) {
      for (const at::Tensor& parameter : graph.parameters) {
        wanted.push_back(parameter.requires_grad() ? autograd::impl::gradient_edge(parameter)
                                                   : autograd::Edge());
      }
    }
    if (wanted.empty() || !graph.output.is_valid()) {
      return std::vector<at::Tensor>(wanted.size());
    }
    return autograd::Engine::get_default_engine().execute(
        {graph.output}, {output_gradient}, /*keep_graph=*/false, /*create_graph=*/false,
        /*accumulate_grad=*/false, wanted);
  }

  std::string name_;
  std::vector<ParameterSpec> specs_;
  AutogradFunction function_;
};

}  // namespace

std::shared_ptr<const Layer> autograd_layer(std::string name, std::vector<ParameterSpec> specs,
                                            AutogradFunction function) {
  return std::make_shared<AutogradLayer>(std::move(name), std::move(specs), std::move(function));
}

}  // namespace dynmo::model
