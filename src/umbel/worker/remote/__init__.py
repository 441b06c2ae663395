"""Remote control: the mailboxes of a worker, and what commands see and change of it."""
