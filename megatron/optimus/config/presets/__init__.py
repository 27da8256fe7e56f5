"""Named starting points for runs: one YAML file each, in this folder, with what differs from the defaults of schema.py.

``extends: NAME`` starts from another file of the folder; options given beside it override that file's. A file whose
name begins with an underscore is a part for others to extend and not a preset. To add a preset, add its file and its
parameter counts in tests/unit/models/test_presets_counts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.config.serialize import read_plain

Preset = dict[str, dict[str, Any]]  # {section: {option: value}}

_FOLDER = Path(__file__).parent


def read_preset(name: str, folder: Path = _FOLDER) -> Preset:
    """Reads a preset with everything it extends.

    Args:
        name: the file's name without ``.yaml``.
        folder: where the files are.

    Returns:
        Sections as ``--config`` has them; values are not checked yet.

    Raises:
        ConfigError: for a file that cannot be read, or files that extend each other.
    """
    sections: Preset = {}
    for data in reversed(_with_parents(name, folder)):
        for section, options in data.items():
            sections.setdefault(section, {}).update(options)
    return sections


def _with_parents(name: str, folder: Path) -> list[Preset]:
    """Returns the content of a file, then those of the files it extends, nearest first."""
    chain: dict[str, Preset] = {}
    parent: str | None = name
    while parent is not None:
        if parent in chain:
            raise ConfigError(f"preset {name}: {' extends '.join([*chain, parent])}; presets cannot extend each other")
        chain[parent] = data = read_plain(str(folder / f"{parent}.yaml"))
        parent = data.pop("extends", None)
    return list(chain.values())


PRESETS: dict[str, Preset] = {
    path.stem: read_preset(path.stem) for path in sorted(_FOLDER.glob("*.yaml")) if not path.name.startswith("_")
}
