// Calls of lists of tensors: a list of results, which autograd records as one node of many outputs.
//
// As in autograd_node.h, tapes or Python run the forward and the backward, and what is not plain
// goes to the formula in Python. Gradients of the results have dense rows, at one distance. A
// tape's results lie in few allocations, of which each result is a piece, with a version counter
// of its own: pieces do not overlap.
#pragma once

#include "autograd_node.h"

namespace fastpath {

// Some of a tape's tensor as a dense tensor: (its number, (sizes...), numbers before it), or None
// for no result.
struct Piece {
  int64_t tensor = -1, offset = 0;
  std::vector<int64_t> sizes, strides;

  explicit Piece(PyObject* spec) {
    if (spec == Py_None) return;
    tensor = integer(spec, 0);
    sizes = integers(PyTuple_GetItem(spec, 1));
    offset = integer(spec, 2);
    strides.assign(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;)
      strides[i - 1] = strides[i] * std::max<int64_t>(1, sizes[i]);
  }

  at::Tensor of(const Tensors& r) const {
    if (tensor < 0) return {};
    const auto& whole = r[tensor];
    auto t = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(whole.storage()), whole.key_set(), whole.dtype());
    t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return t;
  }
};

// (a tape's tuple, (pieces...)), and tensors of a call
struct ListTape {
  Tape tape;
  std::vector<Piece> pieces;

  ListTape(PyObject* spec, const Tensors& given) : tape(PyTuple_GetItem(spec, 0), given) {
    PyObject* all = PyTuple_GetItem(spec, 1);
    for (Py_ssize_t i = 0; i < PyTuple_Size(all); ++i) pieces.emplace_back(PyTuple_GetItem(all, i));
    if (PyErr_Occurred()) throw PythonError();
  }

  // What it holds is Python's; its last owner may be a thread without the GIL.
  static std::shared_ptr<const ListTape> shared(PyObject* spec, const Tensors& given) {
    return {new ListTape(spec, given), [](const ListTape* tape) {
              if (!Py_IsInitialized()) return;
              const pybind11::gil_scoped_acquire lock;
              delete tape;
            }};
  }

  bool run(Tensors& r, void* stream) const {
    const at::AutoDispatchBelowADInplaceOrView below;
    return tape.run(r, stream);
  }
};

// A kind of call. Numbers of a backward tape's tensors: the gradients of the results, then the
// call's tensors, then what the forward kept.
//
//   ("lists", name, results, forward, backward or None, recorder, forward's tape or None, keeps)
//
// forward     (three leading arguments) → (results, kept tensor or None), without gradients
// backward    (gradients, tensors, kept, needs) → a gradient or None for each tensor; None for calls
//             without gradients
// recorder  (needs, gradients, tensors, kept) → a backward's tape, or None
//             Both get None for the gradient of a result that is not used, for all of its group, and,
//             unless the gradients are differentiated, for tensors that no wanted gradient reads.
// keeps       0 nothing, 1 the results, 3 a tensor of the forward's own, its tape's last piece
struct ListPlan {
  using Needs = std::vector<bool>;
  using Known = std::shared_ptr<const ListTape>;
  std::string name;
  size_t results, count;
  Ref forward, backward, recorder;
  Known tape;  // of the forward; null where that is Python's
  int64_t keeps;
  Dispatch dispatch = Dispatch::now();

  ListPlan(PyObject* spec, const Tensors& given)
      : results(static_cast<size_t>(integer(spec, 2))),
        count(given.size()),
        forward(PyTuple_GetItem(spec, 3)),
        backward(PyTuple_GetItem(spec, 4)),
        recorder(PyTuple_GetItem(spec, 5)),
        keeps(integer(spec, 7)) {
    const char* text = PyUnicode_AsUTF8(PyTuple_GetItem(spec, 1));
    if (text == nullptr) throw PythonError();
    name = text;
    PyObject* steps = PyTuple_GetItem(spec, 6);
    if (steps != Py_None) tape = ListTape::shared(steps, given);
    const size_t pieces = results + (keeps == NodePlan::kInternal);
    if (tape != nullptr && tape->pieces.size() != pieces) throw PythonError();
  }

