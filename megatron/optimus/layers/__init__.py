"""Layers of a model as serial code. Nothing is imported here: tools over data read ``NO_LABEL`` without torch."""

NO_LABEL = -100  # the label of a position at which nothing is predicted; PyTorch's default ``ignore_index``
