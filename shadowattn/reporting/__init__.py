"""From measurements to tidy rows, from rows to tables and figures."""
