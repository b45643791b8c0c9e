"""What a resumed run trains otherwise than the run that it resumes."""

from __future__ import annotations

from pathlib import Path

from zmqtrain.errors import ZmqTrainError
from zmqtrain.topology.changed import changed_settings
from zmqtrain.topology.load import load_topology
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import find_latest

#: The file in a run's directory.
_FILE = "topology.toml"


def changed_since(resume: Path, topology: Topology) -> str:
    """In words, or empty: what ``topology`` sets otherwise than the run whose checkpoint is resumed, if its directory still says
    how it was launched. Each role refuses what must not change (`zmqtrain.train.checkpoint.saving.settings_to_resume`)."""
    try:
        file = find_latest(resume).parent.parent / _FILE
        changed = changed_settings(load_topology(file), topology) if file.is_file() else []
    except (OSError, ZmqTrainError):  # another version's; that there is no checkpoint is found where it is read
        return ""
    return f"note: {file.parent} was trained otherwise: {'; '.join(changed)}" if changed else ""
