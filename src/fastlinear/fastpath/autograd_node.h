// A call that autograd records as one node: tapes or Python run its forward and its backward.
//
// The node is a family's autograd formula on the hot path. Whatever is not plain goes to the same
// formula in Python: a graph of the gradients, modes that watch torch's ops, tensors laid out
// otherwise, sets of gradients that no tape is known for.
#pragma once

#include "tape.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <c10/core/impl/COW.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>

// c10::cuda::CUDAStream::stream() of the only member it has: its header includes CUDA's own. Absent
// from a torch without CUDA.
extern "C" [[gnu::weak]] void* fastlinear_raw_stream(const c10::Stream* self) __asm__(
    "_ZNK3c104cuda10CUDAStream6streamEv");

namespace fastpath {

namespace autograd = torch::autograd;
using NodePtr = decltype(autograd::Edge::function);

// Throws what Python has raised, of whatever type, so that it outlives this thread.
[[noreturn]] inline void throw_python() {
  python_error error;
  error.persist();
  throw python_error(std::move(error));
}

inline at::Tensor tensor_of(PyObject* o) {
  if (o == Py_None) return {};
  if (!PyObject_TypeCheck(o, tensor_type)) {
    PyErr_SetString(PyExc_TypeError, "fastlinear: a backward returned something else than tensors");
    throw_python();
  }
  auto* impl = *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(o) + impl_offset);
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
}

inline PyObject* object_of(const at::Tensor& t) {
  return t.defined() ? THPVariable_Wrap(t) : Py_NewRef(Py_None);
}

template <class List>
PyObject* tuple_of(const List& tensors, size_t from, size_t to) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(to - from));
  for (size_t i = from; i < to; ++i)
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i - from), object_of(tensors[i]));
  return tuple;
}

// Names of dimensions, which older torches leave out of every backward.
template <class Key = c10::DispatchKey>
constexpr uint64_t names() {
  if constexpr (requires { Key::Named; })
    return c10::DispatchKeySet(Key::Named).raw_repr();
  else
    return 0;
}

// What the current thread's dispatch adds and leaves out: transforms, modes, autocast.
struct Dispatch {
  uint64_t included, excluded;
  static Dispatch now() {
    const auto local = c10::impl::tls_local_dispatch_key_set();
    return {local.included_.raw_repr(), local.excluded_.raw_repr() & ~names()};
  }
  bool operator==(const Dispatch& o) const {
    return included == o.included && excluded == o.excluded;
  }
};

// The stream of a device where that is the current device.
inline bool stream_of(c10::Device device, void** stream) {
  if (cuda.launch == nullptr) return false;
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  if (guard.getDevice() != device) return false;
  const c10::Stream current = guard.getStream(device);
  *stream = fastlinear_raw_stream(&current);
  return true;
}

// Whether nobody but its holder can read a tensor: no other tensor or storage has its memory, nor has
// anything besides PyTorch lent it.
inline bool alone(const at::Tensor& t) {
  if (!t.is_contiguous() || t.use_count() != 1) return false;
  const auto& storage = t.storage();
  return storage.use_count() == 1 && storage.allocator() != nullptr && storage.resizable() &&
         !c10::impl::cow::is_cow_data_ptr(storage.data_ptr());
}

// --------------------------------------------------------------------------------------------

// A kind of call. Numbers of a backward tape's tensors: 0 dy, then the call's tensors, then what
// the forward kept: in the order in which Python's form of the formula saves them, too, since
// checkpoints count on the same order whichever of both records a call.
//
//   ("node", name, forward, backward, recorder, (forward's tape), (kept...), (for whom...),
//    (for whom...))
//
// forward     (tensors of the call) → (y, kept tensor or None...), without gradients
// backward    (dy, gradient of the hidden, shape of y, tensors, kept, needs) → gradients
// recorder  (needs, dy, tensors, kept) → a backward's tape, or None
// kept        each 0 nothing, 1 the output, 2 a hidden output of the node (one at most), 3 a tensor
//             of the forward's own, 4 such a tensor whose memory the backward takes where this is the
//             graph's last and nobody else can read it. Where there is one, backward and recorder
//             get one argument more: whether these may be written over
// for whom    for each tensor of the call the gradients, as bits, whose backward reads it; then for
//             each that is kept
struct NodePlan {
  enum Kept : int64_t { kNothing, kOutput, kHidden, kInternal, kSpent };
  static constexpr uint64_t kOver = uint64_t{1} << 63;  // beside needs, of 63 tensors at most
  std::string name;
  Ref forward, backward, recorder;
  std::shared_ptr<const Tape> tape;  // of the forward; null where that is Python's
  std::vector<int64_t> kept;
  std::vector<int64_t> readers, kept_readers;
  bool spends;  // whether any is kSpent
  Dispatch dispatch = Dispatch::now();

