"""Pure decisions: no IO, clock, randomness or logging. Time and random numbers are arguments."""
