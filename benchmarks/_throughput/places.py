"""Names that the benchmark, its clients and its tasks agree on, each in a process of its own."""

HOME_VARIABLE = "BENCH_HOME"
URL_VARIABLE = "BENCH_URL"
CONFIRM_VARIABLE = "BENCH_CONFIRM"  # for a peer whose sends are not confirmed by default

TALLY = "tally"
CHILDREN = 2
BATCH = 1000  # tasks that a client hands over at once, where it sends in bulk
