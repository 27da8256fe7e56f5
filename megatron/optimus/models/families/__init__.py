"""Model families, one a module (or folder) with an object ``FAMILY``: ``--model-family NAME`` selects it.

To add one, write its file; nothing else needs to know of it (docs/extending.md). config/family.py has the interface.
"""
