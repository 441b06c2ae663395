"""Decisions about which nodes are in the cluster: gossip, heartbeats, suspicion, observers."""
