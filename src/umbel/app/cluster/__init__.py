"""The cluster as an app sees it: remote control, elections, leases, periodic tasks."""
