// Calls of PyTorch's ops that box no argument.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>

#include <functional>
#include <string>

namespace fastpath {

using Tensors = c10::SmallVector<at::Tensor, 12>;

// A call that boxes no argument, for the schemas of most activations and derivatives, or none.
inline std::function<at::Tensor(Tensors&)> unboxed(
    const c10::OperatorHandle& op, const std::vector<std::pair<int64_t, c10::IValue>>& given) {
  using T = const at::Tensor&;
  std::string kinds;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& argument = op.schema().arguments()[i];
    const auto kind = argument.type()->kind();
    const bool number = kind == c10::TypeKind::NumberType && given[i].second.isScalar();
    const bool text = kind == c10::TypeKind::StringType && given[i].second.isString();
    const bool plain = kind == c10::TypeKind::TensorType && !argument.is_out();
    const char tensor = !plain ? '?' : argument.alias_info() == nullptr ? 'T' : 'W';
    kinds += given[i].first >= 0 ? tensor : number ? 'N' : text ? 'S' : '?';
  }
  const auto& returns = op.schema().returns();
  if (returns.size() != 1 || returns[0].type()->kind() != c10::TypeKind::TensorType) return {};
  const int64_t a = given.empty() ? -1 : given[0].first;
  const int64_t b = given.size() < 2 ? -1 : given[1].first;
  if (kinds == "T") {
    auto call = op.typed<at::Tensor(T)>();
    return [=](Tensors& r) { return call.call(r[a]); };
  }
  if (kinds == "W") {
    auto call = op.typed<at::Tensor&(at::Tensor&)>();
    return [=](Tensors& r) { return call.call(r[a]); };
  }
  if (kinds == "WN") {
    auto call = op.typed<at::Tensor&(at::Tensor&, const at::Scalar&)>();
    const auto c = given[1].second.toScalar();
    return [=](Tensors& r) { return call.call(r[a], c); };
  }
  if (kinds == "TT") {
    auto call = op.typed<at::Tensor(T, T)>();
    return [=](Tensors& r) { return call.call(r[a], r[b]); };
  }
  if (kinds == "TTN") {
    auto call = op.typed<at::Tensor(T, T, const at::Scalar&)>();
    const auto c = given[2].second.toScalar();
    return [=](Tensors& r) { return call.call(r[a], r[b], c); };
  }
  if (kinds == "TS") {
    auto call = op.typed<at::_ops::gelu::schema>();
    const auto c = given[1].second.toStringRef();
    return [=](Tensors& r) { return call.call(r[a], c); };
  }
  if (kinds == "TTS") {
    auto call = op.typed<at::_ops::gelu_backward::schema>();
    const auto c = given[2].second.toStringRef();
    return [=](Tensors& r) { return call.call(r[a], r[b], c); };
  }
  return {};
}

}  // namespace fastpath
