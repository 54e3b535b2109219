// Activations of the door's programs, by PyTorch's own ops.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/threshold_backward.h>

#include <cstdint>
#include <stdexcept>

namespace door {

// Activations as ops/common/activations.py names and numbers them, by PyTorch's own ops.
enum class Act : int64_t { kNone, kRelu, kRelu2, kSilu, kGelu, kGeluTanh, kSigmoid, kTanh,
                           kQuickGelu, kLeakyRelu };
constexpr double kSlope = 0.01;
constexpr double kQuickScale = 1.702;

inline at::Tensor value_of(Act act, const at::Tensor& pre) {
  switch (act) {
    case Act::kNone: return pre;
    case Act::kRelu: return at::relu(pre);
    case Act::kRelu2: {
      const auto r = at::relu(pre);
      return r.pow(2);
    }
    case Act::kSilu: return at::silu(pre);
    case Act::kGelu: return at::gelu(pre, "none");
    case Act::kGeluTanh: return at::gelu(pre, "tanh");
    case Act::kSigmoid: return at::sigmoid(pre);
    case Act::kTanh: return at::tanh(pre);
    case Act::kQuickGelu: return pre.mul(at::sigmoid(pre.mul(kQuickScale)));
    case Act::kLeakyRelu: return at::leaky_relu(pre, kSlope);
  }
  throw std::logic_error("no such activation");
}

// The same over the memory of pre, where that is not read again.
inline at::Tensor value_over(Act act, at::Tensor pre) {
  switch (act) {
    case Act::kRelu: return at::relu_(pre);
    case Act::kSigmoid: return at::sigmoid_(pre);
    case Act::kTanh: return at::tanh_(pre);
    case Act::kLeakyRelu: return at::leaky_relu_(pre, kSlope);
    default: return value_of(act, pre);
  }
}

// dy * act'(pre), from the output or the pre-activation, whichever the activation saves
inline at::Tensor derived(Act act, const at::Tensor& dy, const at::Tensor& saved) {
  switch (act) {
    case Act::kNone: return dy;
    case Act::kRelu: return at::threshold_backward(dy, saved, 0);
    case Act::kRelu2: return at::threshold_backward(dy.mul(saved.mul(2)), saved, 0);
    case Act::kSilu: return at::silu_backward(dy, saved);
    case Act::kGelu: return at::gelu_backward(dy, saved, "none");
    case Act::kGeluTanh: return at::gelu_backward(dy, saved, "tanh");
    case Act::kSigmoid: return at::sigmoid_backward(dy, saved);
    case Act::kTanh: return at::tanh_backward(dy, saved);
    case Act::kQuickGelu: {
      const auto s = at::sigmoid(saved.mul(kQuickScale));
      return dy.mul(s.mul(saved.mul(kQuickScale).mul(at::rsub(s, 1)).add(1)));
    }
    case Act::kLeakyRelu: return at::leaky_relu_backward(dy, saved, kSlope, true);
  }
  throw std::logic_error("no such activation");
}

}  // namespace door
