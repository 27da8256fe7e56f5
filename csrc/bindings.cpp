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
  // One kernel-level operation of csrc/sycl/table.hpp on tensors of one Intel GPU; outputs are among the arguments.
  m.def("sycl_run(str name, Tensor(a!)[] arguments) -> ()");
}

// The module itself is empty: importing it runs the registrations above.
extern "C" PyObject* PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
