"""Decisions about who is in the cluster: mingle, gossip, heartbeats, suspicion."""
