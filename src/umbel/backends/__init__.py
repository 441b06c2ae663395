"""Result backends: where the results of tasks are stored, or how they are sent back."""
