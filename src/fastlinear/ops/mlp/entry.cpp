// The door of fl.mlp: one call looks a ready plan up by every fact of its tensors, and runs it.
//
// A plan is a Python callable, or a whole-net C++ kernel called right here. Facts are read from the
// tensors at every call: nothing is assumed of a tensor seen before. Python adds plans; a call
// without one returns None and Python takes over.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

// As libtorch_python exports it; its own header takes ten times as long to compile.
PyObject* THPVariable_Wrap(const at::TensorBase& var);

namespace {

using Kernel = void (*)(int64_t, const int64_t*, const int32_t*, const float* const*,
                        const float* const*, const float*, float*, float* const*, int64_t);

constexpr int kMaxLayers = 64;
constexpr int kMaxFacts = 32 + (2 * kMaxLayers + 1) * 10;
constexpr size_t kMaxPlans = 4096;
constexpr double kLongFlops = 4e6;  // from here on other Python threads may run meanwhile

struct Facts {
  int64_t v[kMaxFacts];
  int count = 0;
  void add(int64_t x) { v[count++] = x; }
};

struct Plan {
  PyObject* callable = nullptr;
  Kernel kernel = nullptr;
  std::vector<int64_t> widths;
  std::vector<int32_t> acts;
  double flops_a_row = 0;
  PyObject* names[3] = {nullptr, nullptr, nullptr};  // kept, so that their addresses stay theirs
  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    Py_XDECREF(callable);
    for (auto* name : names) Py_XDECREF(name);
  }
};

struct Hash {
  size_t operator()(const std::vector<int64_t>& v) const { return of(v.data(), v.size()); }
  static size_t of(const int64_t* v, size_t n) {
    uint64_t h = 1469598103934665603ull;
    for (size_t i = 0; i < n; ++i) {
      h = (h ^ static_cast<uint64_t>(v[i])) * 1099511628211ull;
      h ^= h >> 29;
    }
    return h;
  }
};

using Plans =
    std::unordered_map<size_t, std::vector<std::pair<std::vector<int64_t>, std::shared_ptr<Plan>>>>;
Plans& plans = *new Plans;  // never destroyed: at exit there is no Python left to give objects back to
size_t plan_count = 0;
PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;
Py_ssize_t impl_offset = 0;

const c10::TensorImpl* impl_of(PyObject* o) {
  if (Py_TYPE(o) != tensor_type && Py_TYPE(o) != parameter_type) return nullptr;
  return *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(o) + impl_offset);
}

struct Call {
  const c10::TensorImpl* x;
  const c10::TensorImpl* weights[kMaxLayers];
  const c10::TensorImpl* biases[kMaxLayers];
  int64_t layers;
  Facts facts;
  bool wants_grad = false;

  bool tensor(const c10::TensorImpl* t) {
    if (t->layout() != c10::kStrided || t->dim() > 3) return false;
    facts.add(static_cast<int64_t>(t->key_set().raw_repr()));
    facts.add(static_cast<int64_t>(t->dtype().toScalarType()) << 32 |
              static_cast<int64_t>(t->device().type()) << 16 | (t->device().index() & 0xffff));
    facts.add(t->dim());
    for (auto s : t->sizes()) facts.add(s);
    for (auto s : t->strides()) facts.add(s);
    wants_grad = wants_grad || t->requires_grad();
    return true;
  }

  // Whether the arguments are plain tensors throughout; fills the facts.
  bool read(PyObject* const* args) {
    if ((x = impl_of(args[0])) == nullptr || !tensor(x)) return false;
    PyObject *ws = args[1], *bs = args[2];
    if (!PyList_CheckExact(ws) && !PyTuple_CheckExact(ws)) return false;
    if (bs != Py_None && !PyList_CheckExact(bs) && !PyTuple_CheckExact(bs)) return false;
    layers = PySequence_Fast_GET_SIZE(ws);
    if (layers < 1 || layers > kMaxLayers) return false;
    if (bs != Py_None && PySequence_Fast_GET_SIZE(bs) != layers) return false;
    facts.add(layers);
    for (int64_t i = 0; i < layers; ++i) {
      weights[i] = impl_of(PySequence_Fast_GET_ITEM(ws, i));
      if (weights[i] == nullptr || !tensor(weights[i])) return false;
      PyObject* b = bs == Py_None ? Py_None : PySequence_Fast_GET_ITEM(bs, i);
      biases[i] = b == Py_None ? nullptr : impl_of(b);
      facts.add(b != Py_None);
      if (b != Py_None && (biases[i] == nullptr || !tensor(biases[i]))) return false;
    }
    facts.add(wants_grad && c10::GradMode::is_enabled());
    const auto local = c10::impl::tls_local_dispatch_key_set();  // autocast, transforms, tracing...
    facts.add(static_cast<int64_t>(local.included_.raw_repr()));
    facts.add(static_cast<int64_t>(local.excluded_.raw_repr()));
    // throws where torch cannot tell; Python then takes over
    if (x->dtype() == caffe2::TypeMeta::Make<float>())
      facts.add(static_cast<int64_t>(at::globalContext().float32MatmulPrecision()));
    for (int i = 3; i < 7; ++i) facts.add(reinterpret_cast<int64_t>(args[i]));
    return true;
  }
};

