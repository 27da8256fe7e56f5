"""Build script. Metadata lives in pyproject.toml; this file is where compiled extensions are chosen."""

from setuptools import setup

setup()