  // The tape of a backward that gives these gradients, of tensors that lie like these; whether to
  // ask for one.
  std::pair<Known, bool> find(const Needs& needs, const Tensors& r) const {
    const std::lock_guard<std::mutex> one(mutex_);
    const auto found = tapes_.find(needs);
    if (found == tapes_.end()) return {nullptr, true};
    for (const auto& known : found->second) {
      if (known == nullptr) return {nullptr, false};
      if (known->tape.fits(r)) return {known, false};
    }
    return {nullptr, found->second.size() < kMaxLayouts};
  }

  void learn(const Needs& needs, Known known) const {
    std::map<Needs, std::vector<Known>> old;  // dropped behind the lock: what it holds may run Python
    const std::lock_guard<std::mutex> one(mutex_);
    if (tapes_.size() >= kMaxTapes) tapes_.swap(old);
    tapes_[needs].push_back(std::move(known));
  }

  static void drop(ListPlan* plan) {
    if (!Py_IsInitialized()) return;
    const pybind11::gil_scoped_acquire lock;
    delete plan;
  }

 private:
  static constexpr size_t kMaxTapes = 64, kMaxLayouts = 4;
  mutable std::mutex mutex_;
  mutable std::map<Needs, std::vector<Known>> tapes_;
};

struct ListNode : autograd::Node {
  std::shared_ptr<const ListPlan> plan;
  std::vector<autograd::SavedVariable> saved;  // those of the call, then the kept ones
  c10::DispatchKeySet keys;                    // of the results, and of plain gradients

  using autograd::Node::Node;

  std::string name() const override { return plan->name; }

  void release_variables() override {
    const std::lock_guard<std::mutex> one(mutex_);
    for (auto& s : saved) s.reset_data();
    released_ = true;
  }

  autograd::variable_list apply(autograd::variable_list&& grads) override {
    autograd::variable_list found(num_outputs());
    const auto first = std::find_if(grads.begin(), grads.end(), [](const auto& g) { return g.defined(); });
    if (first == grads.end()) return found;
    const c10::Device device = first->device();
    // a result that is not used gives its group no gradients, and nothing of that group is read
    ListPlan::Needs needs;
    for (size_t i = 0; i < found.size(); ++i)
      needs.push_back(grads[i % grads.size()].defined() && task_should_compute_output(i));
    bool plain = !c10::GradMode::is_enabled() && Dispatch::now() == plan->dispatch;
    Tensors r(grads.begin(), grads.end());
    r.reserve(grads.size() + saved.size());
    for (const auto& dy : r)
      plain = plain && (!dy.defined() || (dy.unsafeGetTensorImpl()->key_set() == keys &&
                                          !dy._fw_grad(0).defined()));
    {
      const std::lock_guard<std::mutex> one(mutex_);
      TORCH_CHECK(!released_, autograd::ERR_BACKWARD_TWICE);
      for (size_t i = 0; i < saved.size(); ++i)
        r.push_back(reads(i, grads, needs, plain) ? saved[i].unpack(getptr()) : at::Tensor());
    }
    if (!plain) {
      by_python(*plan, r, needs, found);
      return found;
    }
    for (size_t i = 0; i < grads.size(); ++i)
      if (r[i].defined() && !dense_rows(r[i]))
        r[i] = r[i].contiguous();  // expanded gradients, as sum() makes
    const auto [tape, unasked] = plan->find(needs, r);
    const size_t given = r.size();
    if (tape != nullptr && by_tape(*tape, r, device, found)) return found;
    r.resize(given);
    by_python(*plan, r, needs, found);
    if (unasked) ask_for_tape(r, needs);
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
    const auto later = [plan = plan](const autograd::variable_list& grads,
                                     const autograd::variable_list& tensors,
                                     const std::vector<bool>& needs) {
      autograd::variable_list found(needs.size());
      Tensors r(grads.begin(), grads.end());
      r.append(tensors.begin(), tensors.end());
      by_python(*plan, r, needs, found);
      return found;
    };
    auto found = recorded(*this, grads, swap, saved, later);
    swap.after(saved);
    return found;
  }

 private:
  bool released_ = false;

