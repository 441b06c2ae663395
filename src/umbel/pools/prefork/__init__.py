"""Children that come from a fork server: one crash, one leak, one job."""
