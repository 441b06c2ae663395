"""A Celery project whose every run is written down: chains and chords that must survive kills."""
