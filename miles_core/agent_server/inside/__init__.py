"""What runs inside a sandbox; it is bound there read-only and imports nothing of this project."""
