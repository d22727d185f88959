"""One figure a file: `draw(rows)` makes it of rows alone, fresh ones or those that were committed."""
