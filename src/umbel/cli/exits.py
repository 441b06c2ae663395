"""Exit codes, the same for every command, documented in docs/commands.md."""

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
NOBODY_ANSWERED = 69
PARTIAL = 75
