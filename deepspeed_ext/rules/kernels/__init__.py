"""Element-wise updates: reference.py says what they compute, triton.py and cpu.py compute it in one pass."""
