"""Cuts a serial model to one rank's part. Start with apply.py: ``parallelize`` calls one function per parallelism.

Parameters keep the names that they have in the serial model, because checkpoints and initial weights find them by name.
traffic.py declares for the planner what tensor, context and pipeline parallelism send.
"""
