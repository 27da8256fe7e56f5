"""What the program needs from the machine: launcher variables, devices, process groups, collectives, signals, files.

Open environment.py (who this rank is), device.py (CUDA, XPU, CPU) and mesh.py (process groups) first. ranks.py carries
errors of one rank to all; metrics.py sums up what a model records. No module outside of this folder reads os.environ or
names a kind of accelerator, except for kernels.

Must not change: collectives are called in the same order on every rank, process groups included; ``generator_for`` in
seeding.py decides the initial weights, and the bytes of ``rng_state`` are stored in checkpoints.
"""
