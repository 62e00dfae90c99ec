"""The exceptions of the package. A message says what was expected, what came and what to do."""

from collections.abc import Sequence


def listing(head: str, problems: Sequence[str]) -> str:
    """One sentence for one problem, a bullet each for several.

    >>> listing("the plan cannot work", ["bounds must rise, got (0, 0)"])
    'the plan cannot work: bounds must rise, got (0, 0)'
    """
    if len(problems) == 1:
        return f"{head}: {problems[0]}"
    return "\n- ".join([f"{head}:", *problems])


class SpdError(Exception):
    """Base of every error the package raises on purpose."""

    exit_code = 1


class ConfigError(SpdError, ValueError):
    """The user's configuration or arguments cannot work."""

    exit_code = 2


class PlanError(SpdError, ValueError):
    """A stage plan is not consistent in itself or with the target."""

    exit_code = 2


class CheckpointError(SpdError, ValueError):
    """A file is missing, damaged, or belongs to another target."""

    exit_code = 2


class ScheduleError(SpdError):
    """A trace breaks the rules of the schedule."""


class CommError(SpdError):
    """A rank died, stalled, or disagrees with its peers."""


class RanksFailedError(SpdError):
    """What ended the ranks that this process started, and the exit code that says so."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CompatError(SpdError):
    """A dependency is not the version the patches were written for."""


class AgreementError(SpdError):
    """Served acceptance is not what the training forward says of the same texts."""
