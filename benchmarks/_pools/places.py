"""Numbers that the benchmark, its clients and its workers agree on, each in a process of its own."""

AT_ONCE = 1000  # coroutines that wait together
