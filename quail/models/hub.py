"""Models of the Hugging Face hub, in that hub's own cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from quail.errors import ModelError
from quail.models.safetensors_folder import weight_files

_SETTINGS = ("config.json", "tokenizer.json")
_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]


def local_snapshot(spec: str) -> Path | None:
    """The folder of a hub model whose snapshot is here already and whole; the network is not asked."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(_download(spec)(local_files_only=True))
        if all((folder / name).is_file() for name in _SETTINGS) and weight_files(folder):
            return folder
    except (LocalEntryNotFoundError, ModelError, OSError, ValueError):
        pass
    return None


def snapshot(spec: str, progress: Callable[[str], None] | None = None) -> Path:
    """The folder of a hub model, `owner/name` or `owner/name@revision`; only safetensors and JSON files are
    fetched.

    A whole snapshot that is here already is used without asking the network.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
    """
    folder = local_snapshot(spec)
    if folder is not None:
        return folder
    if progress is not None:
        progress(f"downloading {spec} from the Hugging Face hub")
    try:
        return Path(_download(spec)())
    except Exception as error:  # the hub's errors, and those of the network library below it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the Hugging Face model {spec!r} cannot be fetched: {reason}",
            hint="check the name, the network and, for gated models, HF_TOKEN; or give a local folder",
        ) from error


def _download(spec: str) -> Callable[..., str]:
    import huggingface_hub

    repo_id, _, revision = spec.partition("@")
    return functools.partial(
        huggingface_hub.snapshot_download, repo_id, revision=revision or None, allow_patterns=_PATTERNS
    )
