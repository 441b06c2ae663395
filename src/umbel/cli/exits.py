"""Exit codes of all commands; docs/commands.md documents them."""

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
NOBODY_ANSWERED = 69
PARTIAL = 75