  NodePlan(PyObject* spec, const Tensors& given)
      : forward(PyTuple_GetItem(spec, 2)),
        backward(PyTuple_GetItem(spec, 3)),
        recorder(PyTuple_GetItem(spec, 4)),
        kept(integers(PyTuple_GetItem(spec, 6))),
        readers(integers(PyTuple_GetItem(spec, 7))),
        kept_readers(integers(PyTuple_GetItem(spec, 8))),
        spends(std::find(kept.begin(), kept.end(), int64_t{kSpent}) != kept.end()) {
    const char* text = PyUnicode_AsUTF8(PyTuple_GetItem(spec, 1));
    if (text == nullptr || readers.size() != given.size() || kept_readers.size() != kept.size())
      throw PythonError();
    name = text;
    PyObject* steps = PyTuple_GetItem(spec, 5);
    if (steps != Py_None) tape = std::make_shared<Tape>(steps, given);
    if (tape != nullptr && tape->results().size() != 1 + kept.size()) throw PythonError();
  }

  // The tape of a backward that gives these gradients, and may write over what was kept where
  // kOver is among them; whether it was ever asked for.
  std::pair<std::shared_ptr<const Tape>, bool> find(uint64_t needs) const {
    const std::lock_guard<std::mutex> one(mutex_);
    const auto found = tapes_.find(needs);
    if (found == tapes_.end()) return {nullptr, false};
    return {found->second, true};
  }

  void learn(uint64_t needs, std::shared_ptr<const Tape> known) const {
    const std::lock_guard<std::mutex> one(mutex_);
    tapes_.emplace(needs, std::move(known));
  }

  // Nodes may be the last to hold a plan, in threads without Python's lock.
  static void drop(NodePlan* plan) {
    if (!Py_IsInitialized()) return;
    const pybind11::gil_scoped_acquire lock;
    delete plan;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::map<uint64_t, std::shared_ptr<const Tape>> tapes_;
};

// --------------------------------------------------------------------------------------------

// A node's backward as compiled autograd records it: a call of `later`, (gradients, saved tensors,
// needs) → gradients.
template <class Later>
autograd::variable_list recorded(autograd::Node& node, const autograd::variable_list& grads,
                                 autograd::SwapSavedVariables& swap,
                                 const std::vector<autograd::SavedVariable>& saved, Later later) {
  namespace dynamo = torch::dynamo::autograd;
  std::vector<bool> needs;
  for (size_t i = 0; i < node.num_outputs(); ++i)
    needs.push_back(node.task_should_compute_output(i));
  autograd::variable_list tensors;
  for (const auto& s : saved) tensors.push_back(s.unpack(node.getptr()));
  dynamo::PackedArgs packed;
  packed.pack(tensors);
  packed.pack(needs);
  const auto args = std::move(packed).vec();
  std::vector<at::TypePtr> schema;
  for (const auto& a : args)
    schema.emplace_back(a.isTensor() ? at::TypePtr(at::TensorType::get()) : a.type());
  const auto unpacked = [later](const autograd::variable_list& grads,
                                const std::vector<c10::IValue>& args) {
    dynamo::PackedArgs packed(args);
    const auto tensors = packed.unpack<autograd::variable_list>();
    const auto needs = packed.unpack<std::vector<bool>>();
    return later(grads, tensors, needs);
  };
  const auto& compiler = dynamo::getPyCompilerInterface();
  const auto function =
      compiler->bind_function(swap.get_py_compiler(), node.name(), unpacked, schema, true, false);
  const auto metadata = dynamo::IValuePacker<std::vector<std::optional<autograd::InputMetadata>>>::pack(
      dynamo::get_input_metadata(node.next_edges()));
  return compiler->call_function(swap.get_py_compiler(), "apply_functional", function, grads, args,
                                 metadata);
}

struct Node : autograd::Node {
  std::shared_ptr<const NodePlan> plan;
  std::vector<autograd::SavedVariable> saved;  // those of the call, then the kept ones
  c10::DispatchKeySet keys;                    // of y, and of a plain gradient
  std::vector<int64_t> shape;                  // of y

