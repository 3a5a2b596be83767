"""Other programs' forms of a plan. Each is imported by its own name."""
