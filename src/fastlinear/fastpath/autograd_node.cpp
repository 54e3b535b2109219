// The library of the fast path's nodes: training calls, recorded by autograd without Python; and of
// its tapes: calls without gradients that take more than one launch.
//
// It stands beside lookup.cpp, whose table finds its plans; PyTorch's headers of autograd take
// ten times as long to compile.

#include "lists.h"
#include "autograd_node.h"
#include "known_layer.h"

namespace fastpath {
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

// Calls without gradients: a tape, or Python where it cannot run.
struct TapeCalls {
  Tape tape;
  Ref fallback;
  size_t count;  // of tensors given
  bool keeps_lock;  // Python's, while it runs
};

// Whether its tape ran. On a CPU other Python threads may run meanwhile: r holds the tensors.
bool ran(const TapeCalls& calls, Tensors& r, void* stream) {
  const at::AutoDispatchBelowADInplaceOrView below;
  std::optional<pybind11::gil_scoped_release> unlocked;
  if (!calls.keeps_lock) unlocked.emplace();
  return calls.tape.run(r, stream);
}

// Whether to keep Python's lock: to give it up and take it again costs a tenth of a short call.
bool keeps_lock(const Tensors& given) {
  constexpr int64_t kFew = 4096;
  int64_t numbers = 0;
  for (const auto& t : given)
    if (t.defined()) numbers += t.numel();
  return given[0].is_cuda() || numbers <= kFew;
}

// One result, or a tuple of several, None for a missing one.
PyObject* results_of(const Tape& tape, const Tensors& r) {
  const auto& numbers = tape.results();
  if (numbers.size() == 1) return THPVariable_Wrap(r[numbers[0]]);
  c10::SmallVector<at::Tensor, 8> found;
  for (const auto i : numbers) found.push_back(i < 0 ? at::Tensor() : r[i]);
  return tuple_of(found, 0, found.size());
}

PyObject* run_tape(void* self, const Call& call, PyObject* const* args, void* stream) {
  const auto& calls = *static_cast<TapeCalls*>(self);
  using Impl = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  try {
    Tensors r;
    for (size_t i = 0; i < calls.count; ++i) {
      auto* impl = const_cast<c10::TensorImpl*>(call.tensors[i]);
      r.push_back(impl == nullptr ? at::Tensor() : at::Tensor(Impl::reclaim_copy(impl)));
    }
    if (calls.tape.aligned(r) && ran(calls, r, stream)) return results_of(calls.tape, r);
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
  return PyObject_Vectorcall(calls.fallback.o, args, kTensorArguments, nullptr);
}

struct ListCalls {
  std::shared_ptr<const ListPlan> plan;
};

PyObject* run_lists(void* self, const Call& call, PyObject* const* args, void* stream) {
  try {
    return called(static_cast<ListCalls*>(self)->plan, call, args, stream);
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

void drop_lists(void* self) { delete static_cast<ListCalls*>(self); }

void drop_tape(void* self) { delete static_cast<TapeCalls*>(self); }

}  // namespace
}  // namespace fastpath

// As fastlinear_fastpath_begin, for this library's own.
extern "C" void fastlinear_node_begin(PyObject* tensor, PyObject* parameter, int64_t impl_offset) {
  fastpath::tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor));
  fastpath::parameter_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter));
  fastpath::impl_offset = impl_offset;
}

// How kernels are launched: addresses of the driver's functions. Whether they can be, on a device.
extern "C" int fastlinear_node_cuda(void* is_capturing, void* launch, void* replace) {
  fastpath::cuda.is_capturing = reinterpret_cast<fastpath::Cuda::IsCapturing>(is_capturing);
  fastpath::cuda.launch = reinterpret_cast<fastpath::Cuda::Launch>(launch);
  fastpath::cuda.replace = reinterpret_cast<fastpath::Cuda::Replace>(replace);
  return at::detail::empty_cuda != nullptr && fastlinear_raw_stream != nullptr;
}

