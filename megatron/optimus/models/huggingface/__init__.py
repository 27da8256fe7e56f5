"""Maps models to Hugging Face's format. Start with architectures.py, where each supported architecture is one entry.

config.py translates config.json, names.py the tensors; both follow what the entry declares.
"""
