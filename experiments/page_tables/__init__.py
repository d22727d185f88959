"""The tables of README and docs: every public function of a module here draws the table of its name from published rows."""
