"""A broker for messages together with a second one, the coordination store, for what the first cannot do."""
