"""Backend ``triton``: expert kernels for NVIDIA and AMD GPUs and, with triton-xpu, Intel GPUs. Open backend.py first.

symmetric_memory.py is for NVIDIA GPUs alone. The CUDA backend uses row_order.py's order of tensors, and tile_cache.py
keeps tuned tiles on disk: neither layout may change alone.
"""