  // Whether a saved tensor is read. A plain backward reads what its products multiply, as PyTorch's
  // own do; any other computes the results again. Inputs come first, then weights, then biases.
  bool reads(size_t i, const autograd::variable_list& grads, const ListPlan::Needs& needs,
             bool plain) const {
    const size_t groups = grads.size();
    if (i >= plan->count) return plan->keeps != NodePlan::kOutput || grads[i - plan->count].defined();
    const size_t kind = i / groups, g = i % groups;
    if (!plain) return grads[g].defined();
    const bool has_bias = plan->count == 3 * groups;
    return kind == 0 ? needs[groups + g] || (has_bias && needs[2 * groups + g])
                     : kind == 1 && needs[g];
  }

  // Whether rows are dense, and at one distance: pieces of a tensor, as cat() gives them back.
  static bool dense_rows(const at::Tensor& t) {
    if (t.is_contiguous()) return true;
    int64_t next = -1;  // numbers to what lies behind all rows so far
    for (int64_t d = t.dim() - 1; d-- > 0;) {
      if (t.size(d) == 1) continue;
      if (next >= 0 ? t.stride(d) != next : t.stride(d) < t.size(-1)) return false;
      next = t.stride(d) * t.size(d);
    }
    return t.stride(-1) == 1;
  }

  static bool by_tape(const ListTape& known, Tensors& r, c10::Device device,
                         autograd::variable_list& found) {
    void* stream = nullptr;
    if (device.is_cuda() && !stream_of(device, &stream)) return false;
    if (!known.run(r, stream)) return false;
    for (size_t i = 0; i < found.size(); ++i) found[i] = known.pieces[i].of(r);
    return true;
  }

  static PyObject* bools(const ListPlan::Needs& needs) {
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(needs.size()));
    for (size_t i = 0; i < needs.size(); ++i)
      PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), PyBool_FromLong(needs[i]));
    return tuple;
  }

  static void by_python(const ListPlan& plan, const Tensors& r, const ListPlan::Needs& needs,
                        autograd::variable_list& found) {
    const pybind11::gil_scoped_acquire lock;
    const size_t kept = plan.results + plan.count;
    PyObject* given[] = {tuple_of(r, 0, plan.results), tuple_of(r, plan.results, kept),
                         tuple_of(r, kept, r.size()), bools(needs)};
    PyObject* result = PyObject_Vectorcall(plan.backward.o, given, 4, nullptr);
    for (auto* o : given) Py_DECREF(o);
    const auto held = pybind11::reinterpret_steal<pybind11::object>(result);
    if (result == nullptr) throw_python();
    if (!PyTuple_Check(result) || PyTuple_GET_SIZE(result) != static_cast<Py_ssize_t>(found.size())) {
      PyErr_SetString(PyExc_TypeError, "fastlinear: a backward returned another number of gradients");
      throw_python();
    }
    for (size_t i = 0; i < found.size(); ++i)
      found[i] = tensor_of(PyTuple_GET_ITEM(result, static_cast<Py_ssize_t>(i)));
  }

  void ask_for_tape(const Tensors& r, const ListPlan::Needs& needs) const {
    const pybind11::gil_scoped_acquire lock;
    if (plan->recorder.o == Py_None) return;
    const size_t kept = plan->results + plan->count;
    PyObject* given[] = {bools(needs), tuple_of(r, 0, plan->results),
                         tuple_of(r, plan->results, kept), tuple_of(r, kept, r.size())};
    PyObject* spec = PyObject_Vectorcall(plan->recorder.o, given, 4, nullptr);
    for (auto* o : given) Py_DECREF(o);
    const auto held = pybind11::reinterpret_steal<pybind11::object>(spec);
    if (spec == nullptr) throw_python();
    std::shared_ptr<const ListTape> known;
    if (spec != Py_None) {
      try {
        known = ListTape::shared(spec, r);
        if (known->pieces.size() != num_outputs()) throw PythonError();
      } catch (const PythonError&) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "fastlinear: not a tape");
        throw_python();
      }
    }
    plan->learn(needs, std::move(known));
  }
};

// --------------------------------------------------------------------------------------------

