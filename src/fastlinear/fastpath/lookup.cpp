// The compiled fast path of the ops: one call looks a ready plan up by every fact of its arguments,
// and runs it.
//
// Facts are read from the tensors at every call: nothing is assumed of a tensor seen before. Python
// adds plans; a call without one returns None and Python takes over.

#include "call.h"
#include "plans.h"

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fastpath {
namespace {

constexpr size_t kMaxPlans = 4096;
constexpr char kTable[] = "fastlinear.fastpath";
constexpr char kKernel[] = "fastlinear.fastpath.kernel";

// The plans of one op. Python's global lock guards it.
struct Table {
  using Key = std::vector<int64_t>;
  std::unordered_map<uint64_t, std::vector<std::pair<Key, std::shared_ptr<Plan>>>> buckets;
  size_t count = 0;

  std::shared_ptr<Plan> find(const Call& c) const {
    const auto bucket = buckets.find(hash(c));
    if (bucket == buckets.end()) return nullptr;
    for (const auto& [key, plan] : bucket->second)
      if (key.size() == static_cast<size_t>(c.fact_count) &&
          std::equal(key.begin(), key.end(), c.facts))
        return plan;
    return nullptr;
  }

  void add(const Call& c, std::shared_ptr<Plan> plan) {
    if (count >= kMaxPlans) clear();
    auto& bucket = buckets[hash(c)];
    Key key(c.facts, c.facts + c.fact_count);
    for (auto& [known, old] : bucket)
      if (known == key) {
        old.swap(plan);  // the old one's objects are given back at the end of the call
        return;
      }
    bucket.emplace_back(std::move(key), std::move(plan));
    ++count;
  }

  void clear() {
    const auto dropped = std::move(buckets);  // giving objects back may run Python
    buckets = {};
    count = 0;
  }

  static uint64_t hash(const Call& c) {
    uint64_t h = 1469598103934665603ull;
    for (int i = 0; i < c.fact_count; ++i) {
      h = (h ^ static_cast<uint64_t>(c.facts[i])) * 1099511628211ull;
      h ^= h >> 29;
    }
    return h;
  }
};

Table* table_of(PyObject* self) {
  return static_cast<Table*>(PyCapsule_GetPointer(self, kTable));
}

// False as well where a fact cannot be told: such a call is Python's to judge.
bool read_or_pass(Call& c, PyObject* const* args, Py_ssize_t n) {
  try {
    return c.read(args, n);
  } catch (const std::exception&) {
    return false;
  }
}

template <class Work>
PyObject* guarded(Work work) {
  try {
    return work();
  } catch (const PythonError&) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "fastlinear: not a plan");
  } catch (const std::exception& e) {
    PyErr_Format(PyExc_RuntimeError, "fastlinear: %s", e.what());
  }
  return nullptr;
}

// (tensors, ..., names, ...) -> the result, or None where no plan is known for such a call
PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  return guarded([&]() -> PyObject* {
    Call c;
    if (!read_or_pass(c, args, n)) Py_RETURN_NONE;
    const std::shared_ptr<Plan> plan = table_of(self)->find(c);  // held: it may be dropped meanwhile
    if (plan == nullptr) Py_RETURN_NONE;
    if (!c.tensors[0]->is_cuda()) return plan->run(c, args);
    void* stream = nullptr;
    if (!cuda.serves(*c.tensors[0], &stream)) Py_RETURN_NONE;
    return plan->run_on(stream, c, args);
  });
}

// Whether a call with these arguments could be served here and now, but for want of a plan.
PyObject* wants(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  return guarded([&]() -> PyObject* {
    Call c;
    if (!read_or_pass(c, args, n) || table_of(self)->find(c) != nullptr) Py_RETURN_FALSE;
    void* stream = nullptr;
    if (c.tensors[0]->is_cuda() && !cuda.serves(*c.tensors[0], &stream)) Py_RETURN_FALSE;
    Py_RETURN_TRUE;
  });
}

// The arguments of `call`, then a plan: a callable of the leading tensor arguments, or a tuple.
PyObject* admit(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  if (n < kTensorArguments + 1)
    return PyErr_Format(PyExc_TypeError, "admit takes the arguments of a call and a plan");
  return guarded([&]() -> PyObject* {
    Call c;
    if (!read_or_pass(c, args, n - 1)) Py_RETURN_FALSE;
    auto plan = made(args[n - 1], c, args);
    table_of(self)->add(c, std::move(plan));
    Py_RETURN_TRUE;
  });
}

