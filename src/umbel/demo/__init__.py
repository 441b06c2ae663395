"""The demo: a cluster on this machine that is put through what clusters go through, and judged."""
