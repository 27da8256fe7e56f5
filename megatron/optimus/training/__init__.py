"""Training of a run: the loop (open trainer.py first), its schedule of micro-batches, checkpoints, evaluation, metrics.

engine.py builds model, optimizer and engine; checkpointing.py saves and resumes; data.py opens the loaders. health.py,
nonfinite.py, integrity.py and stragglers.py find what is wrong with a run; rollback.py goes back, alerts.py tells.

A new tracker is a module in trackers/. A new metric needs a call of ``platform.metrics.record`` where it is computed,
or, for a number that only the loop knows, a field of ``metrics.StepMetrics``. Every rank must make the same collective
calls in the same order. metrics.jsonl, expert_load.json and evaluation.json are formats that other programs read.
"""