PyObject* clear(PyObject* self, PyObject*) {
  table_of(self)->clear();
  Py_RETURN_NONE;
}

// (a kernel's tensors or None, ...) -> whether it was launched on the current stream.
PyObject* launch(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  return guarded([&]() -> PyObject* {
    const auto* kernel = static_cast<const Kernel*>(PyCapsule_GetPointer(self, kKernel));
    const c10::TensorImpl* first = nullptr;
    for (Py_ssize_t i = 0; i < n; ++i) {
      if (args[i] == Py_None) continue;
      const auto* t = impl_of(args[i]);
      if (t == nullptr) Py_RETURN_FALSE;
      if (first == nullptr) first = t;
    }
    void* stream = nullptr;
    if (first == nullptr || kernel->hooked() || !cuda.at_hand(*first, &stream)) Py_RETURN_FALSE;
    for (const auto& p : kernel->places)
      if (p.tensor < 0 || p.tensor >= n || args[p.tensor] == Py_None) Py_RETURN_FALSE;
    const auto address_of = [args](int64_t i) { return base_of(impl_of(args[i])); };
    return PyBool_FromLong(kernel->launch(stream, address_of));
  });
}

PyMethodDef launch_method = {
    "launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(launch)), METH_FASTCALL, nullptr};

void drop_kernel(PyObject* self) {
  delete static_cast<Kernel*>(PyCapsule_GetPointer(self, kKernel));
}

PyMethodDef methods[] = {
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL, nullptr},
    {"admit", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(admit)), METH_FASTCALL, nullptr},
    {"wants", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(wants)), METH_FASTCALL, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
};

}  // namespace
}  // namespace fastpath

// What the fast path reads tensors by: once, before any table is made.
extern "C" void fastlinear_fastpath_begin(PyObject* tensor, PyObject* parameter,
                                          int64_t impl_offset, PyObject* forward_mode,
                                          PyObject* level) {
  fastpath::tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor));
  fastpath::parameter_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter));
  fastpath::impl_offset = impl_offset;
  fastpath::forward_mode = Py_NewRef(forward_mode);
  fastpath::forward_mode_level = Py_NewRef(level);
}

// (call, admit, wants, clear) of a table of its own, as Python functions.
extern "C" PyObject* fastlinear_fastpath_table() {
  // never destroyed: at exit there is no Python left to give objects back to
  PyObject* self = PyCapsule_New(new fastpath::Table, fastpath::kTable, nullptr);
  PyObject* functions = self == nullptr ? nullptr : PyTuple_New(4);
  if (functions == nullptr) return nullptr;
  for (int i = 0; i < 4; ++i)
    PyTuple_SET_ITEM(functions, i, PyCFunction_New(&fastpath::methods[i], self));
  Py_DECREF(self);
  return functions;
}

// A kernel's tuple as a function of its tensors.
extern "C" PyObject* fastlinear_fastpath_launcher(PyObject* spec) {
  return fastpath::guarded([&]() -> PyObject* {
    auto kernel = std::make_unique<fastpath::Kernel>(spec);
    PyObject* self = PyCapsule_New(kernel.get(), fastpath::kKernel, fastpath::drop_kernel);
    if (self == nullptr) return nullptr;
    kernel.release();
    PyObject* function = PyCFunction_New(&fastpath::launch_method, self);
    Py_DECREF(self);
    return function;
  });
}

// How CUDA calls are served: two Python functions, and addresses of the driver's. Whether they are.
extern "C" int fastlinear_fastpath_cuda(PyObject* current_device, PyObject* current_stream,
                                        void* is_capturing, void* launch, void* replace) {
      if (at::detail::empty_cuda == nullptr) return 0;
  auto& cuda = fastpath::cuda;
  cuda.is_capturing = reinterpret_cast<fastpath::Cuda::IsCapturing>(is_capturing);
  cuda.launch = reinterpret_cast<fastpath::Cuda::Launch>(launch);
  cuda.replace = reinterpret_cast<fastpath::Cuda::Replace>(replace);
  cuda.current_stream = Py_NewRef(current_stream);
  cuda.current_device = Py_NewRef(current_device);
  return 1;
}
