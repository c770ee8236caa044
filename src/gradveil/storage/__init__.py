"""What is written to disk: files, updates, run folders, resumable trainings."""
