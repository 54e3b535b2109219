// Plans of the fast path: a Python callable, PyTorch's own layer, a chain of layers in C++, a CUDA
// kernel launched right here, or what another library runs.
#pragma once

#include "call.h"

#include <ATen/EmptyTensor.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

// As libtorch_python exports it; its own header takes ten times as long to compile.
PyObject* THPVariable_Wrap(const at::TensorBase& var);

// Absent from a torch without CUDA.
namespace at::detail {
[[gnu::weak]] at::TensorBase empty_cuda(c10::IntArrayRef size, c10::ScalarType dtype,
                                        std::optional<c10::Device> device,
                                        std::optional<c10::MemoryFormat> memory_format);
}  // namespace at::detail

namespace fastpath {

constexpr int kTensorArguments = 3;  // the leading arguments, which a plan's callable is given

struct PythonError : std::exception {};  // Python's own error is set

// Owns one Python object.
struct Ref {
  explicit Ref(PyObject* borrowed = nullptr) : o(Py_XNewRef(borrowed)) {}
  Ref(Ref&& other) noexcept : o(other.o) { other.o = nullptr; }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(o); }
  PyObject* o;
};

struct Plan {
  virtual ~Plan() = default;
  virtual PyObject* run(const Call& call, PyObject* const* args) const = 0;
  // The same for CUDA tensors of the current device, with their stream.
  virtual PyObject* run_on(void* /*stream*/, const Call& call, PyObject* const* args) const {
    return run(call, args);
  }
};

inline int64_t integer(PyObject* tuple, Py_ssize_t i) {
  PyObject* item = PyTuple_GetItem(tuple, i);
  const long long value = item == nullptr ? 0 : PyLong_AsLongLong(item);
  if (PyErr_Occurred()) throw PythonError();
  return value;
}

inline void* address(PyObject* tuple, Py_ssize_t i) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(integer(tuple, i)));
}

// --------------------------------------------------------------------------------------------

struct Callable : Plan {
  Ref function;
  explicit Callable(PyObject* f) : function(f) {}
  PyObject* run(const Call&, PyObject* const* args) const override {
    return PyObject_Vectorcall(function.o, args, kTensorArguments, nullptr);
  }
};

// PyTorch's own layer: act(linear(x, weight, bias)), with act's keyword, if any.
// ("layer", linear, act, keyword names or None, keyword value or None)
struct Layer : Plan {
  Ref linear, act, names, value;
  explicit Layer(PyObject* spec)
      : linear(PyTuple_GetItem(spec, 1)),
        act(PyTuple_GetItem(spec, 2)),
        names(PyTuple_GetItem(spec, 3)),
        value(PyTuple_GetItem(spec, 4)) {
    if (PyErr_Occurred()) throw PythonError();
  }
  PyObject* run(const Call&, PyObject* const* args) const override {
    PyObject* pre = PyObject_Vectorcall(linear.o, args, kTensorArguments, nullptr);
    if (pre == nullptr) return nullptr;
    PyObject* given[2] = {pre, value.o};
    PyObject* y = PyObject_Vectorcall(act.o, given, 1, names.o == Py_None ? nullptr : names.o);
    Py_DECREF(pre);
    return y;
  }
};

// --------------------------------------------------------------------------------------------

// A chain of layers in float32 on the CPU: ("chain", the kernel's address, activation codes).
struct Chain : Plan {
  using Kernel = void (*)(int64_t, const int64_t*, const int32_t*, const float* const*,
                          const float* const*, const float*, float*, float* const*, int64_t);
  static constexpr double kLongFlops = 4e6;  // from here on other Python threads may run meanwhile
  Kernel kernel;
  std::vector<int64_t> widths;
  std::vector<int32_t> acts;
  double flops_a_row = 0;
  bool has_biases;

  Chain(PyObject* spec, const Call& call, PyObject* const* args)
      : kernel(reinterpret_cast<Kernel>(address(spec, 1))), has_biases(args[2] != Py_None) {
    PyObject* codes = PyTuple_GetItem(spec, 2);
    widths.push_back(call.tensors[1]->sizes()[1]);
    for (Py_ssize_t i = 0; i < PyTuple_Size(codes); ++i) {
      acts.push_back(static_cast<int32_t>(integer(codes, i)));
      widths.push_back(call.tensors[1 + i]->sizes()[0]);
      flops_a_row += 2.0 * widths[i] * widths[i + 1];
    }
    if (PyErr_Occurred() || acts.empty()) throw PythonError();
  }

