// What a call of the fast path is made of: its tensors, and every fact a plan may depend on.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/Context.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

// As libtorch exports them; its own header takes seconds to compile.
namespace at::autocast {
bool is_autocast_enabled(at::DeviceType device);
at::ScalarType get_autocast_dtype(at::DeviceType device);
}  // namespace at::autocast
namespace at::impl {
bool torch_function_mode_enabled();
}  // namespace at::impl

namespace fastpath {

constexpr int kMaxTensors = 768;
constexpr int kMaxDims = 6;
constexpr int kMaxNames = 8;
constexpr int kTensorFacts = 4 + 2 * kMaxDims;
constexpr int kOtherFacts = 64;
constexpr int kMaxFacts = 6144;  // of tensors of two dimensions more than can be

inline PyTypeObject* tensor_type = nullptr;
inline PyTypeObject* parameter_type = nullptr;
inline Py_ssize_t impl_offset = 0;             // where a tensor object holds its TensorImpl
inline PyObject* forward_mode = nullptr;       // the globals of torch.autograd.forward_ad
inline PyObject* forward_mode_level = nullptr; // the name there: -1 outside forward mode

inline const c10::TensorImpl* impl_of(PyObject* o) {
  if (Py_TYPE(o) != tensor_type && Py_TYPE(o) != parameter_type) return nullptr;
  return *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(o) + impl_offset);
}

// One call's arguments: tensors, None, lists and tuples of both, and names.
struct Call {
  const c10::TensorImpl* tensors[kMaxTensors];  // in the order given; null for None
  int tensor_count = 0;
  int name_count = 0;
  int64_t facts[kMaxFacts];
  int fact_count = 0;

  // Whether a plan may serve such a call at all; fills the facts. Throws where torch cannot tell.
  bool read(PyObject* const* args, Py_ssize_t n) {
    if (in_forward_mode()) return false;
    for (Py_ssize_t i = 0; i < n; ++i)
      if (!argument(args[i])) return false;
    if (tensor_count == 0 || tensors[0] == nullptr) return false;
    add(wants_grad_ && c10::GradMode::is_enabled());
    add(at::impl::torch_function_mode_enabled());
    const auto local = c10::impl::tls_local_dispatch_key_set();  // transforms, tracing, modes...
    add(static_cast<int64_t>(local.included_.raw_repr()));
    add(static_cast<int64_t>(local.excluded_.raw_repr()));
    const auto device = tensors[0]->device().type();
    if (device != c10::DeviceType::CPU && device != c10::DeviceType::CUDA) return false;
    const bool casts = at::autocast::is_autocast_enabled(device);
    add(casts ? static_cast<int64_t>(at::autocast::get_autocast_dtype(device)) : -1);
    if (tensors[0]->dtype() == caffe2::TypeMeta::Make<float>())
      add(static_cast<int64_t>(at::globalContext().float32MatmulPrecision()));
    return true;
  }

 private:
  enum Kind : int64_t { kNone, kTensor, kSequence, kName };
  bool wants_grad_ = false;

  void add(int64_t fact) { facts[fact_count++] = fact; }

  static bool in_forward_mode() {
    PyObject* level = PyDict_GetItemWithError(forward_mode, forward_mode_level);
    if (level == nullptr || !PyLong_Check(level)) return true;
    return PyLong_AsLong(level) != -1;
  }

  bool argument(PyObject* o) {
    if (PyList_CheckExact(o) || PyTuple_CheckExact(o)) {
      const Py_ssize_t n = PySequence_Fast_GET_SIZE(o);
      if (n > kMaxTensors) return false;
      add(kSequence);
      add(n);
      for (Py_ssize_t i = 0; i < n; ++i)
        if (!tensor_or_none(PySequence_Fast_GET_ITEM(o, i))) return false;
      return true;
    }
    if (!PyUnicode_CheckExact(o) && !PyBool_Check(o)) return tensor_or_none(o);
    if (name_count++ == kMaxNames) return false;
    add(kName);
    // by content: an equal name that lies elsewhere, read from a file, say, is the same name
    add(PyUnicode_CheckExact(o) ? hash_of(o) : o == Py_True);
    return true;
  }

  // As a str keeps it once somebody asked: to ask Python takes longer than to look.
  static int64_t hash_of(PyObject* name) {
    const Py_hash_t known = reinterpret_cast<PyASCIIObject*>(name)->hash;
    return known != -1 ? known : PyObject_Hash(name);
  }

  bool tensor_or_none(PyObject* o) {
    if (tensor_count == kMaxTensors) return false;
    if (fact_count + kTensorFacts + kOtherFacts > kMaxFacts) return false;
    if (o == Py_None) {
      tensors[tensor_count++] = nullptr;
      add(kNone);
      return true;
    }
    const auto* t = impl_of(o);
    if (t == nullptr || t->layout() != c10::kStrided || t->is_nested()) return false;
    if (t->dim() > kMaxDims) return false;
    tensors[tensor_count++] = t;
    add(kTensor | t->dim() << 8);
    add(static_cast<int64_t>(t->key_set().raw_repr()));
    add(static_cast<int64_t>(t->dtype().toScalarType()) << 32 |
        static_cast<int64_t>(t->device().type()) << 16 | (t->device().index() & 0xffff));
    for (auto s : t->sizes()) add(s);
    for (auto s : t->strides()) add(s);
    wants_grad_ = wants_grad_ || t->requires_grad();
    return true;
  }
};

}  // namespace fastpath