std::shared_ptr<Plan> find(const Call& call) {
  const auto& f = call.facts;
  const auto bucket = plans.find(Hash::of(f.v, f.count));
  if (bucket == plans.end()) return nullptr;
  for (const auto& [key, plan] : bucket->second)
    if (key.size() == static_cast<size_t>(f.count) &&
        std::equal(key.begin(), key.end(), f.v))
      return plan;
  return nullptr;
}

// False as well where a fact cannot be told: such a call is Python's to judge.
bool read_or_pass(Call& c, PyObject* const* args) {
  try {
    return c.read(args);
  } catch (const std::exception&) {
    return false;
  }
}

PyObject* run(const Plan& plan, const Call& call) {
  std::vector<int64_t> sizes(call.x->sizes().begin(), call.x->sizes().end());
  int64_t m = 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) m *= sizes[i];
  sizes.back() = plan.widths.back();
  const float *w[kMaxLayers], *b[kMaxLayers];
  for (int64_t i = 0; i < call.layers; ++i) {
    w[i] = static_cast<const float*>(call.weights[i]->data());
    b[i] = call.biases[i] ? static_cast<const float*>(call.biases[i]->data()) : nullptr;
  }
  const auto* x = static_cast<const float*>(call.x->data());
  at::TensorBase y = at::detail::empty_cpu(sizes, c10::ScalarType::Float);
  auto* out = static_cast<float*>(y.unsafeGetTensorImpl()->mutable_data());
  auto work = [&] {
    plan.kernel(call.layers, plan.widths.data(), plan.acts.data(), w, b, x, out, nullptr, m);
  };
  if (plan.flops_a_row * m < kLongFlops) {
    work();
  } else {
    // the arguments of the Python call hold the tensors meanwhile
    Py_BEGIN_ALLOW_THREADS
    work();
    Py_END_ALLOW_THREADS
  }
  return THPVariable_Wrap(y);
}

// (x, weights, biases, activation, final_activation, backend, fast) -> result, or None for no plan
PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != 7) return PyErr_Format(PyExc_TypeError, "entry.call takes 7 arguments, not %zd", n);
  try {
    Call c;
    if (!read_or_pass(c, args)) Py_RETURN_NONE;
    const std::shared_ptr<Plan> plan = find(c);  // held: plans may be dropped while it runs
    if (plan == nullptr) Py_RETURN_NONE;
    if (plan->kernel) return run(*plan, c);
    return PyObject_Vectorcall(plan->callable, args, 3, nullptr);
  } catch (const std::exception& e) {
    return PyErr_Format(PyExc_RuntimeError, "fastlinear.mlp: %s", e.what());
  }
}

// The seven arguments of `call`, then a callable plan, or (kernel address, activation codes).
PyObject* admit(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != 8) return PyErr_Format(PyExc_TypeError, "entry.admit takes 8 arguments, not %zd", n);
  try {
    Call c;
    if (!read_or_pass(c, args)) Py_RETURN_FALSE;
    auto plan = std::make_shared<Plan>();
    if (PyTuple_Check(args[7])) {
      PyObject* codes = PyTuple_GetItem(args[7], 1);
      plan->kernel = reinterpret_cast<Kernel>(PyLong_AsVoidPtr(PyTuple_GetItem(args[7], 0)));
      plan->widths.push_back(c.weights[0]->sizes()[1]);
      for (int64_t i = 0; i < c.layers; ++i) {
        plan->acts.push_back(static_cast<int32_t>(PyLong_AsLong(PyTuple_GetItem(codes, i))));
        plan->widths.push_back(c.weights[i]->sizes()[0]);
        plan->flops_a_row += 2.0 * plan->widths[i] * plan->widths[i + 1];
      }
      if (PyErr_Occurred()) return nullptr;
    } else {
      plan->callable = Py_NewRef(args[7]);
    }
    for (int i = 0; i < 3; ++i) plan->names[i] = Py_NewRef(args[3 + i]);
    if (plan_count >= kMaxPlans) {
      plans.clear();
      plan_count = 0;
    }
    const auto& f = c.facts;
    plans[Hash::of(f.v, f.count)].emplace_back(std::vector<int64_t>(f.v, f.v + f.count), plan);
    ++plan_count;
    Py_RETURN_TRUE;
  } catch (const std::exception& e) {
    return PyErr_Format(PyExc_RuntimeError, "fastlinear.mlp: %s", e.what());
  }
}

PyObject* clear(PyObject*, PyObject*) {
  plans.clear();
  plan_count = 0;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL, nullptr},
    {"admit", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(admit)), METH_FASTCALL, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
};

}  // namespace

// (call, admit, clear) as Python functions. offset: where a tensor object holds its TensorImpl.
extern "C" PyObject* fastlinear_mlp_entry(PyObject* tensor, PyObject* parameter, int64_t offset) {
  tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor));
  parameter_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter));
  impl_offset = offset;
  PyObject* functions = PyTuple_New(3);
  if (functions == nullptr) return nullptr;
  for (int i = 0; i < 3; ++i) PyTuple_SET_ITEM(functions, i, PyCFunction_New(&methods[i], nullptr));
  return functions;
}