  PyObject* run(const Call& call, PyObject* const*) const override {
    const auto layers = static_cast<int64_t>(acts.size());
    std::vector<int64_t> sizes(call.tensors[0]->sizes().begin(), call.tensors[0]->sizes().end());
    int64_t m = 1;
    for (size_t i = 0; i + 1 < sizes.size(); ++i) m *= sizes[i];
    sizes.back() = widths.back();
    const float *w[kMaxTensors], *b[kMaxTensors];
    for (int64_t i = 0; i < layers; ++i) {
      const auto* bias = has_biases ? call.tensors[1 + layers + i] : nullptr;
      w[i] = static_cast<const float*>(call.tensors[1 + i]->data());
      b[i] = bias ? static_cast<const float*>(bias->data()) : nullptr;
    }
    const auto* x = static_cast<const float*>(call.tensors[0]->data());
    at::TensorBase y = at::detail::empty_cpu(sizes, c10::ScalarType::Float);
    auto* out = static_cast<float*>(y.unsafeGetTensorImpl()->mutable_data());
    auto work = [&] { kernel(layers, widths.data(), acts.data(), w, b, x, out, nullptr, m); };
    if (flops_a_row * m < kLongFlops) {
      work();
    } else {
      // the arguments of the Python call hold the tensors meanwhile
      Py_BEGIN_ALLOW_THREADS
      work();
      Py_END_ALLOW_THREADS
    }
    return THPVariable_Wrap(y);
  }
};

// --------------------------------------------------------------------------------------------
// CUDA, whose driver Python hands in where it is there: no header of CUDA is needed

struct Cuda {
  using IsCapturing = int (*)(void*, int*);
  using Launch = int (*)(const void*, void*, void**, void**);
  using Replace = int (*)(void*, void*);
  PyObject* current_device = nullptr;  // () → ordinal
  PyObject* current_stream = nullptr;  // (ordinal) → handle
  IsCapturing is_capturing = nullptr;  // cuStreamIsCapturing
  Launch launch = nullptr;             // cuLaunchKernelEx
  Replace replace = nullptr;           // cuTensorMapReplaceAddress

  // Whether x's device is the current one; its current stream.
  bool at_hand(const c10::TensorImpl& x, void** stream) const {
    if (current_device == nullptr || !x.is_cuda()) return false;
    PyObject* device = PyObject_CallNoArgs(current_device);
    if (device == nullptr) return pass();
    const bool same = PyLong_AsLong(device) == x.device().index();
    PyObject* handle = same ? PyObject_CallOneArg(current_stream, device) : nullptr;
    Py_DECREF(device);
    if (handle == nullptr) return pass();
    *stream = reinterpret_cast<void*>(PyLong_AsUnsignedLongLong(handle));
    Py_DECREF(handle);
    return true;
  }

  // The same where that stream is not being captured either.
  bool serves(const c10::TensorImpl& x, void** stream) const {
    int captured = 0;
    return at_hand(x, stream) && is_capturing(*stream, &captured) == 0 && captured == 0;
  }

 private:
  static bool pass() {
    PyErr_Clear();
    return false;
  }
};
inline Cuda cuda;

inline uintptr_t base_of(const c10::TensorImpl* t) {
  return t == nullptr ? 0 : reinterpret_cast<uintptr_t>(t->data());
}

// One kernel's launch of fixed shapes, whose memory Python has prepared:
// (function, address of a CUlaunchConfig, address of the argument pointers,
//  ((kind, address, tensor, bytes), ...), lists that must be empty, whatever holds the memory)
// kind 0 stores a tensor's address there, 1 points the tensor map there at it: so many bytes behind
// the tensor's first element.
struct Kernel {
  struct Place {
    int64_t kind;
    void* where;
    int64_t tensor, bytes;
  };
  static constexpr ptrdiff_t kStream = 32;  // of hStream in CUlaunchConfig
  void* function;
  char* config;
  void** slots;
  std::vector<Place> places;
  Ref hooks, memory;

  explicit Kernel(PyObject* spec)
      : function(address(spec, 0)),
        config(static_cast<char*>(address(spec, 1))),
        slots(static_cast<void**>(address(spec, 2))),
        hooks(PyTuple_GetItem(spec, 4)),
        memory(PyTuple_GetItem(spec, 5)) {
    PyObject* given = PyTuple_GetItem(spec, 3);
    for (Py_ssize_t i = 0; i < PyTuple_Size(given); ++i) {
      PyObject* p = PyTuple_GetItem(given, i);
      places.push_back({integer(p, 0), address(p, 1), integer(p, 2), integer(p, 3)});
    }
    if (PyErr_Occurred() || !PyTuple_Check(hooks.o) || cuda.launch == nullptr) throw PythonError();
  }

