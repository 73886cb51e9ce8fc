"""Model folders in the cache: written under a temporary name, described by `.karui.json`, renamed into place, checked on use.

`.karui.json` holds where the folder came from and the sha256 and size of every file. A file whose size and modification time are
those of the last full check is not hashed again; any other is.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from karui.configs.errors import CorruptError, KaruiError

log = logging.getLogger(__name__)
PROVENANCE = ".karui.json"
_PREFIX = ".tmp-"


def cache_root() -> Path:
    """`$KARUI_CACHE`, else `~/.cache/karui`. Not created here."""
    return Path(os.environ.get("KARUI_CACHE") or Path.home() / ".cache" / "karui").expanduser()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """A temporary folder beside the final ones, removed on every way out; what killed processes left behind is removed too."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for old in root.glob(f"{_PREFIX}*"):
            if not _alive(old.name):
                shutil.rmtree(old, ignore_errors=True)
        folder = root / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
    except OSError as error:
        raise KaruiError(
            f"the cache {root} cannot be written ({error.strerror}); set KARUI_CACHE to a folder that can."
        ) from error
    try:
        yield folder
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise KaruiError(
                f"no space left in {root} ({shutil.disk_usage(root).free / 1e6:,.0f} MB free); free some, or set "
                "KARUI_CACHE to a folder on another disk. Nothing was left behind."
            ) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _alive(name: str) -> bool:
    try:
        os.kill(int(name[len(_PREFIX) :].split("-")[0]), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def publish(folder: Path, target: Path, provenance: dict[str, Any]) -> Path:
    """Seal `folder` with its hashes and rename it to `target`. If another process was first, its folder is used."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != PROVENANCE)
    listed = {p.name: {"sha256": sha256_file(p), "bytes": p.stat().st_size, "mtime_ns": p.stat().st_mtime_ns} for p in files}
    for path in files:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    (folder / PROVENANCE).write_text(json.dumps({**provenance, "files": listed}, indent=1), encoding="utf-8")
    try:
        os.replace(folder, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        check(target)
    return target


def check(folder: Path, *, full: bool = False) -> None:
    """Raise `CorruptError` when a file of a cached folder is missing or is not the one its provenance names.

    Args:
        full: hash every file, also those whose size and modification time are unchanged.
    """
    try:
        files = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["files"]
        pairs = [(folder / name, info["sha256"], info["bytes"], info["mtime_ns"]) for name, info in files.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{folder}: {PROVENANCE} is missing or broken ({error}).") from error
    for path, sha256, size, mtime_ns in pairs:
        if not path.is_file():
            raise CorruptError(f"{folder}: {path.name} is missing.")
        stat = path.stat()
        if stat.st_size != size:
            raise CorruptError(f"{path}: {stat.st_size:,} bytes, expected {size:,}.")
        if (full or stat.st_mtime_ns != mtime_ns) and sha256_file(path) != sha256:
            raise CorruptError(f"{path}: its sha256 is not {sha256}.")
