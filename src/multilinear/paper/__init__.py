"""One module per table or figure of the paper: runs it, and sets what it finds beside what was published."""