  using autograd::Node::Node;

  std::string name() const override { return plan->name; }

  void release_variables() override {
    const std::lock_guard<std::mutex> one(mutex_);
    for (auto& s : saved) s.reset_data();
    released_ = true;
  }

  autograd::variable_list apply(autograd::variable_list&& grads) override {
    autograd::variable_list found(num_outputs());
    const bool hidden = grads.size() > 1 && grads[1].defined();
    if (!grads[0].defined() && !hidden) return found;
    uint64_t needs = 0;
    for (size_t i = 0; i < found.size(); ++i)
      if (task_should_compute_output(i)) needs |= uint64_t{1} << i;
    Tensors r{grads[0]};
    const bool plain = !hidden && !c10::GradMode::is_enabled() && Dispatch::now() == plan->dispatch &&
                       r[0].unsafeGetTensorImpl()->key_set() == keys;
    const bool last = plain && plan->spends && !autograd::get_current_graph_task_keep_graph();
    {
      const std::lock_guard<std::mutex> one(mutex_);
      TORCH_CHECK(!released_, autograd::ERR_BACKWARD_TWICE);
      for (const auto& s : saved) r.push_back(s.unpack(getptr()));
      for (size_t i = 0; plan->spends && i < plan->kept.size(); ++i) {
        if (last) {  // given up as the engine would behind this backward, which may write over them
          saved[plan->readers.size() + i].reset_data();
          released_ = true;
        } else if (auto& t = r[1 + plan->readers.size() + i]; t.defined()) {
          t = t.variable_data();  // so that an object in Python holds another one than is saved
        }
      }
    }
    if (last && may_write_over(r)) needs |= NodePlan::kOver;
    if (!plain) {
      by_python(*plan, shape, r, hidden ? grads[1] : at::Tensor(), needs, found);
      return found;
    }
    if (!r[0].is_contiguous()) r[0] = r[0].contiguous();  // an expanded gradient, as sum() makes
    const auto [tape, asked] = plan->find(needs);
    bool begun = false;
    if (tape != nullptr && by_tape(*tape, r, found, begun)) return found;
    TORCH_CHECK(!begun || (needs & NodePlan::kOver) == 0, "fastlinear: a kernel of ", name(),
                " could not be launched");
    r.resize(1 + saved.size());
    by_python(*plan, shape, r, {}, needs, found);
    if (!asked) ask_for_tape(r, needs);
    return found;
  }

  // Compiled autograd records the backward as a call of the formula in Python.
  void compiled_args(autograd::CompiledNodeArgs& args) const override {
    args.collect(reinterpret_cast<uint64_t>(plan.get()));
    args.collect(saved, true);
  }

  autograd::variable_list apply_with_saved(const autograd::variable_list& grads,
                                           autograd::SwapSavedVariables& swap) override {
    swap.before(saved);
    const auto later = [plan = plan, shape = shape](const autograd::variable_list& grads,
                                                    const autograd::variable_list& tensors,
                                                    const std::vector<bool>& needs) {
      return by_formula(*plan, shape, grads, tensors, needs);
    };
    auto found = recorded(*this, grads, swap, saved, later);
    swap.after(saved);
    return found;
  }

 private:
  bool released_ = false;

  // Whether these, unpacked, hold all that may be spent alone, and no CUDA graph records the backward:
  // it would read at each replay what the one before has written.
  bool may_write_over(const Tensors& r) const {
    const size_t first = 1 + plan->readers.size();
    for (size_t i = 0; i < plan->kept.size(); ++i)
      if (plan->kept[i] == NodePlan::kSpent && !(r[first + i].defined() && alone(r[first + i])))
        return false;
    if (!r[0].is_cuda()) return true;
    void* stream = nullptr;
    int captured = 0;
    return cuda.is_capturing != nullptr && stream_of(r[0].device(), &stream) &&
           cuda.is_capturing(stream, &captured) == 0 && captured == 0;
  }

