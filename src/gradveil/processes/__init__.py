"""Worker processes and the scheduler that gives them work."""