  // Reads a size, no more: nodes ask without Python's lock.
  bool hooked() const {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(hooks.o); ++i) {
      PyObject* calls = PyTuple_GET_ITEM(hooks.o, i);
      if (!PyList_Check(calls) || PyList_GET_SIZE(calls) != 0) return true;
    }
    return false;
  }

  // False for a thread's first call into the driver, or an error: Python then tries and names it.
  template <class AddressOf>
  bool launch(void* stream, AddressOf address_of) const {
    for (const auto& p : places) {
      auto* base = reinterpret_cast<void*>(address_of(p.tensor) + p.bytes);
      if (p.kind == 0) {
        *static_cast<void**>(p.where) = base;
      } else if (cuda.replace(p.where, base) != 0) {
        return false;
      }
    }
    *reinterpret_cast<void**>(config + kStream) = stream;
    return cuda.launch(config, function, slots, nullptr) == 0;
  }
};

// A new y computed by one launch: ("launch", fallback, the kernel's tuple, (address bits of each
// tensor that must stay, ...), columns of y). The kernel's tensor -1 is y.
struct Launch : Plan {
  Ref fallback;
  Kernel kernel;
  std::vector<std::pair<uintptr_t, uintptr_t>> alignments;  // mask, value
  int64_t columns;

  Launch(PyObject* spec, const Call& call)
      : fallback(PyTuple_GetItem(spec, 1)),
        kernel(PyTuple_GetItem(spec, 2)),
        columns(integer(spec, 4)) {
    PyObject* masks = PyTuple_GetItem(spec, 3);
    for (Py_ssize_t i = 0; i < PyTuple_Size(masks) && i < call.tensor_count; ++i) {
      const auto mask = static_cast<uintptr_t>(integer(masks, i));
      alignments.emplace_back(mask, mask & base_of(call.tensors[i]));
    }
    if (PyErr_Occurred()) throw PythonError();
  }

  PyObject* run_on(void* stream, const Call& call, PyObject* const* args) const override {
    for (size_t i = 0; i < alignments.size(); ++i)
      if ((base_of(call.tensors[i]) & alignments[i].first) != alignments[i].second)
        return run(call, args);
    if (kernel.hooked()) return run(call, args);
    const auto& x = *call.tensors[0];
    int64_t sizes[kMaxDims];
    const auto dims = x.dim();
    for (int64_t i = 0; i + 1 < dims; ++i) sizes[i] = x.sizes()[i];
    sizes[dims - 1] = columns;
    at::TensorBase y = at::detail::empty_cuda({sizes, static_cast<size_t>(dims)},
                                              x.dtype().toScalarType(), x.device(), std::nullopt);
    const auto address_of = [&](int64_t i) {
      return base_of(i < 0 ? y.unsafeGetTensorImpl() : call.tensors[i]);
    };
    return kernel.launch(stream, address_of) ? THPVariable_Wrap(y) : run(call, args);
  }

  PyObject* run(const Call&, PyObject* const* args) const override {
    return PyObject_Vectorcall(fallback.o, args, kTensorArguments, nullptr);
  }
};

// A plan that another library runs: a capsule of its functions.
struct Outside : Plan {
  struct Functions {
    PyObject* (*run)(void* self, const Call& call, PyObject* const* args, void* stream);
    void (*drop)(void* self);
    void* self;
  };
  static constexpr char kName[] = "fastlinear.fastpath.plan";
  Ref held;
  const Functions* functions;

  explicit Outside(PyObject* capsule)
      : held(capsule),
        functions(static_cast<const Functions*>(PyCapsule_GetPointer(capsule, kName))) {
    if (functions == nullptr) throw PythonError();
  }
  PyObject* run_on(void* stream, const Call& call, PyObject* const* args) const override {
    return functions->run(functions->self, call, args, stream);
  }
  PyObject* run(const Call& call, PyObject* const* args) const override {
    return run_on(nullptr, call, args);
  }

  static PyObject* capsule(const Functions& functions) {
    return PyCapsule_New(new Functions(functions), kName, [](PyObject* self) {
      auto* owned = static_cast<Functions*>(PyCapsule_GetPointer(self, kName));
      owned->drop(owned->self);
      delete owned;
    });
  }
};

inline std::shared_ptr<Plan> made(PyObject* spec, const Call& call, PyObject* const* args) {
  if (PyCapsule_CheckExact(spec)) return std::make_shared<Outside>(spec);
  if (!PyTuple_Check(spec)) return std::make_shared<Callable>(spec);
  PyObject* kind = PyTuple_GetItem(spec, 0);
  const auto is = [kind](const char* name) {
    return kind != nullptr && PyUnicode_Check(kind) && PyUnicode_CompareWithASCIIString(kind, name) == 0;
  };
  if (is("layer")) return std::make_shared<Layer>(spec);
  if (is("chain")) return std::make_shared<Chain>(spec, call, args);
  if (is("launch")) return std::make_shared<Launch>(spec, call);
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no such kind of plan");
  throw PythonError();
}

}  // namespace fastpath
