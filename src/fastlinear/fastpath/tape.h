// Tapes of the fast path: what a prepared forward or backward does, step by step, without
// Python.
//
// A step is a kernel's launch, one of PyTorch's own ops below autograd, or a pass of a compiled
// library, over tensors known by their number: those given first, then those that steps make.
#pragma once

#include "plans.h"
#include "unboxed.h"
#include "../kernels/cpu/allocator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <mutex>
#include <string>

// As libtorch exports it.
namespace at {
int get_num_threads();
}

namespace fastpath {

inline at::Tensor onednn_product(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "");
  torch::jit::Stack stack;
  stack.reserve(6);
  stack.emplace_back(x);
  stack.emplace_back(w);
  stack.emplace_back(bias.defined() ? c10::IValue(bias) : c10::IValue());
  stack.emplace_back(std::string("none"));
  stack.emplace_back(c10::List<std::optional<at::Scalar>>());
  stack.emplace_back(std::string());
  op.callBoxed(&stack);
  return std::move(stack[0]).toTensor();
}

// --------------------------------------------------------------------------------------------

// What a step may be: (its name, the number of its result, numbers of tensors and of else...).
//   empty   out, (sizes), a tensor of its dtype     view    out, in, (sizes)
//   strided out, in, (sizes, then strides, then how many elements behind in's first or nothing)
//   dense   out, in: a copy unless in is
//   kernel  a kernel's tuple                        linear  out, x, weight, bias or -1
//   aten    out, the op's name, its overload, (arguments of its schema...): a tensor's number or a
//           (constant,), a tuple of numbers among them
//   mm      out, a, a transposed, b, b transposed   sum     out, a, (dimensions)
//   addmm   in and out, a, b: in += a b             copy    in and out, a: broadcast
//   bmm     out, a, b                               bmminto in and out, a, b: in = a b
//   baddbmm in and out, a, b: in += a b
//   claim   a given tensor, which a later step writes to: Python takes calls with another given
//           tensor in its memory
//   addcmul in and out, a, b, c: in = a + b * c
//   onednn  out, x, transposed, weight, transposed, bias or -1
//   call    function's address, (arguments...): a number, a (tensor's number,) or -1 for its
//           memory, or an array of such
//   attempt as call, of a function whose result is 0 where Python has to take the call
struct Step {
  enum Kind {
    kEmpty, kView, kKernel, kLinear, kAten, kMm, kAddMm, kSum, kOneDnn, kCall,
    kStrided, kDense, kCopy, kBmm, kBmmInto, kBaddBmm, kAttempt, kClaim, kAddcmul
  };
  struct Argument {
    enum What { kNumber, kMemory, kMemories } what;
    int64_t number = 0;
    std::vector<int64_t> tensors = {};
  };
  static constexpr size_t kMaxArguments = 16;
  Kind kind;
  int64_t n[7] = {0, 0, 0, 0, 0, 0, 0};
  std::vector<int64_t> sizes;
  std::unique_ptr<Kernel> kernel;
  void* function = nullptr;
  std::vector<Argument> arguments;
  std::optional<c10::OperatorHandle> op;  // of aten, with what is no tensor among its arguments
  std::vector<std::pair<int64_t, c10::IValue>> boxed;
  std::function<at::Tensor(Tensors&)> unboxed;  // the same call where its schema is common
  std::vector<int64_t> last;  // tensors that no later step reads

  // Numbers of all tensors it reads or makes.
  std::vector<int64_t> tensors() const {
    switch (kind) {
      case kKernel: {
        std::vector<int64_t> found;
        for (const auto& p : kernel->places) found.push_back(p.tensor);
        return found;
      }
      case kCall:
      case kAttempt: {
        std::vector<int64_t> found;
        for (const auto& a : arguments) found.insert(found.end(), a.tensors.begin(), a.tensors.end());
        return found;
      }
      case kAten: {
        std::vector<int64_t> found{n[0]};
        for (const auto& [tensor, constant] : boxed) found.push_back(tensor);
        return found;
      }
      case kEmpty: return {n[0], n[2]};
      case kLinear:
      case kAddcmul: return {n[0], n[1], n[2], n[3]};
      case kAddMm:
      case kBmm:
      case kBmmInto:
      case kBaddBmm: return {n[0], n[1], n[2]};
      case kMm: return {n[0], n[1], n[3]};
      case kOneDnn: return {n[0], n[1], n[3], n[5]};
      default: return {n[0], n[1]};
    }
  }
};

