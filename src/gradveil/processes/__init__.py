"""Work in many processes: one rule for when a job starts, is tried again and is given up; and the workers that do it."""
