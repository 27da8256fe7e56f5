"""The code of models that transformers has no architecture for: `optimus convert --to hf` copies it into the export.

Both files depend on torch and transformers alone, and nothing of Optimus imports them: transformers loads them from the
export with ``trust_remote_code=True``.
"""

from pathlib import Path

MODEL_CODE = ("configuration_optimus.py", "modeling_optimus.py")


def model_code() -> dict[str, bytes]:
    """The files by name, as they belong beside config.json."""
    return {name: Path(__file__).with_name(name).read_bytes() for name in MODEL_CODE}
