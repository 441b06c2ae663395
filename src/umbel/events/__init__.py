"""What happened: the vocabulary of events and how they are stamped. Pure."""
