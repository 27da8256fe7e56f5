"""Models of the Hugging Face hub, by huggingface_hub: downloaded where a user names one, uploaded where a user asks.

The library's own settings hold: HF_ENDPOINT, HF_TOKEN or `hf auth login`, HF_HOME, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from megatron.optimus.config.schema import ConfigError
from megatron.optimus.platform.log import first_line

_HUB_NAME = re.compile(r"hf:/{1,2}([^/@]+/[^/@]+)(?:@(.+))?")  # pathlib makes one slash of two
# What is read of a model: no code, no pickles.
_FILES = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "merges.txt"]
_PUSHED = "Exported by Optimus"
T = TypeVar("T")


def local_folder(path: str | Path) -> Path:
    """The folder that a path names, which is downloaded if it is hf://OWNER/NAME or hf://OWNER/NAME@REVISION.

    Raises:
        ConfigError: such a name is malformed, or neither on the hub nor in its cache.
    """
    text = str(path)
    if not text.startswith("hf:/"):
        return Path(path)
    match = _HUB_NAME.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text}: a model of the hub is hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    name, revision = match.groups()
    hub = _library(f"hf://{name}")
    folder = _calling(
        f"hf://{name}" + (f"@{revision}" if revision else ""),
        lambda: hub.snapshot_download(name, revision=revision, allow_patterns=_FILES),
    )
    return Path(folder)


def check_push(name: str, *, public: bool) -> str:
    """Checks before the work whether an upload can succeed; returns the address of the model.

    Args:
        name: OWNER/NAME.
        public: whether everyone may see it.

    Raises:
        ConfigError: the name is malformed, nobody is logged in, or what is there is public and should not be.
    """
    hub, url = _library("--push"), push_address(name)
    if hub.get_token() is None:
        raise ConfigError("--push: nobody is logged in; run `hf auth login`, or set HF_TOKEN")
    api = hub.HfApi(library_name="optimus")
    exists = _calling(f"--push {name}", lambda: api.repo_exists(name))
    if exists and not public and not _calling(f"--push {name}", lambda: api.model_info(name)).private:
        raise ConfigError(f"--push {name}: is there already, and public; add --public, or choose another name")
    return url


def push_address(name: str) -> str:
    """The address that a model will have. Raises ConfigError for a name that is not OWNER/NAME."""
    hub = _library("--push")
    try:
        hub.utils.validate_repo_id(name)
    except hub.errors.HFValidationError as error:
        raise ConfigError(f"--push {name}: {first_line(error)}") from error
    if "/" not in name:
        raise ConfigError(f"--push {name}: name a model as OWNER/NAME")
    return f"{hub.constants.ENDPOINT}/{name}"


def push(folder: Path, name: str, *, public: bool) -> None:
    """Uploads a folder as a model, which is made if it is not there. Raises ConfigError where it cannot."""
    api = _library("--push").HfApi(library_name="optimus")
    _calling(f"--push {name}", lambda: api.create_repo(name, private=not public, exist_ok=True))
    _calling(f"--push {name}", lambda: api.upload_folder(repo_id=name, folder_path=str(folder), commit_message=_PUSHED))


def _library(what: str) -> Any:
    """Imports huggingface_hub. Raises ConfigError where it is missing."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(f"{what} needs the package huggingface_hub: pip install optimus-megatron[hub]")
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


def _calling(what: str, action: Callable[[], T]) -> T:
    """Runs a request to the hub. Raises ConfigError, in one line, for every error of the library."""
    import huggingface_hub.constants as settings
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return action()
    except LocalEntryNotFoundError as error:
        offline = "HF_HUB_OFFLINE is set" if settings.HF_HUB_OFFLINE else f"{settings.ENDPOINT} cannot be reached"
        raise ConfigError(f"{what} is not in the cache {settings.HF_HUB_CACHE}, and {offline}") from error
    except Exception as error:  # of the library and of its HTTP client, which differ between versions
        text = " ".join(str(error).split())
        raise ConfigError(f"{what}: {settings.ENDPOINT} says: {text[:300] or type(error).__name__}") from error
