"""ATS: automatic transformation search."""
