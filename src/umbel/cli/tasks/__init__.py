"""Commands about tasks and queues."""
