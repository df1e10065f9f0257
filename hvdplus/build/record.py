"""What was installed, remembered inside Horovod's own dist-info so that it goes when Horovod goes."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "hvdplus-build.json"


@dataclass(frozen=True)
class Record:
    """The key of the installed wheel and the checks it has passed."""

    key: str
    checked: tuple[str, ...] = ()


def read_record() -> Record | None:
    """Return the record of the installed Horovod, or None if this command did not install it."""
    try:
        text = importlib.metadata.distribution("horovod").read_text(FILE)
    except importlib.metadata.PackageNotFoundError:
        return None
    return parse_record(text or "")


def parse_record(text: str) -> Record | None:
    """Turn the file's text into a record; a damaged file counts as none."""
    try:
        data = json.loads(text)
        return Record(key=str(data["key"]), checked=tuple(data["checked"]))
    except (ValueError, KeyError, TypeError):
        return None


def write_record(key: str, checked: Sequence[str]) -> None:
    """Write the record into the installed Horovod's dist-info."""
    importlib.invalidate_caches()
    distribution = importlib.metadata.distribution("horovod")
    directory = Path(str(distribution.locate_file(f"horovod-{distribution.version}.dist-info")))
    (directory / FILE).write_text(json.dumps(asdict(Record(key, tuple(checked))), indent=1) + "\n")
    own_file(directory, directory / FILE)


def own_file(dist_info: Path, path: Path) -> None:
    """List a file in RECORD, so that `pip uninstall` takes it away too."""
    listed = dist_info / "RECORD"
    line = f"{dist_info.name}/{path.name},,\n"
    text = listed.read_text()
    if line not in text:
        listed.write_text(text.rstrip("\n") + "\n" + line)
