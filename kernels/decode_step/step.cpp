// A decoding step over static rows on a CPU: see retain/kernels/decode_step/__init__.py.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

using at::Tensor;

namespace {

// Exponentials in a form that compilers make vectors of: Cephes' polynomial, to 2e-7 of numbers near 0.
inline float exp_(float x) {
  x = std::max(x, -87.0f);
  const float n = std::floor(x * 1.44269504f + 0.5f), f = x - n * 0.693147181f;
  float p = 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = p * f + c;
  return (p * f * f + f + 1.0f) * std::bit_cast<float>((int32_t(n) + 127) << 23);
}
inline double exp_(double x) { return std::exp(x); }

// Of a query head: its logits over the row, in place of which come their exponentials; returns their sum.
template <typename A>
A softmax_(A* logits, int64_t count, bool has_sink, A sink) {
  A top = has_sink ? sink : -std::numeric_limits<A>::infinity();
  for (int64_t j = 0; j < count; ++j) top = std::max(top, logits[j]);
  A sum = has_sink ? exp_(sink - top) : A(0);
  for (int64_t j = 0; j < count; ++j) {
    logits[j] = exp_(logits[j] - top);
    sum += logits[j];
  }
  return sum;
}

// Entries of a layer as codes: see retain/kernels/codes.py.
struct Packed {
  const uint8_t *keys = nullptr, *values = nullptr;
  const int32_t *groups = nullptr, *held = nullptr;
  const at::Half *value_scales = nullptr, *key_scales = nullptr;
  const int64_t* offsets = nullptr;
  const float* log_weight = nullptr;
  int64_t bits = 8, span = 1, key_bytes = 0, value_bytes = 0;

  // The numbers of one entry: `least + step * code`, of each span of channels.
  template <typename A>
  static void decode(const uint8_t* codes, const at::Half* scales, int64_t width, int64_t span, int64_t bits, A* to) {
    const int64_t spans = (width + span - 1) / span, mask = (1 << bits) - 1;
    for (int64_t d = 0; d < width; ++d) to[d] = A((codes[d * bits >> 3] >> (d * bits & 7)) & mask);
    for (int64_t s = 0; s < spans; ++s) {
      const A step = float(scales[s]), least = float(scales[spans + s]);
      for (int64_t d = s * span; d < std::min(width, (s + 1) * span); ++d) to[d] = least + step * to[d];
    }
  }
};

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
  Packed packed;

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
    // Entries held as codes come first; they are decoded once for all heads of the row.
    const int64_t coded = packed.held ? packed.offsets[row] : 0;
    const int64_t before = packed.held ? packed.held[row] : 0, all = before + length;
    std::vector<A> numbers(before > 0 ? std::max(D, V) : 0), query(G * D);
    for (int64_t g = 0; g < G; ++g)
      for (int64_t d = 0; d < D; ++d)
        query[g * D + d] = A(q[b * queries.stride(0) + (h * G + g) * queries.stride(1) + d]) * scaling;
    logits.resize(G * all);
    for (int64_t j = 0; j < all; ++j) {
      const int64_t at = j < before ? coded + j : start + j - before;
      const T* __restrict key = keys + at * D;
      if (j < before)
        Packed::decode(packed.keys + at * packed.key_bytes, packed.key_scales + packed.groups[at] * 2 * D, D, 1,
                       packed.bits, numbers.data());
      const float* weights = j < before ? packed.log_weight : log_weight;
      for (int64_t g = 0; g < G; ++g) {
        const A* __restrict own = query.data() + g * D;
        A dot = 0;
        if (j < before)
          for (int64_t d = 0; d < D; ++d) dot += own[d] * numbers[d];
        else
          for (int64_t d = 0; d < D; ++d) dot += own[d] * A(key[d]);
        if (cap > 0) dot = cap * std::tanh(dot / cap);
        if (weights) dot += A(weights[at]);
        logits[g * all + j] = dot;
      }
    }
    sums.assign(G * V, A(0));
    std::vector<A> totals(G);
    for (int64_t g = 0; g < G; ++g)
      totals[g] = softmax_(logits.data() + g * all, all, sinks != nullptr, sinks ? A(sinks[h * G + g]) : A(0));
    const int64_t spans = packed.held ? (V + packed.span - 1) / packed.span : 0;
    for (int64_t j = 0; j < all; ++j) {
      const int64_t at = j < before ? coded + j : start + j - before;
      const T* __restrict value = values + at * V;
      if (j < before)
        Packed::decode(packed.values + at * packed.value_bytes, packed.value_scales + at * 2 * spans, V, packed.span,
                       packed.bits, numbers.data());
      for (int64_t g = 0; g < G; ++g) {
        const A weight = logits[g * all + j];
        A* __restrict sum = sums.data() + g * V;
        if (j < before)
          for (int64_t d = 0; d < V; ++d) sum[d] += weight * numbers[d];
        else
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
                   const std::optional<Tensor>&, std::optional<Tensor>, std::optional<Tensor>, at::TensorList packed,
                   int64_t bits, int64_t span) {
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
  Packed codes;
  if (!packed.empty()) {
    for (const Tensor& column : packed) TORCH_CHECK(column.is_contiguous(), "decode_step: codes are contiguous");
    codes = {packed[0].const_data_ptr<uint8_t>(), packed[1].const_data_ptr<uint8_t>(),
             packed[3].const_data_ptr<int32_t>(), packed[6].const_data_ptr<int32_t>(),
             packed[2].const_data_ptr<at::Half>(), packed[4].const_data_ptr<at::Half>(),
             packed[5].const_data_ptr<int64_t>(), packed.size() > 7 ? packed[7].const_data_ptr<float>() : nullptr,
             bits, span, packed[0].size(1), packed[1].size(1)};
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, queries.scalar_type(), "decode_step", [&] {
    using A = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
    const Step<scalar_t, A> step{queries, new_keys, new_values, queries.const_data_ptr<scalar_t>(),
                                 new_keys.const_data_ptr<scalar_t>(), new_values.const_data_ptr<scalar_t>(),
                                 keys.data_ptr<scalar_t>(), values.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(),
                                 positions.data_ptr<int32_t>(),
                                 log_weight ? log_weight->const_data_ptr<float>() : nullptr,
                                 sinks ? sinks->const_data_ptr<scalar_t>() : nullptr, H, Q / H, D, V,
                                 A(scaling), A(soft_cap), window, codes};
    // Rows that one thread takes at least: a few thousand products.
    int64_t entries = 1;
    for (int64_t row = 0; row < R; ++row) entries += held[row] + now + (codes.held ? codes.held[row] : 0);
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
