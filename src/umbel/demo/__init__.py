"""The demo: runs a cluster on this machine under load and failures, and checks the results."""
