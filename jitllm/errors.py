"""The errors a user can meet. The text of each is one sentence: which thing, what it was, what is
allowed, what to do. The command line prints it after `jitllm: `; nothing here is a traceback."""

import errno
import re


class JitllmError(Exception):
    """An operation failed; the command line exits with `exit_code`."""

    exit_code = 1

    @property
    def typed(self) -> str:
        """The sentence in the words of a command line."""
        return str(self)


class UsageError(JitllmError):
    """A flag or an argument cannot mean anything."""

    exit_code = 2


class SettingError(UsageError):
    """A setting has a value that it cannot have, or is what to change. The sentence calls it
    `name`, as Python and requests do, and `typed` as a command line does: `top_p`, `-top-p`."""

    def __init__(self, name: str, message: str):
        super().__init__(message)
        self.name = name

    @property
    def typed(self) -> str:
        flag = "-" + self.name.replace("_", "-")
        return re.sub(rf"(?<![\w-]){self.name}(?!\w)", flag, str(self))


class FormatError(JitllmError):
    """A file (GGUF, container) is damaged, truncated or not what its name says."""


class UnsupportedError(JitllmError):
    """A well-formed model asks for something outside the tables (architecture, qtype, ...)."""


class NoRoomError(JitllmError):
    """A disk, or a user's share of it, is full. `what` is the sentence without its remedy."""

    ERRNOS = (errno.ENOSPC, errno.EDQUOT)

    def __init__(self, what: str):
        super().__init__(f"{what}; free some, or name a file on another disk")
        self.what = what


class BudgetError(JitllmError):
    """A budget that cannot be held. `smallest_bytes` is the smallest one that can."""

    def __init__(self, message: str, smallest_bytes: int):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class DeviceError(JitllmError):
    """A device that was named is not there or cannot be used."""


class ChatTemplateError(JitllmError):
    """A chat template refuses these messages, or is itself refused."""
