// A linear layer of which is known what its backward reads, as a node of autograd: nothing is
// computed. Its gradients are PyTorch's own ops, which can be differentiated again.
#pragma once

#include "autograd_node.h"

namespace fastpath {

struct KnownLayer : autograd::Node {
  autograd::SavedVariable x, weight, gave;
  // (dy, the output) → the gradient of the pre-activation, in Python; null where the pre-activation
  // is what is known
  std::shared_ptr<PyObject> derivative;

  using autograd::Node::Node;

  std::string name() const override { return "KnownLayerBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> one(mutex_);
    x.reset_data();
    weight.reset_data();
    gave.reset_data();
  }

  autograd::variable_list apply(autograd::variable_list&& grads) override {
    autograd::variable_list found(3);
    at::Tensor dpre = grads[0];
    if (!dpre.defined()) return found;
    const std::lock_guard<std::mutex> one(mutex_);
    if (derivative != nullptr) dpre = graded(dpre, gave.unpack(getptr()));
    if (task_should_compute_output(0)) found[0] = dpre.mm(weight.unpack());
    if (task_should_compute_output(1)) found[1] = dpre.t().mm(x.unpack());
    if (task_should_compute_output(2)) found[2] = dpre.sum(0);
    return found;
  }

  static void drop(PyObject* o) {
    if (!Py_IsInitialized()) return;
    const pybind11::gil_scoped_acquire lock;
    Py_DECREF(o);
  }

 private:
  at::Tensor graded(const at::Tensor& dy, const at::Tensor& output) const {
    using Held = pybind11::object;
    const pybind11::gil_scoped_acquire lock;
    const auto held = [](PyObject* o) { return pybind11::reinterpret_steal<Held>(o); };
    const Held first = held(object_of(dy)), second = held(object_of(output));
    PyObject* const args[] = {first.ptr(), second.ptr()};
    const Held result = held(PyObject_Vectorcall(derivative.get(), args, 2, nullptr));
    if (!result) throw_python();
    return tensor_of(result.ptr());
  }
};

// What is known (M, N), with a node of x (M, K), weight (N, K) and bias (N,) behind it.
inline at::Tensor known_layer(const at::Tensor& known, const at::Tensor& x, const at::Tensor& weight,
                              const at::Tensor& bias, PyObject* derivative) {
  at::Tensor y = known.variable_data();
  autograd::edge_list edges;
  bool any = false;
  for (const auto* t : {&x, &weight, &bias}) {
    const bool needs = t->defined() && t->requires_grad();
    edges.push_back(needs ? autograd::impl::gradient_edge(*t) : autograd::Edge());
    any |= needs;
  }
  if (!any) return y;
  auto owner = new_node<KnownLayer>(std::move(edges));
  auto& node = static_cast<KnownLayer&>(*owner);
  autograd::impl::set_gradient_edge(y, {owner, node.add_input_metadata(y)});
  node.x = autograd::SavedVariable(x, false);
  node.weight = autograd::SavedVariable(weight, false);
  if (derivative != Py_None) {
    node.gave = autograd::SavedVariable(y, true);
    node.derivative = std::shared_ptr<PyObject>(Py_NewRef(derivative), KnownLayer::drop);
  }
  return y;
}

}  // namespace fastpath
