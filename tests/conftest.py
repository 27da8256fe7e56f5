"""Set-up of the whole test suite."""

import setuptools  # noqa: F401  # before anything imports distutils: setuptools refuses to replace it later
