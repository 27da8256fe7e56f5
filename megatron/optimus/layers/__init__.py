"""Layers of a model as serial code; loss.py is the output projection with its loss.

models/decoder.py puts them together; parallel/ replaces parts of them for several ranks. Names of parameters must not
change: checkpoints have them. Nothing is imported here: tools over data read ``NO_LABEL`` without torch.
"""

NO_LABEL = -100  # the label of a position at which nothing is predicted; PyTorch's default ``ignore_index``