  static autograd::variable_list by_formula(const NodePlan& plan, const std::vector<int64_t>& shape,
                                            const autograd::variable_list& grads,
                                            const autograd::variable_list& tensors,
                                            const std::vector<bool>& wanted) {
    autograd::variable_list found(wanted.size());
    const at::Tensor hidden = grads.size() > 1 ? grads[1] : at::Tensor();
    if (!grads[0].defined() && !hidden.defined()) return found;
    uint64_t needs = 0;
    for (size_t i = 0; i < wanted.size(); ++i) needs |= uint64_t{wanted[i]} << i;
    Tensors r{grads[0]};
    r.append(tensors.begin(), tensors.end());
    by_python(plan, shape, r, hidden, needs, found);
    return found;
  }

  // Whether it ran; `begun` says that it did in part.
  bool by_tape(const Tape& tape, Tensors& r, autograd::variable_list& found,
                  bool& begun) const {
    if (!tape.fits(r) || tape.hooked()) return false;
    void* stream = nullptr;
    if (r[0].is_cuda() && !stream_of(r[0].device(), &stream)) return false;
    const at::AutoDispatchBelowADInplaceOrView below;
    if (!tape.run(r, stream, &begun)) return false;
    const auto& results = tape.results();
    for (size_t i = 0; i < found.size(); ++i)
      if (results[i] >= 0) found[i] = r[results[i]];
    return true;
  }

  static PyObject* bools(uint64_t needs, size_t n) {
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(n));
    for (size_t i = 0; i < n; ++i)
      PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), PyBool_FromLong((needs >> i) & 1));
    return tuple;
  }

  static void by_python(const NodePlan& plan, const std::vector<int64_t>& shape, const Tensors& r,
                        const at::Tensor& dhidden, uint64_t needs, autograd::variable_list& found) {
    const pybind11::gil_scoped_acquire lock;
    PyObject* sizes = PyTuple_New(static_cast<Py_ssize_t>(shape.size()));
    for (size_t i = 0; i < shape.size(); ++i)
      PyTuple_SET_ITEM(sizes, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(shape[i]));
    const size_t kept = 1 + plan.readers.size();
    PyObject* given[] = {object_of(r[0]),
                         object_of(dhidden),
                         sizes,
                         tuple_of(r, 1, kept),
                         tuple_of(r, kept, r.size()),
                         bools(needs, found.size()),
                         PyBool_FromLong((needs & NodePlan::kOver) != 0)};
    PyObject* result = PyObject_Vectorcall(plan.backward.o, given, plan.spends ? 7 : 6, nullptr);
    for (auto* o : given) Py_DECREF(o);
    const pybind11::object held = pybind11::reinterpret_steal<pybind11::object>(result);
    if (result == nullptr) throw_python();
    if (!PyTuple_Check(result) || PyTuple_GET_SIZE(result) != static_cast<Py_ssize_t>(found.size())) {
      PyErr_SetString(PyExc_TypeError, "fastlinear: a backward returned another number of gradients");
      throw_python();
    }
    for (size_t i = 0; i < found.size(); ++i)
      found[i] = tensor_of(PyTuple_GET_ITEM(result, static_cast<Py_ssize_t>(i)));
  }

  void ask_for_tape(const Tensors& r, uint64_t needs) const {
    const pybind11::gil_scoped_acquire lock;
    if (plan->recorder.o == Py_None) return;
    const size_t kept = 1 + plan->readers.size();
    PyObject* given[] = {bools(needs, num_outputs()), object_of(r[0]), tuple_of(r, 1, kept),
                         tuple_of(r, kept, r.size()),
                         PyBool_FromLong((needs & NodePlan::kOver) != 0)};
    PyObject* spec = PyObject_Vectorcall(plan->recorder.o, given, plan->spends ? 5 : 4, nullptr);
    for (auto* o : given) Py_DECREF(o);
    const pybind11::object held = pybind11::reinterpret_steal<pybind11::object>(spec);
    if (spec == nullptr) throw_python();
    std::shared_ptr<const Tape> known;
    if (spec != Py_None) {
      try {
        known = std::make_shared<Tape>(spec, r);
      } catch (const PythonError&) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "fastlinear: not a tape");
        throw_python();
      }
    }
    plan->learn(needs, std::move(known));
  }
};

