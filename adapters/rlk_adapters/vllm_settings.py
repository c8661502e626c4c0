"""What a worker of vLLM is told: where to capture, what, and how much may wait."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

DIRECTORY_VARIABLE = "RLK_CAPTURE_DIR"
LEVEL_VARIABLE = "RLK_CAPTURE_LEVEL"
QUEUE_VARIABLE = "RLK_CAPTURE_QUEUE_MB"
WHEN_FULL_VARIABLE = "RLK_CAPTURE_WHEN_FULL"

Level = Literal["logits", "state"]
WhenFull = Literal["drop", "wait"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """How one worker captures."""

    directory: Path
    level: Level = "logits"
    """``logits``: this rank's columns and their states; ``state``: the states only."""
    queue_mb: int = 512
    """Megabytes of logits that may wait for the side thread."""
    when_full: WhenFull = "drop"
    """``drop``: rows that find no room are counted as lost; ``wait``: the engine waits."""

    def __post_init__(self) -> None:
        for name, kind in (("level", Level), ("when_full", WhenFull)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, but must be one of "
                    f"{', '.join(get_args(kind))}"
                )
        if self.queue_mb < 1:
            raise ValueError(f"queue_mb is {self.queue_mb}, but must be at least 1")

    def to_environment(self) -> dict[str, str]:
        """The variables that make `settings_from_environment` return these settings."""
        return {
            DIRECTORY_VARIABLE: str(self.directory.resolve()),
            LEVEL_VARIABLE: self.level,
            QUEUE_VARIABLE: str(self.queue_mb),
            WHEN_FULL_VARIABLE: self.when_full,
        }


def settings_from_environment() -> CaptureSettings | None:
    """The settings in force, or None where ``RLK_CAPTURE_DIR`` is not set.

    Raises:
        ValueError: If a variable holds something else than it may.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return None
    given = {
        field: os.environ[variable]
        for field, variable in (("level", LEVEL_VARIABLE), ("when_full", WHEN_FULL_VARIABLE))
        if variable in os.environ
    }
    queue = os.environ.get(QUEUE_VARIABLE, "512")
    if not queue.isdecimal():
        raise ValueError(f"{QUEUE_VARIABLE} is {queue!r}, but must be a number of megabytes")
    # the values are checked by the dataclass itself
    return CaptureSettings(directory=Path(directory), queue_mb=int(queue), **given)  # type: ignore[arg-type]
