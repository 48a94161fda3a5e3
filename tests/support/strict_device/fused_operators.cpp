// SPDX-License-Identifier: Apache-2.0
// Operators that CUDA has and the CPU lacks, or has in another form: attention of sections, grouped
// products, and counts of integers. They refuse what CUDA's kernels refuse, and write what those
// write, so memory that those leave stays NaN. The limits are those of libtorch 2.11.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_grouped_mm_compositeexplicitautograd_dispatch.h>
#include <torch/library.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string_view>

#include "call_impl.h"
#include "operators_impl.h"

namespace dynmo::strict {
namespace {

using at::Tensor;
using c10::IValue;

// Rows of sections, [rows, heads, size], by the offsets at which sections begin.
struct Section {
  std::int64_t index;
  std::int64_t first;
  std::int64_t rows;
};
void for_each_section(const Tensor& offsets, std::int64_t longest, std::int64_t rows,
                      const std::function<void(const Section&)>& function) {
  const auto* begin = offsets.const_data_ptr<std::int32_t>();
  for (std::int64_t s = 0; s + 1 < offsets.numel(); ++s) {
    const Section section{.index = s, .first = begin[s], .rows = begin[s + 1] - begin[s]};
    TORCH_CHECK(section.rows >= 0 && section.rows <= longest && begin[s + 1] <= rows,
                "strict device: a section of ", section.rows, " rows from ", section.first,
                ", of at most ", longest, " among ", rows);
    if (section.rows > 0) function(section);
  }
}

// Rows of a section, by head.
Tensor heads_of(const Tensor& x_MHK, const Section& section) {
  return x_MHK.narrow(0, section.first, section.rows).transpose(0, 1).to(at::kFloat);
}
void set_rows(const Tensor& x_MHK, const Section& section, const Tensor& values_HNK) {
  x_MHK.narrow(0, section.first, section.rows).copy_(values_HNK.transpose(0, 1));
}
Tensor causal_scores(const Tensor& q_HNK, const Tensor& k_HNK) {
  const std::int64_t rows = q_HNK.size(1);
  return at::matmul(q_HNK, k_HNK.transpose(1, 2))
      .div_(std::sqrt(static_cast<double>(q_HNK.size(2))))
      .masked_fill_(at::ones({rows, rows}, at::kBool).triu_(1),
                    -std::numeric_limits<float>::infinity());
}

// Returns a section's logarithms. Flash has them as [heads, rows], the other one as [sections,
// heads, longest].
Tensor log_sums_of(const Tensor& log_sums, const Section& section) {
  return log_sums.dim() == 2 ? log_sums.narrow(1, section.first, section.rows)
                             : log_sums.select(0, section.index).narrow(1, 0, section.rows);
}

// A call of either operator: [rows, heads, size].
struct Attended {
  Tensor q, k, v, offsets;
  std::int64_t longest;

  // `flash`: refuses what flash attention refuses, else what the other does.
  Attended(const Arguments& call, bool flash)
      : q(call.tensor("query")),
        k(call.tensor("key")),
        v(call.tensor("value")),
        offsets(call.tensor(flash ? "cum_seq_q" : "cu_seqlens_q")),
        longest(call[flash ? "max_q" : "max_seqlen_q"].toInt()) {
    const at::ScalarType type = q.scalar_type();
    const bool half = type == at::kBFloat16 || type == at::kHalf;
    TORCH_CHECK(half || (!flash && type == at::kFloat), "strict device: ", call.name(), " of ",
                type);
    TORCH_CHECK(q.dim() == (flash ? 3 : 4) && (flash || q.size(0) == 1),
                "strict device: ", call.name(), " of shape ", q.sizes());
    TORCH_CHECK(q.size(-1) % 8 == 0 && q.size(-1) <= (flash ? 256 : 1024),
                "strict device: ", call.name(), " of heads of ", q.size(-1));
    TORCH_CHECK(offsets.defined() && offsets.scalar_type() == at::kInt && offsets.is_contiguous() &&
                    offsets.numel() > 1 && offsets.numel() <= 65536,
                "strict device: ", call.name(), " wants contiguous int32 offsets");
    TORCH_CHECK(longest > 0 && longest <= q.size(-3), "strict device: ", call.name(),
                " of sections of up to ", longest, " rows among ", q.size(-3));
    const bool causal = flash ? call["is_causal"].toBool() : call["custom_mask_type"].toInt() == 1;
    TORCH_CHECK(causal && call["dropout_p"].toDouble() == 0 && call["scale"].isNone() &&
                    call.tensor(flash ? "cum_seq_k" : "cu_seqlens_k").is_same(offsets),
                "strict device: ", call.name(), " only causal, of equal sections of q and k");
    for (const Tensor* x : {&q, &k, &v}) {
      TORCH_CHECK(x->scalar_type() == type && x->sizes() == q.sizes() && x->stride(-1) == 1,
                  "strict device: ", call.name(), " of equal shapes and types");
    }
    if (flash) return;
    for (Tensor* x : {&q, &k, &v}) *x = x->squeeze(0);
  }

