"""What a mechanism with a proof promises: an upper limit on what anyone can learn from its releases about one image."""
