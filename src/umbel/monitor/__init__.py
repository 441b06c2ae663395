"""What is known of a running cluster, and where it is heard; shared by all monitors."""
