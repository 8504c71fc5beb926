"""Files: all that touches a disk."""
