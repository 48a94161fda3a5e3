// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/autograd_layer.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::model {
namespace {

namespace autograd = torch::autograd;

// Holds the graph from forward() to input_gradient(), by the edges of its outputs, so that the
// outputs themselves belong to the caller. Then holds the gradients until weight_gradient().
struct Graph final : Stash {
  at::Tensor input;                    // alias of the caller's, a leaf of the graph
  std::vector<at::Tensor> parameters;  // aliases of the state's, leaves of the graph
  autograd::Edge hidden;               // invalid if the output needs no gradient
  autograd::Edge loss;
  at::Tensor loss_gradient;           // the context's loss_weight, of the loss's type
  std::vector<at::Tensor> gradients;  // of the parameters; undefined: not used by the function
  enum class Phase { kForward, kInputDone, kDone } phase = Phase::kForward;

  void free_graph() {
    hidden = {};
    loss = {};
    input.reset();
    parameters.clear();
  }
};

at::Tensor leaf(const at::Tensor& tensor, bool requires_grad) {
  return tensor.detach().set_requires_grad(requires_grad);
}

// Returns the edge through which a gradient enters the graph, and detaches `tensor` from the graph.
autograd::Edge edge_of(at::Tensor& tensor) {
  autograd::Edge edge;
  if (!tensor.defined()) return edge;
  if (tensor.requires_grad()) edge = autograd::impl::gradient_edge(tensor);
  tensor = tensor.detach();
  return edge;
}

class AutogradLayer final : public Layer {
 public:
  AutogradLayer(std::string name, std::vector<ParameterSpec> specs, AutogradFunction function,
                AutogradTraits traits)
      : name_(std::move(name)),
        specs_(std::move(specs)),
        function_(std::move(function)),
        traits_(std::move(traits)) {}

  std::string name() const override { return name_; }
  std::vector<ParameterSpec> parameters() const override { return specs_; }
  std::vector<BufferSpec> buffers() const override { return traits_.buffers; }
  std::vector<std::string> figures() const override { return traits_.figures; }
  Needs needs() const override { return traits_.needs; }

  Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                 std::unique_ptr<Stash>* stash) const override {
    DYNMO_CHECK(state.parameters.size() == specs_.size(), "{} parameters for {}, got {}",
                specs_.size(), name_, state.parameters.size());
    if (stash == nullptr) {
      const at::NoGradGuard no_graph;
      return with_rows(function_(values(state), input.x, context, state), input);
    }
    const at::AutoGradMode with_graph(true);
    auto graph = std::make_unique<Graph>();
    if (input.x.defined()) graph->input = leaf(input.x, true);
    for (const Parameter& parameter : state.parameters) {
      graph->parameters.push_back(leaf(compute_value(parameter), !state.frozen));
    }
    Output output = with_rows(function_(graph->parameters, graph->input, context, state), input);
    if (output.loss.defined()) {
      graph->loss_gradient = at::full({}, context.loss_weight, output.loss.options());
    }
    graph->hidden = edge_of(output.hidden.x);
    graph->loss = edge_of(output.loss);
    *stash = std::move(graph);
    return output;
  }

  at::Tensor input_gradient(const LayerState& state, Stash& stash,
                            const at::Tensor& output_gradient,
                            InputGradient wanted) const override {
    auto& graph = dynamic_cast<Graph&>(stash);
    DYNMO_CHECK(graph.phase == Graph::Phase::kForward, "{}: input_gradient once per stash", name_);
    graph.phase = Graph::Phase::kInputDone;
    const bool of_input = wanted == InputGradient::kWanted && graph.input.defined();
    // A layer may have been frozen since forward. It then needs no gradients of parameters.
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
    for (const Parameter& parameter : state.parameters) result.push_back(compute_value(parameter));
    return result;
  }

  static Output with_rows(Output output, const Hidden& input) {
    if (output.hidden.x.defined() && !output.hidden.rows.defined()) output.hidden.rows = input.rows;
    return output;
  }

  // Returns the gradients of [input], [parameters...]. Runs on the calling thread, and frees the
  // graph's saved tensors.
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
    autograd::edge_list outputs;
    std::vector<at::Tensor> gradients;
    const auto add = [&](const autograd::Edge& output, const at::Tensor& gradient) {
      if (!output.is_valid() || !gradient.defined()) return;
      outputs.push_back(output);
      gradients.push_back(gradient);
    };
    add(graph.hidden, output_gradient);
    add(graph.loss, graph.loss_gradient);
    if (wanted.empty() || outputs.empty()) return std::vector<at::Tensor>(wanted.size());
    return autograd::Engine::get_default_engine().execute(outputs, gradients, /*keep_graph=*/false,
                                                          /*create_graph=*/false,
                                                          /*accumulate_grad=*/false, wanted);
  }

  std::string name_;
  std::vector<ParameterSpec> specs_;
  AutogradFunction function_;
  AutogradTraits traits_;
};

}  // namespace

std::shared_ptr<const Layer> autograd_layer(std::string name, std::vector<ParameterSpec> specs,
                                            AutogradFunction function, AutogradTraits traits) {
  return std::make_shared<AutogradLayer>(std::move(name), std::move(specs), std::move(function),
                                         std::move(traits));
}

std::shared_ptr<const Layer> autograd_layer(std::string name, std::vector<ParameterSpec> specs,
                                            HiddenFunction function, AutogradTraits traits) {
  AutogradFunction with_output = [function = std::move(function)](
                                     const std::vector<at::Tensor>& parameters,
                                     const at::Tensor& input, const LayerContext& context,
                                     const LayerState& state) {
    Output output;
    output.hidden.x = function(parameters, input, context, state);
    return output;
  };
  return autograd_layer(std::move(name), std::move(specs), std::move(with_output),
                        std::move(traits));
}

}  // namespace dynmo::model
