"""The one exception of the tools."""

from __future__ import annotations


class Refusal(Exception):
    """The tool will not do what was asked, and has changed nothing (or put back what it changed).

    `code` is the stable name a script can test for (docs/patches.md lists them); `message` is one
    sentence that says what is wrong and what to do; `path` and `line` name the place, if any.
    """

    def __init__(
        self, code: str, message: str, *, path: str | None = None, line: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.path = path
        self.line = line