// Results of a forward, and what it kept, by its tape; false where Python has to run it.
inline bool forward_by_tape(const ListPlan& plan, const Tensors& given, void* stream,
                               Tensors& ys, at::Tensor& kept) {
  if (plan.tape == nullptr || !plan.tape->tape.aligned(given)) return false;
  Tensors r = given;
  {  // on a CPU other Python threads may run meanwhile; the tensors are held here
    std::optional<pybind11::gil_scoped_release> unlocked;
    if (!given[0].is_cuda()) unlocked.emplace();
    if (!plan.tape->run(r, stream)) return false;
  }
  for (size_t i = 0; i < plan.results; ++i) ys.push_back(plan.tape->pieces[i].of(r));
  if (plan.keeps == NodePlan::kInternal) kept = plan.tape->pieces[plan.results].of(r);
  return true;
}

inline void forward_by_python(const ListPlan& plan, PyObject* const* args, Tensors& ys,
                              at::Tensor& kept) {
  const at::NoGradGuard without;
  PyObject* result = PyObject_Vectorcall(plan.forward.o, args, kTensorArguments, nullptr);
  const auto held = pybind11::reinterpret_steal<pybind11::object>(result);
  if (result == nullptr) throw_python();
  PyObject* list = PyTuple_Check(result) ? PyTuple_GetItem(result, 0) : nullptr;
  if (list == nullptr || PyTuple_GET_SIZE(result) != 2 || !PyList_Check(list) ||
      PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(plan.results)) {
    PyErr_SetString(PyExc_TypeError, "fastlinear: a forward returned something else than its results");
    throw_python();
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  for (size_t i = 0; i < plan.results; ++i) {
    at::Tensor y = tensor_of(PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)));
    ys.push_back(y.is_view() ? y.view(y.sizes()) : y);  // of no base, so that it may be changed
  }
  kept = tensor_of(PyTuple_GET_ITEM(result, 1));
}

// One call: the list of results, with a node behind them where gradients are wanted.
inline PyObject* called(const std::shared_ptr<const ListPlan>& plan, const Call& call,
                        PyObject* const* args, void* stream) {
  RECORD_FUNCTION(plan->name.substr(0, plan->name.rfind("Backward")),
                  c10::ArrayRef<const c10::IValue>(),
                  static_cast<int64_t>(at::sequence_number::peek()));
  using Impl = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  Tensors given, ys;
  given.reserve(plan->count);
  for (size_t i = 0; i < plan->count; ++i) {
    auto* impl = const_cast<c10::TensorImpl*>(call.tensors[i]);
    given.push_back(impl == nullptr ? at::Tensor() : at::Tensor(Impl::reclaim_copy(impl)));
  }
  at::Tensor kept;
  if (!forward_by_tape(*plan, given, stream, ys, kept)) forward_by_python(*plan, args, ys, kept);
  if (plan->backward.o != Py_None) {
    autograd::edge_list edges(plan->count);
    std::vector<bool> trained(plan->results);  // inputs come first, then weights, then biases
    for (size_t i = 0; i < plan->count; ++i) {
      if (!given[i].defined() || !given[i].requires_grad()) continue;
      edges[i] = autograd::impl::gradient_edge(given[i]);
      trained[i % plan->results] = true;
    }
    auto owner = new_node<ListNode>(std::move(edges));
    auto& node = static_cast<ListNode&>(*owner);
    node.plan = plan;
    node.keys = ys[0].key_set();
    for (size_t i = 0; i < ys.size(); ++i) {
      const auto number = node.add_input_metadata(ys[i]);
      if (trained[i]) autograd::impl::set_gradient_edge(ys[i], {owner, number});
    }
    // all are kept: second derivatives start from them
    node.saved.reserve(plan->count + plan->results);
    for (const auto& t : given) {
      if (t.defined())
        node.saved.emplace_back(t, false);
      else
        node.saved.emplace_back();
    }
    if (plan->keeps == NodePlan::kOutput)
      for (const auto& y : ys) node.saved.emplace_back(y, true);
    if (plan->keeps == NodePlan::kInternal) node.saved.emplace_back(kept, false);
  }
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(ys.size()));
  if (list == nullptr) throw_python();
  for (size_t i = 0; i < ys.size(); ++i)
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), THPVariable_Wrap(ys[i]));
  return list;
}

}  // namespace fastpath
