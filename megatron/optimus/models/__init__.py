"""The model as serial code, and what the planner must know of it. Start with decoder.py.

parameters.py, activations.py and work.py declare parameters, bytes and operations without torch; whoever changes the
decoder changes them too. families/ has the variants that --model-family names (config/family.py, docs/extending.md).
Checkpoints find parameters by name. huggingface/ maps models to Hugging Face's format.
"""
