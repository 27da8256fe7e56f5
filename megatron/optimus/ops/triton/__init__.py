"""Expert operations for NVIDIA GPUs, and Intel GPUs with triton-xpu, in Triton; peers.py for NVIDIA GPUs alone."""
