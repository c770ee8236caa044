"""Audits: spec → case → plan (cells) → run (workers) → verdict (summary.json)."""
