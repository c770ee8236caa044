"""The papers' tables as audits."""
