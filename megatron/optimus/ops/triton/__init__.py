"""Expert operations for NVIDIA GPUs in Triton."""
