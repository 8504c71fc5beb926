"""Files: all that touches a disk. Nothing here knows of problems, engines or runs."""
