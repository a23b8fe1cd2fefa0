// A decoding step over static rows on a CPU: see retain/kernels/decode_step/__init__.py.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

using at::Tensor;

namespace {

// Of a query head: its logits over the row, in place of which come their exponentials; returns their sum.
template <typename A>
A softmax_(A* logits, int64_t count, bool has_sink, A sink) {
  A top = has_sink ? sink : -std::numeric_limits<A>::infinity();
  for (int64_t j = 0; j < count; ++j) top = std::max(top, logits[j]);
  A sum = has_sink ? std::exp(sink - top) : A(0);
  for (int64_t j = 0; j < count; ++j) {
    logits[j] = std::exp(logits[j] - top);
    sum += logits[j];
  }
  return sum;
}

template <typename T, typename A>
struct Step {
  const Tensor &queries, &new_keys, &new_values;
  const T *q, *k, *v;
  T *keys, *values, *out;
  int32_t* positions;
  const float* log_weight;
  const T* sinks;
  int64_t H, G, D, V;
  A scaling, cap;
  int64_t window;

  void row(int64_t row, int64_t start, int64_t length, int64_t position, std::vector<A>& logits,
           std::vector<A>& sums) const {
    const int64_t b = row / H, h = row % H, last = start + length - 1;
    const T* new_k = k + b * new_keys.stride(0) + h * new_keys.stride(1);
    const T* new_v = v + b * new_values.stride(0) + h * new_values.stride(1);
    std::copy(new_k, new_k + D, keys + last * D);
    std::copy(new_v, new_v + V, values + last * V);
    positions[last] = int32_t(position);
    if (window > 0) {
      start = std::upper_bound(positions + start, positions + last, int32_t(position - window)) - positions;
      length = last + 1 - start;
    }
    logits.resize(G * length);
    for (int64_t j = 0; j < length; ++j) {
      const T* key = keys + (start + j) * D;
      for (int64_t g = 0; g < G; ++g) {
        const T* query = q + b * queries.stride(0) + (h * G + g) * queries.stride(1);
        A dot = 0;
        for (int64_t d = 0; d < D; ++d) dot += A(query[d]) * A(key[d]);
        dot *= scaling;
        if (cap > 0) dot = cap * std::tanh(dot / cap);
        if (log_weight) dot += A(log_weight[start + j]);
        logits[g * length + j] = dot;
      }
    }
    sums.assign(G * V, A(0));
    std::vector<A> totals(G);
    for (int64_t g = 0; g < G; ++g)
      totals[g] = softmax_(logits.data() + g * length, length, sinks != nullptr, sinks ? A(sinks[h * G + g]) : A(0));
    for (int64_t j = 0; j < length; ++j) {
      const T* value = values + (start + j) * V;
      for (int64_t g = 0; g < G; ++g) {
        const A weight = logits[g * length + j];
        A* sum = sums.data() + g * V;
        for (int64_t d = 0; d < V; ++d) sum[d] += weight * A(value[d]);
      }
    }
    for (int64_t g = 0; g < G; ++g)
      for (int64_t d = 0; d < V; ++d) out[(b * H * G + h * G + g) * V + d] = T(sums[g * V + d] / totals[g]);
  }
};

Tensor decode_step(const Tensor& queries, const Tensor& new_keys, const Tensor& new_values, Tensor keys, Tensor values,
                   Tensor positions, const Tensor& offsets, const Tensor& base, const Tensor& clock,
                   const Tensor& last, const std::optional<Tensor>& log_weight, const std::optional<Tensor>& sinks,
                   double scaling, double soft_cap, int64_t window, const std::optional<Tensor>&,
                   const std::optional<Tensor>&, std::optional<Tensor>, std::optional<Tensor>) {
  const int64_t B = queries.size(0), Q = queries.size(1), D = queries.size(3), V = values.size(1), R = base.numel();
  TORCH_CHECK(queries.stride(3) == 1 && new_keys.stride(3) == 1 && new_values.stride(3) == 1,
              "decode_step: heads are contiguous in their width");
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous(), "decode_step: a pool is contiguous");
  TORCH_CHECK(!sinks || sinks->scalar_type() == queries.scalar_type(), "decode_step: sinks are of the queries' type");
  Tensor out = at::empty({B, 1, Q, V}, queries.options());
  const int64_t now = clock.const_data_ptr<int64_t>()[0];
  const int64_t* starts = offsets.const_data_ptr<int64_t>();
  const int32_t* held = base.const_data_ptr<int32_t>();
  const int64_t *before = last.const_data_ptr<int64_t>(), H = R / B;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, queries.scalar_type(), "decode_step", [&] {
    using A = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const Step<scalar_t, A> step{queries, new_keys, new_values, queries.const_data_ptr<scalar_t>(),
                                 new_keys.const_data_ptr<scalar_t>(), new_values.const_data_ptr<scalar_t>(),
                                 keys.data_ptr<scalar_t>(), values.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(),
                                 positions.data_ptr<int32_t>(),
                                 log_weight ? log_weight->const_data_ptr<float>() : nullptr,
                                 sinks ? sinks->const_data_ptr<scalar_t>() : nullptr, H, Q / H, D, V,
                                 A(scaling), A(soft_cap), window};
    // Rows that one thread takes at least: a few thousand products.
    int64_t entries = 1;
    for (int64_t row = 0; row < R; ++row) entries += held[row] + now;
    const int64_t grain = std::max<int64_t>(1, (R << 14) / (entries * Q / (B * H) * (D + V)));
    at::parallel_for(0, R, grain, [&](int64_t first, int64_t stop) {
      std::vector<A> logits, sums;
      for (int64_t row = first; row < stop; ++row) {
        const int64_t length = held[row] + now;
        TORCH_CHECK(0 < length && length <= starts[row + 1] - starts[row], "decode_step: row ", row, " has a room of ",
                    starts[row + 1] - starts[row], " entries for ", length);
        step.row(row, starts[row], length, before[row / H] + now, logits, sums);
      }
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(retain, CPU, library) { library.impl("decode_step", decode_step); }