inline std::vector<int64_t> integers(PyObject* tuple) {
  std::vector<int64_t> found;
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i) found.push_back(integer(tuple, i));
  if (PyErr_Occurred()) throw PythonError();
  return found;
}

class Tape {
 public:
  // ((steps...), results' numbers, address bits that matter of the tensors given, whatever is kept,
  // the only stream it may run on or None, numbers of given tensors that are spent),
  // and these tensors.
  Tape(PyObject* spec, const Tensors& given)
      : spec_(spec), results_(integers(PyTuple_GetItem(spec, 1))), size_(given.size()) {
    PyObject* steps = PyTuple_GetItem(spec, 0);
    for (Py_ssize_t i = 0; i < PyTuple_Size(steps); ++i) add(PyTuple_GetItem(steps, i));
    find_last_uses(static_cast<int64_t>(given.size()), integers(PyTuple_GetItem(spec, 5)));
    const auto masks = integers(PyTuple_GetItem(spec, 2));
    PyObject* stream = PyTuple_GetItem(spec, 4);
    if (stream != nullptr && stream != Py_None) stream_ = address(spec, 4);
    for (size_t i = 0; i < given.size(); ++i)
      given_.emplace_back(given[i], i < masks.size() ? static_cast<uintptr_t>(masks[i]) : 0);
    if (PyErr_Occurred()) throw PythonError();
  }

  const std::vector<int64_t>& results() const { return results_; }

  // Whether tensors are like those that the tape was made for.
  bool fits(const Tensors& given) const {
    for (size_t i = 0; i < given_.size(); ++i)
      if (!given_[i].like(given[i])) return false;
    return true;
  }

  // The same where all but addresses is known to be so.
  bool aligned(const Tensors& given) const {
    for (size_t i = 0; i < given_.size(); ++i)
      if (!given_[i].aligned(given[i])) return false;
    return true;
  }

  // Whether Python has to launch a kernel, since somebody listens.
  bool hooked() const {
    for (const auto& s : steps_)
      if (s.kind == Step::kKernel && s.kernel->hooked()) return true;
    return false;
  }

  // Runs on tensors that fit; false where Python has to try, and say what is wrong. `begun` is set
  // once a step may have run.
  bool run(Tensors& r, void* stream, bool* begun = nullptr) const {
    if (stream_.has_value() && *stream_ != stream) return false;
    if (begun != nullptr) *begun = true;
    r.resize(size_);
    for (const auto& s : steps_) {
      if (!run(s, r, stream)) return false;
      for (const auto i : s.last) r[i].reset();
    }
    return true;
  }

 private:
  struct Given {
    bool defined;
    uintptr_t mask, bits = 0;
    c10::ScalarType dtype{};
    c10::Device device{c10::DeviceType::CPU};
    std::vector<int64_t> sizes, strides;

    Given(const at::Tensor& t, uintptr_t m) : defined(t.defined()), mask(m) {
      if (!defined) return;
      bits = mask & base_of(t.unsafeGetTensorImpl());
      dtype = t.scalar_type();
      device = t.device();
      sizes = t.sizes().vec();
      strides = t.strides().vec();
    }
    bool aligned(const at::Tensor& t) const {
      return mask == 0 || !defined || (base_of(t.unsafeGetTensorImpl()) & mask) == bits;
    }
    bool like(const at::Tensor& t) const {
      if (t.defined() != defined) return false;
      if (!defined) return true;
      return t.layout() == c10::kStrided && t.scalar_type() == dtype && t.device() == device &&
             t.sizes() == c10::IntArrayRef(sizes) && lies_alike(t) && aligned(t);
    }
    // Where there is one of something, no step is taken: a row's gradient may be a piece of any.
    bool lies_alike(const at::Tensor& t) const {
      const auto found = t.strides();
      for (size_t i = 0; i < strides.size(); ++i)
        if (found[i] != strides[i] && sizes[i] != 1) return false;
      return true;
    }
  };

