"""Counters: attacks that know a defense and are built to break it. They may read its public settings."""
