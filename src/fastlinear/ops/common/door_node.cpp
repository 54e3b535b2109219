// The library of the door's nodes: training calls, recorded by autograd without Python.
//
// It stands beside door.cpp, whose table finds its plans; PyTorch's headers of autograd take ten
// times as long to compile.

#include "door_node.h"

namespace door {
namespace {

struct NodeCalls {
  std::shared_ptr<const NodePlan> plan;
};

PyObject* run(void* self, const Call& call, PyObject* const* args, void* stream) {
  try {
    return THPVariable_Wrap(called(static_cast<NodeCalls*>(self)->plan, call, args, stream));
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

void drop(void* self) { delete static_cast<NodeCalls*>(self); }

}  // namespace
}  // namespace door

// As fastlinear_door_begin, for this library's own.
extern "C" void fastlinear_node_begin(PyObject* tensor, PyObject* parameter, int64_t impl_offset) {
  door::tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor));
  door::parameter_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter));
  door::impl_offset = impl_offset;
}

// How kernels are launched: addresses of the driver's functions. Whether they can be.
extern "C" int fastlinear_node_cuda(void* launch, void* replace) {
  if (at::detail::empty_cuda == nullptr || fastlinear_raw_stream == nullptr) return 0;
  door::cuda.launch = reinterpret_cast<door::Cuda::Launch>(launch);
  door::cuda.replace = reinterpret_cast<door::Cuda::Replace>(replace);
  return 1;
}

// A plan for the door, of a "node" tuple and the tensors of a call of its kind.
extern "C" PyObject* fastlinear_node_plan(PyObject* spec, PyObject* tensors) {
  try {
    door::Tensors given;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); ++i)
      given.push_back(door::tensor_of(PyTuple_GetItem(tensors, i)));
    std::shared_ptr<door::NodePlan> plan(new door::NodePlan(spec, given), door::NodePlan::drop);
    return door::Outside::capsule({door::run, door::drop, new door::NodeCalls{std::move(plan)}});
  } catch (const door::PythonError&) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "fastlinear: not a plan");
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}