// A new dense tensor on the CPU, of sizes and a dtype's number.
extern "C" PyObject* fastlinear_node_empty(PyObject* sizes, int64_t dtype) {
  try {
    c10::SmallVector<int64_t, 6> found;
    for (Py_ssize_t i = 0; i < PyTuple_Size(sizes); ++i)
      found.push_back(PyLong_AsLongLong(PyTuple_GetItem(sizes, i)));
    if (PyErr_Occurred()) return nullptr;
    return THPVariable_Wrap(fastpath::new_on_cpu(found, static_cast<c10::ScalarType>(dtype)));
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

// `known_layer` of tensors, bias and derivative each or None.
extern "C" PyObject* fastlinear_node_known(PyObject* known, PyObject* derivative, PyObject* x,
                                           PyObject* weight, PyObject* bias) {
  try {
    using fastpath::tensor_of;
    return THPVariable_Wrap(fastpath::known_layer(tensor_of(known), tensor_of(x), tensor_of(weight),
                                                  tensor_of(bias), derivative));
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

// Keeps at most so many bytes of large results that are gone.
extern "C" void fastlinear_node_keep(int64_t bytes) {
  fastpath::CpuAllocator::instance().keep_at_most(static_cast<size_t>(bytes));
}

// Has malloc keep so many bytes of smaller results; less than 64 MiB it keeps by itself.
extern "C" void fastlinear_node_malloc(int64_t bytes) {
  const auto most = static_cast<size_t>(bytes);
  if (most >= 2 * fastpath::CpuAllocator::kLeast) fastpath::let_malloc_keep(most);
}

// Gives back what is kept of them; how many bytes.
extern "C" int64_t fastlinear_node_release() {
  const auto bytes = static_cast<int64_t>(fastpath::CpuAllocator::instance().release());
  fastpath::have_malloc_give_back();
  return bytes;
}

// A plan for the fast path, of a "node" tuple and the tensors of a call of its kind.
extern "C" PyObject* fastlinear_node_plan(PyObject* spec, PyObject* tensors) {
  try {
    fastpath::Tensors given;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); ++i)
      given.push_back(fastpath::tensor_of(PyTuple_GetItem(tensors, i)));
    std::shared_ptr<fastpath::NodePlan> plan(new fastpath::NodePlan(spec, given),
                                            fastpath::NodePlan::drop);
    return fastpath::Outside::capsule(
        {fastpath::run, fastpath::drop, new fastpath::NodeCalls{std::move(plan)}});
  } catch (const fastpath::PythonError&) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "fastlinear: not a plan");
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

// A plan for the fast path, of a "lists" tuple and the tensors of a call of its kind.
extern "C" PyObject* fastlinear_node_lists(PyObject* spec, PyObject* tensors) {
  try {
    fastpath::Tensors given;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); ++i)
      given.push_back(fastpath::tensor_of(PyTuple_GetItem(tensors, i)));
    std::shared_ptr<fastpath::ListPlan> plan(new fastpath::ListPlan(spec, given),
                                            fastpath::ListPlan::drop);
    return fastpath::Outside::capsule(
        {fastpath::run_lists, fastpath::drop_lists, new fastpath::ListCalls{std::move(plan)}});
  } catch (const fastpath::PythonError&) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "fastlinear: not a plan");
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

// A plan for calls without gradients: a tape, the tensors of a call of its kind, and a callable of
// the leading arguments for calls that the tape cannot serve.
extern "C" PyObject* fastlinear_node_tape(PyObject* spec, PyObject* tensors, PyObject* fallback) {
  try {
    fastpath::Tensors given;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); ++i)
      given.push_back(fastpath::tensor_of(PyTuple_GetItem(tensors, i)));
    auto* calls = new fastpath::TapeCalls{fastpath::Tape(spec, given),
                                             fastpath::Ref(fallback), given.size(),
                                             fastpath::keeps_lock(given)};
    return fastpath::Outside::capsule({fastpath::run_tape, fastpath::drop_tape, calls});
  } catch (const fastpath::PythonError&) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "fastlinear: not a tape");
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}
