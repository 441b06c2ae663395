"""Commands about recorded history."""