  Ref spec_;  // and what memory it has
  std::vector<Step> steps_;
  std::vector<Given> given_;
  std::vector<int64_t> results_;
  size_t size_ = 0;
  std::optional<void*> stream_;  // the only one it may run on
  mutable std::mutex launching_;  // a kernel's memory is filled in for one launch at a time

  void add(PyObject* spec) {
    static constexpr const char* kNames[] = {"empty",  "view",  "kernel",  "linear",  "aten",
                                             "mm",     "addmm", "sum",     "onednn",
                                             "call",   "strided", "dense", "copy",
                                             "bmm",    "bmminto", "baddbmm", "attempt", "claim",
                                             "addcmul"};
    constexpr int kKinds = sizeof(kNames) / sizeof(kNames[0]);
    PyObject* name = PyTuple_GetItem(spec, 0);
    int kind = 0;
    while (kind < kKinds && (name == nullptr || !PyUnicode_Check(name) ||
                         PyUnicode_CompareWithASCIIString(name, kNames[kind]) != 0))
      ++kind;
    if (kind == kKinds) throw PythonError();
    Step step{static_cast<Step::Kind>(kind)};
    if (kind == Step::kKernel) {
      step.kernel = std::make_unique<Kernel>(PyTuple_GetItem(spec, 1));
      for (const auto& p : step.kernel->places) reach(p.tensor);
    } else if (kind == Step::kCall || kind == Step::kAttempt) {
      step.function = address(spec, 1);
      PyObject* given = PyTuple_GetItem(spec, 2);
      if (PyTuple_Size(given) > static_cast<Py_ssize_t>(Step::kMaxArguments)) throw PythonError();
      for (Py_ssize_t i = 0; i < PyTuple_Size(given); ++i)
        step.arguments.push_back(argument(given, i));
    } else if (kind == Step::kAten) {
      add_call(spec, step);
    } else {
      int i = 0;
      for (Py_ssize_t at = 1; at < PyTuple_Size(spec); ++at) {
        PyObject* item = PyTuple_GetItem(spec, at);
        if (PyTuple_Check(item)) {
          step.sizes = integers(item);
        } else if (i < 7) {
          step.n[i++] = integer(spec, at);
        }
      }
      reach(step.n[0]);
    }
    steps_.push_back(std::move(step));
  }