// Nodes are held by a std::shared_ptr or by an intrusive one, whichever this torch takes.
template <class N, class Pointer = NodePtr>
Pointer new_node(autograd::edge_list&& edges) {
  auto* node = new N(std::move(edges));
  if constexpr (requires { deleteNode(node); }) {
    return Pointer(node, [](N* n) { deleteNode(n); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

// --------------------------------------------------------------------------------------------

// One call: the result, with a node behind it.
inline at::Tensor called(const std::shared_ptr<const NodePlan>& plan, const Call& call,
                         PyObject* const* args, void* stream) {
  RECORD_FUNCTION(plan->name.substr(0, plan->name.rfind("Backward")),
                  c10::ArrayRef<const c10::IValue>(),
                  static_cast<int64_t>(at::sequence_number::peek()));
  using Impl = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  const size_t count = plan->readers.size();  // a name that is None counts as a tensor
  Tensors given;
  uint64_t needs = 0;
  autograd::edge_list edges(count);
  for (size_t i = 0; i < count; ++i) {
    auto* impl = const_cast<c10::TensorImpl*>(call.tensors[i]);
    given.push_back(impl == nullptr ? at::Tensor() : at::Tensor(Impl::reclaim_copy(impl)));
    if (impl == nullptr || !impl->requires_grad()) continue;
    needs |= uint64_t{1} << i;
    edges[i] = autograd::impl::gradient_edge(given[i]);
  }
  at::Tensor y;
  Tensors kept(plan->kept.size());
  const auto* tape = plan->tape.get();
  if (tape != nullptr && tape->aligned(given)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensors r = given;
    // on a CPU other Python threads may run meanwhile; the tensors are held here
    std::optional<pybind11::gil_scoped_release> unlocked;
    if (!given[0].is_cuda()) unlocked.emplace();
    const bool ran = tape->run(r, stream);
    unlocked.reset();
    if (ran) {
      const auto& results = tape->results();
      y = r[results[0]];
      for (size_t i = 0; i < kept.size(); ++i)
        if (results[1 + i] >= 0) kept[i] = r[results[1 + i]];
    }
  }
  if (!y.defined()) {
    const at::NoGradGuard without;
    PyObject* result = PyObject_Vectorcall(plan->forward.o, args, kTensorArguments, nullptr);
    const pybind11::object held = pybind11::reinterpret_steal<pybind11::object>(result);
    if (result == nullptr) throw_python();
    if (!PyTuple_Check(result) || PyTuple_GET_SIZE(result) < static_cast<Py_ssize_t>(1 + kept.size())) {
      PyErr_SetString(PyExc_TypeError, "fastlinear: a forward returned too little");
      throw_python();
    }
    y = tensor_of(PyTuple_GET_ITEM(result, 0));
    for (size_t i = 0; i < kept.size(); ++i) {
      kept[i] = tensor_of(PyTuple_GET_ITEM(result, static_cast<Py_ssize_t>(1 + i)));
      // without the object in Python, which would hold it
      if (plan->kept[i] == NodePlan::kSpent && kept[i].defined()) kept[i] = kept[i].variable_data();
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    if (y.is_view()) y = y.view(y.sizes());  // of no base, so that it may be changed in place
  }
  auto owner = new_node<Node>(std::move(edges));
  auto& node = static_cast<Node&>(*owner);
  node.plan = plan;
  node.keys = y.key_set();
  node.shape = y.sizes().vec();
  autograd::impl::set_gradient_edge(y, {owner, node.add_input_metadata(y)});
  for (size_t i = 0; i < kept.size(); ++i)
    if (plan->kept[i] == NodePlan::kHidden)
      autograd::impl::set_gradient_edge(kept[i], {owner, node.add_input_metadata(kept[i])});
  node.saved.reserve(count + kept.size());
  for (size_t i = 0; i < count; ++i) {
    if (given[i].defined() && (needs & static_cast<uint64_t>(plan->readers[i])) != 0)
      node.saved.emplace_back(given[i], false);
    else
      node.saved.emplace_back();
  }
  for (size_t i = 0; i < kept.size(); ++i) {
    switch ((needs & static_cast<uint64_t>(plan->kept_readers[i])) != 0 ? plan->kept[i] : 0) {
      case NodePlan::kOutput: node.saved.emplace_back(y, true); break;
      case NodePlan::kHidden: node.saved.emplace_back(kept[i], true); break;
      case NodePlan::kInternal:
      case NodePlan::kSpent: node.saved.emplace_back(kept[i], false); break;
      default: node.saved.emplace_back();
    }
  }
  return y;
}

}  // namespace fastpath
