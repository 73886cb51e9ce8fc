"""A folder that appears whole or not at all: written under a temporary name beside its place, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from karui.configs.errors import KaruiError
from karui.configs.manifest import MANIFEST_NAME


@contextlib.contextmanager
def staged(target: Path, needed_bytes: int, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling of `target`; rename it to `target` when the block ends well, remove it otherwise.

    Args:
        target: must not exist or be an empty folder; with `overwrite` it may be a bundle, which is replaced.
        needed_bytes: refuse at once when the disk has less.

    Raises: `KaruiError` when the target is taken, the disk is full (with the bytes needed and free) or cannot be written.
    """
    check_target(target, overwrite=overwrite)
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(parent).free) < needed_bytes:
        raise KaruiError(_full(parent, needed_bytes, free))
    folder = parent / f".{target.name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        yield folder
        _publish(folder, target)
    except Exception as error:
        # safetensors reports a full disk as its own error type, with the system's text inside.
        if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
            raise KaruiError(_full(parent, needed_bytes, shutil.disk_usage(parent).free)) from error
        if isinstance(error, OSError):
            raise KaruiError(f"{target} cannot be written: {error}. Nothing was left behind.") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_target(target: Path, *, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise KaruiError(f"{target} exists already; choose another output, remove it, or ask to overwrite it.")
    if not (target / MANIFEST_NAME).is_file():
        raise KaruiError(f"{target} is not a bundle, so it is not overwritten; choose another output or remove it yourself.")


def save_text(path: Path, text: str) -> None:
    """Write under a temporary name, flush to the disk, rename."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def copy_file(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    fsync(target)


def fsync(path: Path) -> None:
    """Force a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _full(parent: Path, needed: int, free: int) -> str:
    return (
        f"no space left in {parent}: the bundle needs about {needed / 1e6:,.0f} MB ({needed:,} bytes), {free / 1e6:,.0f} MB "
        f"({free:,} bytes) are free. Free some space or choose another output; nothing was left behind."
    )


def _publish(folder: Path, target: Path) -> None:
    fsync(folder)
    old = None
    if target.exists() and any(target.iterdir()):
        old = folder.with_name(folder.name + "-old")
        os.replace(target, old)
    try:
        os.replace(folder, target)
    except OSError:
        if old is not None:
            os.replace(old, target)
        raise
    fsync(target.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