  [[nodiscard]] Tensor empty_rows() const { return at::empty(q.sizes(), q.options()); }
};

void forward(const char* name, const Attended& x, const Tensor& out, const Tensor& log_sums) {
  launch(name, {x.q, x.k, x.v, x.offsets}, {out, log_sums},
         [q = opened(x.q), k = opened(x.k), v = opened(x.v), offsets = opened(x.offsets),
          to = opened(out), logs = opened(log_sums), longest = x.longest] {
           for_each_section(offsets, longest, q.size(0), [&](const Section& section) {
             const Tensor scores = causal_scores(heads_of(q, section), heads_of(k, section));
             const Tensor log_sum = at::logsumexp(scores, 2);
             log_sums_of(logs, section).copy_(log_sum);
             set_rows(to, section,
                      at::matmul((scores - log_sum.unsqueeze(2)).exp_(), heads_of(v, section)));
           });
         });
}

struct Gradients {
  Tensor q, k, v;
};

Gradients backward(const char* name, const Attended& x, const Tensor& slope, const Tensor& out,
                   const Tensor& log_sums) {
  const Gradients made{x.empty_rows(), x.empty_rows(), x.empty_rows()};
  launch(name, {x.q, x.k, x.v, x.offsets, slope, out, log_sums}, {made.q, made.k, made.v},
         [q = opened(x.q), k = opened(x.k), v = opened(x.v), offsets = opened(x.offsets),
          dy = opened(slope), y = opened(out), logs = opened(log_sums), dq = opened(made.q),
          dk = opened(made.k), dv = opened(made.v), longest = x.longest] {
           const double scale = 1 / std::sqrt(static_cast<double>(q.size(2)));
           for_each_section(offsets, longest, q.size(0), [&](const Section& section) {
             const Tensor q_HNK = heads_of(q, section);
             const Tensor k_HNK = heads_of(k, section);
             const Tensor dy_HNK = heads_of(dy, section);
             const Tensor p =
                 (causal_scores(q_HNK, k_HNK) - log_sums_of(logs, section).unsqueeze(2)).exp_();
             const Tensor row = (dy_HNK * heads_of(y, section)).sum(-1, /*keepdim=*/true);
             const Tensor ds = at::matmul(dy_HNK, heads_of(v, section).transpose(1, 2))
                                   .sub_(row)
                                   .mul_(p)
                                   .mul_(scale);
             set_rows(dq, section, at::matmul(ds, k_HNK));
             set_rows(dk, section, at::matmul(ds.transpose(1, 2), q_HNK));
             set_rows(dv, section, at::matmul(p.transpose(1, 2), dy_HNK));
           });
         });
  return made;
}

void flash_forward(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                   torch::jit::Stack* stack) {
  const Arguments call(op, *stack);
  const Attended x(call, /*flash=*/true);
  const Tensor out = x.empty_rows();
  const Tensor logs = at::empty({x.q.size(1), x.q.size(0)}, x.q.options().dtype(at::kFloat));
  forward(call.name(), x, out, logs);
  const auto whole = x.q.options().dtype(at::kLong);
  torch::jit::push(*stack, out, logs, at::empty({2}, whole), at::empty({}, whole),
                   at::empty({0}, x.q.options()));
}

void flash_backward(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                    torch::jit::Stack* stack) {
  const Arguments call(op, *stack);
  const Attended x(call, /*flash=*/true);
  const Gradients made = backward(call.name(), x, call.tensor("grad_out"), call.tensor("out"),
                                  call.tensor("logsumexp"));
  torch::jit::push(*stack, made.q, made.k, made.v);
}

void efficient_forward(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                       torch::jit::Stack* stack) {
  const Arguments call(op, *stack);
  const Attended x(call, /*flash=*/false);
  const Tensor out = x.empty_rows();
  const Tensor logs = at::empty({x.offsets.numel() - 1, x.q.size(1), (x.longest + 31) / 32 * 32},
                                x.q.options().dtype(at::kFloat));
  forward(call.name(), x, out, logs);
  const auto whole = x.q.options().dtype(at::kLong);
  torch::jit::push(*stack, out.unsqueeze(0), logs, at::empty({}, whole), at::empty({}, whole),
                   x.longest, x.longest);
}

void efficient_backward(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                        torch::jit::Stack* stack) {
  const Arguments call(op, *stack);
  const Attended x(call, /*flash=*/false);
  const Gradients made = backward(call.name(), x, call.tensor("grad_out_").squeeze(0),
                                  call.tensor("out").squeeze(0), call.tensor("logsumexp"));
  torch::jit::push(*stack, made.q.unsqueeze(0), made.k.unsqueeze(0), made.v.unsqueeze(0), Tensor());
}

// One kernel for bf16. The rest reads the offsets on the host, which is a wait.
void grouped_mm(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                torch::jit::Stack* stack) {
  const Arguments call(op, *stack);
  const Tensor a = call.tensor("self");
  const Tensor b = call.tensor("mat2");
  const Tensor ends = call.tensor("offs");
  TORCH_CHECK(a.dim() == 2 && ends.defined() && ends.scalar_type() == at::kInt,
              "strict device: ", call.name(), " of shapes ", a.sizes(), " and ", b.sizes());
  if (a.scalar_type() != at::kBFloat16 || b.scalar_type() != at::kBFloat16) {
    torch::jit::push(*stack, at::compositeexplicitautograd::_grouped_mm(a, b, ends));
    return;
  }
  for (const Tensor* x : {&a, &b}) {
    const bool rows = x->stride(-1) == 1 && x->stride(-2) % 8 == 0;
    const bool columns = x->stride(-2) == 1 && x->stride(-1) % 8 == 0;
    TORCH_CHECK(rows || columns, "strict device: ", call.name(), " of strides ", x->strides(),
                ", which are not multiples of 16 bytes");
  }
  const bool by_rows = b.dim() == 3;
  const Tensor out =
      by_rows ? at::empty({a.size(0), (b.size(2) + 7) / 8 * 8}, a.options()).narrow(1, 0, b.size(2))
              : at::empty({ends.numel(), a.size(0), b.size(1)}, a.options());
  launch(call.name(), {a, b, ends}, {out},
         [x = opened(a), y = opened(b), to = opened(out), until = opened(ends), by_rows] {
           std::int64_t first = 0;
           for (std::int64_t g = 0; g < until.numel(); ++g) {
             const std::int64_t end = until.const_data_ptr<std::int32_t>()[g];
             const std::int64_t count = end - first;
             if (count > 0 && by_rows) {
               to.narrow(0, first, count).copy_(at::mm(x.narrow(0, first, count), y.select(0, g)));
             } else if (count > 0) {
               to.select(0, g).copy_(at::mm(x.narrow(1, first, count), y.narrow(0, first, count)));
             }
             first = end;
           }
         });
  torch::jit::push(*stack, out);
}

// Counts integers, too, which the CPU's kernel does not.
void histc(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  const Arguments call(op, *stack);
  const Tensor self = call.tensor("self");
  const std::int64_t bins = call["bins"].toInt();
  const double min = call["min"].toScalar().toDouble();
  const double max = call["max"].toScalar().toDouble();
  TORCH_CHECK(min < max, "strict device: ", call.name(), " from ", min, " to ", max,
              ", whose limits depend on data");
  const Tensor out = at::empty({bins}, self.options());
  launch(call.name(), {self}, {out}, [x = opened(self), to = opened(out), bins, min, max] {
    to.copy_(at::histc(x.to(at::kDouble), bins, min, max));
  });
  torch::jit::push(*stack, out);
}

}  // namespace

void register_fused(torch::Library& library) {
  using torch::CppFunction;
  library.impl("_flash_attention_forward", CppFunction::makeFromBoxedFunction<&flash_forward>());
  library.impl("_flash_attention_backward", CppFunction::makeFromBoxedFunction<&flash_backward>());
  library.impl("_efficient_attention_forward",
               CppFunction::makeFromBoxedFunction<&efficient_forward>());
  library.impl("_efficient_attention_backward",
               CppFunction::makeFromBoxedFunction<&efficient_backward>());
  library.impl("_grouped_mm", CppFunction::makeFromBoxedFunction<&grouped_mm>());
  library.impl("histc", CppFunction::makeFromBoxedFunction<&histc>());
  register_attention(library);
  register_norms_and_products(library);
}

}  // namespace dynmo::strict
