"""Optimus: pretraining of dense and Mixture-of-Experts language models."""

from megatron.optimus.version import __version__

__all__ = ["__version__"]