  void add_call(PyObject* spec, Step& step) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GetItem(spec, 2));
    const char* overload = PyUnicode_AsUTF8(PyTuple_GetItem(spec, 3));
    if (name == nullptr || overload == nullptr) throw PythonError();
    step.op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    const auto& schema = step.op->schema().arguments();
    PyObject* given = PyTuple_GetItem(spec, 4);
    for (size_t i = 0; i < schema.size(); ++i) {
      PyObject* item = PyTuple_GetItem(given, static_cast<Py_ssize_t>(i));
      if (item == nullptr) throw PythonError();
      if (PyTuple_Check(item))
        step.boxed.emplace_back(-1, constant(PyTuple_GetItem(item, 0), *schema[i].real_type()));
      else
        step.boxed.emplace_back(integer(given, static_cast<Py_ssize_t>(i)), c10::IValue());
    }
    step.unboxed = unboxed(*step.op, step.boxed);
    reach(step.n[0] = integer(spec, 1));
  }

  // A number, numbers, a text or nothing, as an argument of that type takes it.
  static c10::IValue constant(PyObject* value, const c10::Type& type) {
    if (value == nullptr || PyErr_Occurred()) throw PythonError();
    if (value == Py_None) return {};
    if (PyTuple_Check(value)) {
      if (type.kind() != c10::TypeKind::ListType ||
          type.containedType(0)->kind() != c10::TypeKind::OptionalType)
        return integers(value);
      c10::List<std::optional<at::Scalar>> numbers;
      for (Py_ssize_t i = 0; i < PyTuple_Size(value); ++i)
        numbers.push_back(at::Scalar(PyFloat_AsDouble(PyTuple_GetItem(value, i))));
      if (PyErr_Occurred()) throw PythonError();
      return numbers;
    }
    if (PyBool_Check(value)) return value == Py_True;
    if (PyUnicode_Check(value)) return std::string(PyUnicode_AsUTF8(value));
    const bool whole = PyLong_Check(value) && type.kind() != c10::TypeKind::FloatType;
    const at::Scalar number = whole ? at::Scalar(static_cast<int64_t>(PyLong_AsLongLong(value)))
                                    : at::Scalar(PyFloat_AsDouble(value));
    if (PyErr_Occurred()) throw PythonError();
    if (type.kind() == c10::TypeKind::TensorType) return at::native::wrapped_scalar_tensor(number);
    return number;
  }

  static Step::Argument argument(PyObject* given, Py_ssize_t i) {
    PyObject* item = PyTuple_GetItem(given, i);
    if (item == nullptr) throw PythonError();
    if (PyList_Check(item)) {
      Step::Argument found{Step::Argument::kMemories};
      for (Py_ssize_t at = 0; at < PyList_GET_SIZE(item); ++at)
        found.tensors.push_back(PyLong_AsLongLong(PyList_GET_ITEM(item, at)));
      if (PyErr_Occurred()) throw PythonError();
      return found;
    }
    if (PyTuple_Check(item)) return {Step::Argument::kMemory, 0, integers(item)};
    return {Step::Argument::kNumber, integer(given, i)};
  }

  // A C function of numbers and pointers, which are passed alike.
  template <class Result>
  static Result call(const Step& s, const Tensors& r) {
    using N = int64_t;
    using Function = Result (*)(N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N);
    N a[Step::kMaxArguments] = {};
    c10::SmallVector<c10::SmallVector<N, 16>, 4> arrays;
    arrays.reserve(s.arguments.size());
    const auto memory = [&r](int64_t i) {
      return i < 0 ? N{0} : static_cast<N>(base_of(r[i].unsafeGetTensorImpl()));
    };
    for (size_t i = 0; i < s.arguments.size(); ++i) {
      const auto& argument = s.arguments[i];
      if (argument.what == Step::Argument::kNumber) {
        a[i] = argument.number;
      } else if (argument.what == Step::Argument::kMemory) {
        a[i] = memory(argument.tensors[0]);
      } else {
        auto& array = arrays.emplace_back();
        for (const auto t : argument.tensors) array.push_back(memory(t));
        a[i] = reinterpret_cast<N>(array.data());
      }
    }
    return reinterpret_cast<Function>(s.function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7],
                                                  a[8], a[9], a[10], a[11], a[12], a[13], a[14],
                                                  a[15]);
  }

  // Tensors that steps made, and those that are spent, are given back after their last use, as
  // autograd's own nodes would.
  void find_last_uses(int64_t given, const std::vector<int64_t>& spent) {
    std::vector<bool> used(size_, false);
    for (int64_t i = 0; i < given; ++i)
      used.at(i) = std::find(spent.begin(), spent.end(), i) == spent.end();
    for (const auto i : results_)
      if (i >= 0) used.at(i) = true;
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
      for (const auto i : step->tensors()) {
        if (i < 0 || used.at(i)) continue;  // -1: a step without that tensor
        used[i] = true;
        step->last.push_back(i);
      }
    }
  }

  void reach(int64_t number) { size_ = std::max(size_, static_cast<size_t>(number + 1)); }

  static at::Tensor turned(const at::Tensor& t, int64_t transposed) {
    return transposed != 0 ? t.t() : t;
  }

  static at::Tensor empty(c10::IntArrayRef sizes, c10::ScalarType dtype, c10::Device device) {
    if (device.is_cuda()) return at::Tensor(at::detail::empty_cuda(sizes, dtype, device, {}));
    return new_on_cpu(sizes, dtype);
  }

  bool run(const Step& s, Tensors& r, void* stream) const {
    const auto& n = s.n;
    const auto bias = [&r](int64_t i) { return i < 0 ? at::Tensor() : r[i]; };
    switch (s.kind) {
      case Step::kEmpty:
        r[n[0]] = empty(s.sizes, static_cast<c10::ScalarType>(n[1]), r[n[2]].device());
        return true;
      case Step::kView:
        r[n[0]] = r[n[1]].view(s.sizes);
        return true;
      case Step::kKernel: {
        if (s.kernel->hooked()) return false;
        const std::lock_guard<std::mutex> one(launching_);
        return s.kernel->launch(
            stream, [&r](int64_t i) { return base_of(r[i].unsafeGetTensorImpl()); });
      }
      case Step::kLinear:
        r[n[0]] = n[3] < 0 ? at::linear(r[n[1]], r[n[2]]) : at::linear(r[n[1]], r[n[2]], r[n[3]]);
        return true;
      case Step::kAten: {
        if (s.unboxed) {
          r[n[0]] = s.unboxed(r);
          return true;
        }
        torch::jit::Stack stack;
        stack.reserve(s.boxed.size());
        for (const auto& [tensor, constant] : s.boxed) {
          if (tensor < 0)
            stack.push_back(constant);
          else
            stack.emplace_back(r[tensor]);
        }
        s.op->callBoxed(&stack);
        r[n[0]] = std::move(stack[0]).toTensor();
        return true;
      }
      case Step::kMm:
        r[n[0]] = at::mm(turned(r[n[1]], n[2]), turned(r[n[3]], n[4]));
        return true;
      case Step::kAddMm:
        r[n[0]].addmm_(r[n[1]], r[n[2]]);
        return true;
      case Step::kSum:
        r[n[0]] = r[n[1]].sum(c10::IntArrayRef(s.sizes));
        return true;
      case Step::kStrided: {
        const c10::IntArrayRef all(s.sizes);
        const size_t dims = all.size() / 2;
        const auto first = r[n[1]].storage_offset() + (all.size() % 2 != 0 ? all.back() : 0);
        r[n[0]] = r[n[1]].as_strided(all.slice(0, dims), all.slice(dims, dims), first);
        return true;
      }
      case Step::kDense:
        r[n[0]] = r[n[1]].contiguous();
        return true;
      case Step::kCopy:
        r[n[0]].copy_(r[n[1]]);
        return true;
      case Step::kBmm:
        r[n[0]] = at::bmm(r[n[1]], r[n[2]]);
        return true;
      case Step::kBmmInto:
        at::bmm_out(r[n[0]], r[n[1]], r[n[2]]);
        return true;
      case Step::kBaddBmm:
        r[n[0]].baddbmm_(r[n[1]], r[n[2]]);
        return true;
      case Step::kOneDnn:
        r[n[0]] = onednn_product(turned(r[n[1]], n[2]), turned(r[n[3]], n[4]), bias(n[5]));
        return true;
      case Step::kCall:
        call<void>(s, r);
        return true;
      case Step::kAttempt:
        return call<int64_t>(s, r) != 0;
      case Step::kClaim:
        return claim(static_cast<size_t>(n[0]), r);
      case Step::kAddcmul:
        at::addcmul_out(r[n[0]], r[n[1]], r[n[2]], r[n[3]]);
        return true;
    }
    return false;
  }

  // Backwards that have kept what such a tensor held are to know that it does no longer.
  bool claim(size_t out, const Tensors& r) const {
    const auto range = [](const at::Tensor& t) {
      const auto start = base_of(t.unsafeGetTensorImpl());
      if (t.numel() == 0) return std::pair{start, start};
      int64_t last = 0;
      for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
      return std::pair{start, start + static_cast<uintptr_t>(last + 1) * t.element_size()};
    };
    const auto [low, high] = range(r[out]);
    for (size_t i = 0; i < given_.size(); ++i) {
      if (i == out || !r[i].defined()) continue;
      const auto [start, end] = range(r[i]);
      if (start < high && low < end) return false;
    }
    auto* impl = r[out].unsafeGetTensorImpl();
    if (!impl->is_inference()) impl->bump_version();
    return true;
  }
};

}  // namespace fastpath
