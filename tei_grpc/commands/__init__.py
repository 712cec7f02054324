"""What the command line can do besides serving."""
