"""Where task code runs: child processes or this one, behind one interface."""
