// Schemas of every compiled operation, once for all backends; the meaning of each argument is that of
// megatron/optimus/ops/reference.py. Implementations register themselves per device in cpu/, cuda/, sycl/.
#include <Python.h>
#include <torch/library.h>

TORCH_LIBRARY(optimus, m) {
  // hidden: [T*K, 2F], gate and up before SwiGLU in expert order; only the rows of local slots are written.
  m.def("moe_mlp(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor indices) -> (Tensor y, Tensor hidden)");
  m.def(
      "moe_mlp_backward(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor indices, "
      "Tensor hidden) -> (Tensor dx, Tensor dgate_up, Tensor ddown, Tensor dweights)");
  // The weights' gradients go to dgate_up and ddown, fp32 or of the weights' dtype: written, or added to what is there.
  m.def(
      "moe_mlp_backward_into(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor indices, "
      "Tensor hidden, Tensor(a!) dgate_up, Tensor(b!) ddown, bool add_gate_up, bool add_down) -> "
      "(Tensor dx, Tensor dweights)");
  // On Hopper GPUs, where csrc/cuda was built. hidden: [P, 2F]; order: the row order's int32 tensors end to end.
  m.def(
      "cuda_moe_mlp(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor indices) -> "
      "(Tensor y, Tensor hidden, Tensor order)");
  m.def(
      "cuda_moe_mlp_backward(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor hidden, "
      "Tensor order) -> (Tensor dx, Tensor dgate_up, Tensor ddown, Tensor dweights)");
  // A weight's gradient is written in the weight's dtype or, with add, added in fp32.
  m.def(
      "cuda_moe_mlp_backward_into(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor hidden, "
      "Tensor order, Tensor(a!) dgate_up, Tensor(b!) ddown, bool add_gate_up, bool add_down) -> "
      "(Tensor dx, Tensor dweights)");
  // The same in two halves, of which the second may wait: dx is complete after the first. dhidden: [P, 2F]; x_rows:
  // [P, D].
  m.def(
      "cuda_moe_mlp_backward_inputs(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor hidden, "
      "Tensor order, Tensor(a!) ddown, bool add_down) -> (Tensor dx, Tensor dweights, Tensor dhidden, Tensor x_rows)");
  m.def(
      "cuda_moe_mlp_backward_up_weights(Tensor dhidden, Tensor x_rows, Tensor order, int tokens, int topk, "
      "Tensor(a!) dgate_up, bool add) -> ()");
  // On contiguous cpu tensors. positions: int32 [T, P], -1 for none.
  m.def("cpu_sum_copies(Tensor copies, Tensor positions) -> Tensor");
  m.def("cpu_expert_counts(Tensor indices, int num_experts) -> Tensor");
  m.def(
      "cpu_router_topk(Tensor logits, int topk, bool sigmoid, bool normalize, Tensor? bias) -> "
      "(Tensor weights, Tensor indices, Tensor scores)");
  m.def(
      "cpu_router_topk_backward(Tensor scores, Tensor indices, Tensor dweights, Tensor dscores, bool sigmoid, "
      "bool normalize) -> Tensor");
  // Instruction sets of the products that this processor has, fastest first, joined by commas; the choice of one for all
  // later calls (empty: the fastest).
  m.def("cpu_instruction_sets() -> str");
  m.def("cpu_use_instructions(str name) -> ()");
  // One operation of csrc/sycl/operations.hpp on tensors of one Intel GPU; outputs are among the arguments.
  m.def("sycl_run(str name, Tensor(a!)[] arguments) -> ()");
}

// The module itself is empty: importing it runs the registrations above.
extern "C" PyObject* PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
