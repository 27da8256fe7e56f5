"""ZeRO stages 1 and 2 with expert parallelism: gradients are reduce-scattered, updated in shards and all-gathered.

Read optimizer.py (``EPZeroOptimizer.step``) first, then partition.py (who owns which element), flat_buffer.py and
bucket.py (the memory), gradient_hooks.py (reduction during backward) and grad_scaling.py (norm, clipping, skips).
Must not change: the launch order of buckets (the same on every rank), ``partition.ALIGNMENT`` and
``FlatBufferKey.__str__`` (checkpoint files depend on both).
"""
