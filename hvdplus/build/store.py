"""The cache of built wheels: a readable directory for each key, filled by a rename, so whole or absent."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Return hvdplus's directory under the user's cache directory."""
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "hvdplus"


@dataclass(frozen=True)
class Store:
    """Wheels and logs under one root."""

    root: Path

    def find(self, key: str) -> Path | None:
        """Return the wheel kept under a key, if there is a whole one."""
        wheels = sorted((self.root / "wheels" / key).glob("*.whl"))
        return next((wheel for wheel in wheels if zipfile.is_zipfile(wheel)), None)

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """Give a directory for one build, on the cache's file system so that a rename can publish from it."""
        parent = self.root / "building"
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as name:
            yield Path(name)

    def publish(self, key: str, wheels: Path) -> Path:
        """Move a directory that holds a finished wheel to its key.

        If another process was faster its wheel stays: it is the same build, and may be being read.
        """
        target = self.root / "wheels" / key
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            wheels.rename(target)
        except OSError:
            if self.find(key) is None:
                self.replace(target, wheels)
        wheel = self.find(key)
        assert wheel is not None, f"no wheel at {target}"
        return wheel

    def replace(self, target: Path, wheels: Path) -> None:
        """Put a directory in the place of a broken one."""
        self.discard(target.name)
        wheels.rename(target)

    def discard(self, key: str) -> None:
        """Forget what is kept under a key, moving it aside first so that nobody sees half of it."""
        target = self.root / "wheels" / key
        with self.workspace() as aside:
            if target.exists():
                target.rename(aside / "old")
                shutil.rmtree(aside / "old", ignore_errors=True)

    def log_path(self, key: str) -> Path:
        """Return a new log's path; two builds at once do not share one."""
        directory = self.root / "logs"
        directory.mkdir(parents=True, exist_ok=True)
        return directory / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}_{key}.log"
